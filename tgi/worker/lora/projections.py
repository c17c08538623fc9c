"""The projections of a decoder that adapters may change: names, shapes, and their parts on a rank, without torch."""

from itertools import accumulate
from typing import NamedTuple

from tgi.microkernel.errors import UserError
from tgi.worker.decoder_config import DecoderConfig
from tgi.worker.distributed.sharding import Shard
from tgi.worker.lora.config import LoraConfig

# The projections of a layer, by their names in decoder_config.py. The projections of a group have the same input, and
# those in one inner tuple are one matrix.
PROJECTION_GROUPS = {
    "attention": (("query", "key", "value"),),
    "output": (("output",),),
    "inner": (("gate",), ("up",)),
    "down": (("down",),),
}
PROJECTIONS = tuple(name for group in PROJECTION_GROUPS.values() for matrix in group for name in matrix)
PANEL = 32  # our CPU kernels pad the sizes of an adapter's matrices to multiples of it
RANK_MULTIPLE = 8  # our GPU kernels pad ranks to multiples of it, so that rows begin at multiples of 16 bytes


class ProjectionShape(NamedTuple):
    """The shape of a projection."""

    inputs: int
    outputs: int


ProjectionShapes = dict[str, ProjectionShape]  # by the PROJECTIONS that a model has
# Projections that are computed together: the number in PROJECTIONS of each, its first column and the number of columns.
Columns = tuple[tuple[int, int, int], ...]
Module = tuple[int, tuple[str, ...]]  # the layer, and the PROJECTIONS that are one matrix in the checkpoint


class ProjectionParts(NamedTuple):
    """The part of each projection that a rank has, by its name; projections that are not named are whole."""

    outputs: dict[str, range]
    inputs: dict[str, range]


def projection_shapes(config: DecoderConfig) -> ProjectionShapes:
    """The shapes of the projections of a model with this config."""
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    found = {
        "query": ProjectionShape(hidden, heads),
        "key": ProjectionShape(hidden, kv_heads),
        "value": ProjectionShape(hidden, kv_heads),
        "output": ProjectionShape(heads, hidden),
        "gate": ProjectionShape(hidden, inner),
        "up": ProjectionShape(hidden, inner),
        "down": ProjectionShape(inner, hidden),
    }
    if config.latent is not None:
        for name in ("query", "key", "value"):
            del found[name]
        found["output"] = ProjectionShape(config.heads * config.latent.value_dim, hidden)
    return found if config.gated else {name: shape for name, shape in found.items() if name != "gate"}


def group_columns(group: str, shapes: ProjectionShapes) -> Columns:
    """The projections of a group that the model has, one after the other."""
    names = [name for matrix in PROJECTION_GROUPS[group] for name in matrix if name in shapes]
    widths = [shapes[name].outputs for name in names]
    starts = accumulate(widths, initial=0)
    return tuple(zip(map(PROJECTIONS.index, names), starts, widths, strict=False))  # the last start is the end


def projection_parts(config: DecoderConfig, shard: Shard) -> ProjectionParts:
    """The parts of the projections of a whole model that the rank of a shard has."""
    queries, keys = (
        range(heads.start * config.head_dim, heads.stop * config.head_dim) for heads in (shard.heads, shard.kv_heads)
    )
    dim = config.head_dim if config.latent is None else config.latent.value_dim
    values = range(shard.heads.start * dim, shard.heads.stop * dim)
    outputs = {"query": queries, "key": keys, "value": keys, "gate": shard.inner, "up": shard.inner}
    return ProjectionParts(outputs, inputs={"output": values, "down": shard.inner})


def adaptable_modules(config: DecoderConfig) -> dict[str, Module]:
    """The modules that adapters may change, by their names in checkpoints. Raises UserError if the model has recurrent
    layers, or layers of several shapes."""
    if config.recurrent is not None:
        raise UserError(
            "The model has recurrent layers, for which adapters are not served. Merge the adapter into the weights, or "
            "start without it."
        )
    if any(layer.head_dim or layer.intermediate or layer.shares is not None for layer in config.layers):
        raise UserError(
            "The model has layers of several shapes, for which adapters are not served. Merge the adapter into the "
            "weights, or start without it."
        )
    if config.qkv_clip is not None or config.streams is not None:
        raise UserError(
            "The model clamps queries, keys and values, or has several streams of hidden states, for which adapters "
            "are not served. Merge the adapter into the weights, or start without it."
        )
    found: dict[str, Module] = {}
    shapes = projection_shapes(config)
    for number, layer in enumerate(config.layers):
        for projection in PROJECTIONS:
            inner = projection in ("gate", "up", "down")
            if projection not in shapes or (layer.routed if inner else layer.sees_images):
                continue
            name = f"model.layers.{number}.{getattr(config.names, projection)}"
            _, others = found.get(name, (number, ()))
            found[name] = number, (*others, projection)
    return found


def padded(size: int, multiple: int = PANEL) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def adapter_bytes(adapter: LoraConfig, config: DecoderConfig, shard: Shard, itemsize: int, packed: bool) -> int:
    """Bytes of the matrices of an adapter on the rank of a shard, in numbers of `itemsize` bytes; `packed`: on our own
    CPU kernels, else on our GPU kernels. Raises UserError if the adapter changes no projection of the model."""
    shapes, parts = projection_shapes(config), projection_parts(config, shard)
    numbers = 0
    for name, (layer, projections) in adaptable_modules(config).items():
        if not adapter.targets(name, layer):
            continue
        for projection in projections:
            shape, rank = shapes[projection], adapter.rank(name)
            inputs = len(parts.inputs.get(projection, range(shape.inputs)))
            outputs = len(parts.outputs.get(projection, range(shape.outputs)))
            if packed:
                inputs, outputs, rank = padded(inputs), padded(outputs), padded(rank)
            else:
                rank = padded(rank, RANK_MULTIPLE)
            numbers += rank * (inputs + outputs)
    if numbers == 0:
        raise UserError(f"{adapter.path} names no projection of the model. Is the adapter made for this model?")
    return numbers * itemsize
