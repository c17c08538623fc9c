"""Plans a deployment: for each division of the devices into ranks and replicas, what the weights take, how many tokens
the KV cache holds, and how many requests fit.

Weights and KV cache are computed by the rules that the worker follows, so they are what it will allocate. What else a
worker allocates is a reserve, which is estimated here and measured by the worker at start.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings import CPU_KV_CACHE_DTYPES, QUANTIZED_AT_LOAD, Settings
from tgi.worker.decoder_config import DecoderConfig, UnsupportedConfig
from tgi.worker.distributed.sharding import Shard, shard_decoder
from tgi.worker.engine import memory
from tgi.worker.kv_cache_sizes import CPU_PAGE_SIZE, GPU_PAGE_SIZE, cpu_head_dim, token_bytes
from tgi.worker.models.config_reader import read_config, read_decoder_config, stored_dtype
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.weight_shapes import matrices, vectors
from tgi.worker.planning.devices import Devices
from tgi.worker.quantization.config import QuantizationConfig, find_config
from tgi.worker.quantization.weight_forms import (
    EMBEDDING,
    CheckpointForms,
    WeightForm,
    form_made_at_load,
    weight_bytes,
)

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_RANKS = 64
INDEX = "model.safetensors.index.json"

# The reserve on a GPU: estimates, larger than what is expected.
CONTEXT_BYTES = 1 << 30  # CUDA's context, libraries and compiled kernels
COLLECTIVE_BYTES = 1 << 30  # NCCL's buffers, where there are several ranks
GRAPH_BYTES = 1 << 28  # CUDA graphs and their pool
LOGIT_COPIES = 6  # float32 [rows, vocabulary]: logits, and what sampling makes of them
# On CPU: libraries, activations, and the pages of embeddings in use.
HOST_BYTES = 1 << 30


class PlannedModel(NamedTuple):
    """A model and how it is served, as far as sizes go."""

    config: DecoderConfig
    dtype: str  # in which it computes
    stored: str  # dtype of the files
    made: str | None  # what --quantize makes of plain weights
    checkpoint: QuantizationConfig | None  # how the files are quantized


class RankMemory(NamedTuple):
    """What one rank allocates, in bytes."""

    weights: int
    reserve: int
    kv_token: int  # of each token of KV cache


@dataclass(frozen=True)
class Split:
    """One division: `replicas` groups of `ranks` devices of a kind."""

    device: str
    ranks: int
    replicas: int
    idle: int  # devices of the kind that are left over
    weight_bytes: int  # of the rank with the most, as the other figures of a device
    reserve_bytes: int
    kv_token_bytes: int
    kv_tokens: int  # of each replica; 0: it does not fit
    longest: int  # tokens of a request at most
    longest_requests: int  # of that length that fit at once, in all replicas together
    typical_requests: int
    problem: str = ""  # why it does not fit

    @property
    def fits(self) -> bool:
        """Whether a replica can serve requests."""
        return not self.problem


@dataclass(frozen=True)
class Plan:
    """What fits on the given devices."""

    model: str
    parameters: int
    dtype: str
    weights: str  # their form, in words
    context: int
    typical_tokens: int
    wanted_requests: int
    splits: tuple[Split, ...]
    recommendation: str


class PlanRequest(NamedTuple):
    """What to plan for."""

    directory: Path
    settings: Settings  # those of the model, the limits and the memory count
    devices: list[Devices]
    typical_tokens: int = 1000
    wanted_requests: int = 16  # of typical length, on each replica


def make_plan(request: PlanRequest) -> Plan:
    """The plan. Raises UserError if the model cannot be planned from its config.json."""
    model = read_planned_model(request.directory, request.settings)
    splits = tuple(split for devices in request.devices for split in _splits(model, devices, request))
    parts = shard_decoder(model.config, 0, 1)
    stored = {vector.name: vector.numbers for vector in vectors(model.config, parts)}
    return Plan(
        model=str(request.settings.model_id or request.directory),
        parameters=sum(matrix.local_numbers for matrix in matrices(model.config, parts)) + sum(stored.values()),
        dtype=model.dtype,
        weights=_form_in_words(model),
        context=model.config.context_length,
        typical_tokens=request.typical_tokens,
        wanted_requests=request.wanted_requests,
        splits=splits,
        recommendation=_recommend(model, splits, request),
    )


def read_planned_model(directory: Path, settings: Settings) -> PlannedModel:
    """The model of a directory, of which only config.json and the config of quantization are read. Raises UserError if
    its sizes do not follow from them."""
    config = read_config(directory)
    stored = stored_dtype(config)
    dtype = stored if settings.dtype == "auto" else settings.dtype
    for name in (stored, dtype):
        if name not in ITEM_SIZES:
            raise UserError(f"dtype {name!r} is not supported; choose one of {', '.join(ITEM_SIZES)} with --dtype.")
    decoder = _read_decoder(directory, config)
    found, asked = find_config(directory, config), settings.quantize
    made = QUANTIZED_AT_LOAD.get(asked or "")
    if asked == "fp8" and found is not None:
        made = None  # the format of the files
    if asked is not None and made is None and found is None:
        raise UserError(
            f"--quantize {asked} is for weights that are quantized already, and those in {directory} are not. Choose "
            "int8 or int4, which are made at load, or leave out --quantize."
        )
    longest = decoder.context_length
    if (settings.max_total_tokens or 0) > longest:
        raise UserError(
            f"`max_total_tokens` is {settings.max_total_tokens}, but the model's sequences have at most {longest} "
            "tokens. Lower --max-total-tokens or leave it out."
        )
    return PlannedModel(decoder, dtype, stored, made, found)


def rank_memory(model: PlannedModel, shard: Shard, device: Devices, settings: Settings) -> RankMemory:
    """What a rank with this shard allocates on a device of this kind. Raises UserError for settings that are not for
    the device."""
    config = model.config
    if settings.kv_cache_dtype is not None and (settings.kv_cache_dtype in CPU_KV_CACHE_DTYPES) != device.is_cpu:
        raise UserError(f"--kv-cache-dtype {settings.kv_cache_dtype} is not for {device.name}. Leave it out.")
    if model.made == "fp8" and not device.float8:
        raise UserError(f"--quantize fp8 makes weights 8-bit floats, which {device.name} does not multiply.")
    matrix_bytes = sum(matrix_sizes(model, shard, device).values())
    vector_bytes = sum(
        vector.local_numbers * (4 if vector.norm or device.is_cpu else ITEM_SIZES[model.dtype])
        for vector in vectors(config, shard)
    )
    kv_dtype = settings.kv_cache_dtype or model.dtype
    kv_token = token_bytes(
        layers=len(config.layers),
        kv_heads=len(shard.kv_heads),
        stored_dim=cpu_head_dim(config.head_dim) if device.is_cpu else config.head_dim,
        itemsize=ITEM_SIZES.get(kv_dtype, 1),
        scaled=kv_dtype == "int8",
    )
    return RankMemory(matrix_bytes + vector_bytes, _reserve(model, shard, device, settings), kv_token)


def matrix_sizes(model: PlannedModel, shard: Shard, device: Devices) -> dict[str, int]:
    """Bytes of the shard's part of each matrix, by name: on CPU as our own kernels hold them, without an embedding that
    is not the output head too, whose rows are read from the mapped file."""
    config, item = model.config, ITEM_SIZES[model.dtype]
    forms = None if model.checkpoint is None else CheckpointForms(model.checkpoint, device.float8)
    listed = list(matrices(config, shard))
    stored_outputs: Counter[str] = Counter()
    for matrix in listed:
        stored_outputs[matrix.name] += matrix.outputs
    found: Counter[str] = Counter()
    for matrix in listed:
        is_embedding = matrix.name == EMBEDDING and not config.tied
        if is_embedding and device.is_cpu:
            continue
        form: WeightForm | None = None
        if matrix.quantizable:
            outputs, inputs = stored_outputs[matrix.name], matrix.inputs
            form = None if forms is None else forms.of_layer(matrix.name, outputs, inputs)
            if form is None and model.made is not None:
                form = form_made_at_load(model.made, matrix.name, outputs, inputs)
        # Our CPU kernels widen 16-bit weights in products, and the embedding keeps its type.
        as_stored = is_embedding or (device.is_cpu and model.dtype == "float32")
        plain = ITEM_SIZES[model.stored] if form is None and as_stored else item
        found[matrix.name] += weight_bytes(form, matrix.local_outputs, matrix.local_inputs, matrix.inputs, plain)
    return dict(found)


def _read_decoder(directory: Path, config: dict[str, Any]) -> DecoderConfig:
    try:
        if config["model_type"] in FAMILIES:
            return _require_sizes(read_decoder_config(config))
        reason = f"model_type {config['model_type']!r}"
    except UnsupportedConfig as error:
        reason = str(error)
    except KeyError as error:
        raise UserError(f"{directory}/config.json has no {error}, which {config['model_type']} needs.") from error
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError) as error:
        raise UserError(f"{directory}/config.json does not describe a model: {error}. Fetch it again.") from error
    size = _indexed_size(directory)
    told = "" if size is None else f" Its index says that the weights take {size / 1e9:.2f} GB as stored."
    raise UserError(
        f"The model in {directory} ({reason}) runs through transformers, on one device, and cannot be planned from its "
        f"config.json.{told}"
    )


def _require_sizes(config: DecoderConfig) -> DecoderConfig:
    """The config. Raises ValueError unless its sizes are numbers above 0."""
    for name in ("vocab_size", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "context_length"):
        size = getattr(config, name)
        if not isinstance(size, int) or size <= 0:
            raise ValueError(f"{name} is {size!r}, but a whole number above 0 is expected")
    return config


def _indexed_size(directory: Path) -> int | None:
    """The bytes of all weights that the index of the files names; None if there is none."""
    try:
        return int(json.loads((directory / INDEX).read_text())["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _reserve(model: PlannedModel, shard: Shard, device: Devices, settings: Settings) -> int:
    """An estimate of what a rank allocates besides weights and KV cache."""
    if device.is_cpu:
        return HOST_BYTES
    return CONTEXT_BYTES + (COLLECTIVE_BYTES if shard.ranks > 1 else 0) + _activations(model, shard, settings)


def _activations(model: PlannedModel, shard: Shard, settings: Settings) -> int:
    """An estimate for the largest step: of each token the residual stream and its copies, queries, keys and values, and
    the inner columns of an MLP; of each row the logits; and the graphs."""
    config = model.config
    tokens, rows = memory.max_prefill_tokens(settings, "cuda"), memory.max_batch_size(settings, "cuda")
    experts = config.experts
    inner = max(len(shard.inner), 0 if experts is None else experts.top_k * len(shard.expert_inner))
    attention = (2 * len(shard.heads) + 2 * len(shard.kv_heads)) * config.head_dim
    token = ITEM_SIZES[model.dtype] * (6 * config.hidden + 2 * attention + 3 * inner)
    return tokens * token + LOGIT_COPIES * rows * config.vocab_size * 4 + GRAPH_BYTES


def _splits(model: PlannedModel, devices: Devices, request: PlanRequest) -> list[Split]:
    """The splits over the devices of one kind: by powers of two and divisors of their number, among which the model can
    be divided."""
    found = []
    for ranks in range(1, min(devices.number, MAX_RANKS) + 1):
        if ranks & (ranks - 1) and devices.number % ranks:
            continue
        try:
            shards = [shard_decoder(model.config, rank, ranks) for rank in range(ranks)]
        except UserError:
            continue
        found.append(_split(model, shards, devices, request))
    return found


def _split(model: PlannedModel, shards: list[Shard], devices: Devices, request: PlanRequest) -> Split:
    settings, ranks = request.settings, len(shards)
    needs = [rank_memory(model, shard, devices, settings) for shard in shards]
    replicas, idle = divmod(devices.number, ranks)
    most = RankMemory(*(max(column) for column in zip(*needs, strict=True)))
    none = Split(
        devices.name, ranks, replicas, idle, most.weights, most.reserve, most.kv_token, 0, 0, 0, 0,
    )  # fmt: skip
    page = CPU_PAGE_SIZE if devices.is_cpu else GPU_PAGE_SIZE
    left = [_cache_memory(model, shard, need, devices, settings) for shard, need in zip(shards, needs, strict=True)]
    # As many pages as every rank has memory for.
    pages = [
        min(getattr(one, name) // (need.kv_token * page) for one, need in zip(left, needs, strict=True))
        for name in ("default", "available")
    ]
    usable = devices.bytes * (1.0 if devices.is_cpu else settings.cuda_memory_fraction)
    if most.weights + most.reserve >= usable:
        needed = f"weights and reserve take {(most.weights + most.reserve) / 1e9:.1f} GB of each device"
        return replace(none, problem=f"with {_ranks(ranks)}, {needed}, which has {usable / 1e9:.1f} GB")
    page_bytes = most.kv_token * page
    required = memory.CacheRequirements(
        context=model.config.context_length,
        page_size=page,
        page_bytes=page_bytes,
        vocab_size=model.config.vocab_size,
        dtype=model.dtype,
        device="cpu" if devices.is_cpu else "cuda",
    )
    try:
        limits = memory.choose_limits(settings, required, memory.CacheMemory(*(n * page_bytes for n in pages)))
    except UserError as error:
        return replace(none, problem=str(error))
    capacity, rows = limits.max_batch_total_tokens, limits.max_batch_size

    def at_once(length: int) -> int:
        return replicas * min(rows, limits.pages // -(-length // page))

    typical = min(request.typical_tokens, limits.max_total_tokens)
    return replace(
        none,
        kv_tokens=capacity,
        longest=limits.max_total_tokens,
        longest_requests=at_once(limits.max_total_tokens),
        typical_requests=at_once(typical),
    )


def _cache_memory(
    model: PlannedModel, shard: Shard, need: RankMemory, devices: Devices, settings: Settings
) -> memory.CacheMemory:
    """The memory of a rank for the KV cache."""
    if devices.is_cpu:
        free = max(0, devices.bytes - need.weights - need.reserve)
        whole = memory.cache_memory_on_host(free * shard.ranks)  # ranks on one host share its memory
        return memory.CacheMemory(whole.default // shard.ranks, whole.available // shard.ranks)
    activations = _activations(model, shard, settings)
    free = devices.bytes - need.weights - (need.reserve - activations)
    return memory.cache_memory_on_cuda(free, devices.bytes, settings, activations)


def _recommend(model: PlannedModel, splits: tuple[Split, ...], request: PlanRequest) -> str:
    """For each kind of device the fewest ranks with room for the wanted requests; or why nothing fits."""
    fitting = [split for split in splits if split.fits]
    if not fitting:
        most_divided = max(splits, key=lambda split: split.ranks)
        return f"Nothing fits: {most_divided.problem.rstrip('.')}. {_what_would_fit(model, request)}"
    kinds = dict.fromkeys(split.device for split in fitting)
    of_kinds = ([split for split in fitting if split.device == kind] for kind in kinds)
    return " ".join(_recommend_one(of_kind, model, request) for of_kind in of_kinds)


def _recommend_one(fitting: list[Split], model: PlannedModel, request: PlanRequest) -> str:
    """The sentence about the devices of one kind."""
    wanted = request.wanted_requests
    roomy = [split for split in fitting if split.typical_requests >= wanted * split.replicas]
    if roomy:
        split, why = roomy[0], f"the fewest ranks with room for {wanted} requests on each replica"
    else:
        split = max(fitting, key=lambda split: split.typical_requests // split.replicas)
        why = f"the most room, though less than for {wanted} requests on each replica"
    shape = f"{split.replicas} replica{'s' * (split.replicas != 1)} of {_ranks(split.ranks)} on {split.device}"
    flags = f" (--num-shard {split.ranks})" if split.ranks > 1 else ""
    most = request.settings.max_total_tokens or model.config.context_length
    limit = f"; requests of up to {split.longest:,} of {most:,} tokens" if split.longest < most else ""
    idle = f"; {split.idle} left over" if split.idle else ""
    at_once = f"{split.typical_requests:,} requests of {min(request.typical_tokens, split.longest):,} tokens at once"
    return f"Recommended: {shape}{flags}, {why}: {at_once}{limit}{idle}."


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _what_would_fit(model: PlannedModel, request: PlanRequest) -> str:
    """What would fit instead: fewer bits on the same devices, or more devices of the first kind."""
    proposals = []
    smaller = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}.get(model.made, ())
    for form in smaller if model.checkpoint is None else ():
        changed = model._replace(made=form)
        fitting = [split for one in request.devices for split in _splits(changed, one, request) if split.fits]
        if fitting:
            split = fitting[0]
            proposals.append(f"--quantize {form} with {_ranks(split.ranks)} on {split.device}")
            break
    first = request.devices[0]
    more = [split for split in _splits(model, first._replace(number=MAX_RANKS), request) if split.fits]
    if more and more[0].ranks > first.number:
        proposals.append(f"{more[0].ranks}x{first.name}")
    if not proposals:
        return "No smaller type and no number of these devices among which the model can be divided would be enough."
    return f"What would fit: {', or '.join(proposals)}."


def _form_in_words(model: PlannedModel) -> str:
    if model.checkpoint is not None:
        return f"{model.checkpoint.method} as stored"
    return "as stored" if model.made is None else f"quantized at load to {model.made}"
