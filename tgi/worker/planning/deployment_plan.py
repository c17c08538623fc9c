"""Plans a deployment: for each division of the devices into ranks and replicas, what the weights take, how many tokens
the KV cache holds, and how many requests fit.

Weights and KV cache are computed by the rules that the worker follows, so they are what it will allocate. What else a
worker allocates is a reserve, which is estimated here and measured by the worker at start.
"""

import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tgi.hub.gguf_import import vision_part
from tgi.hub.model_config import T5_CONTEXT, T5_FAMILY, is_draft_head
from tgi.hub.pooling import ENCODERS, MODULES, ends_in_vector, read_pooling_config, text_positions
from tgi.hub.vision_towers import vision_family
from tgi.hub.weight_files import OF_AUDIO, OF_DECODER, StoredTensor, choose_weight_files, stored_tensors
from tgi.microkernel.errors import UserError, reading
from tgi.microkernel.host.interpreter import require_packages
from tgi.microkernel.settings.table import MTP, QUANTIZED_AT_LOAD, Settings
from tgi.worker.decoder_config import DecoderConfig, HeadShape, LayerConfig, TensorNames, UnsupportedConfig
from tgi.worker.distributed.sharding import Shard, local_config, shard_decoder, whole_model
from tgi.worker.engine import memory
from tgi.worker.kv_cache_sizes import CPU_PAGE_SIZE, GPU_PAGE_SIZE, cpu_head_dim, state_tensor_bytes, token_bytes
from tgi.worker.lora.config import LoraConfig
from tgi.worker.lora.projections import adapter_bytes
from tgi.worker.models.config_reader import (
    read_config,
    read_decoder_config,
    read_pooled_config,
    require_sizes,
    stored_dtype,
)
from tgi.worker.models.draft_head_config import DraftHeadConfig, mtp_configs, read_eagle3_config
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.t5_config import read_t5_config, t5_shapes
from tgi.worker.models.weight_shapes import head_matrices, head_vectors, matrices, vectors
from tgi.worker.planning.devices import Devices
from tgi.worker.quantization.config import GGUF_METHOD, QuantizationConfig, find_config
from tgi.worker.quantization.weight_forms import (
    EMBEDDING,
    CheckpointForms,
    PackedForms,
    StoredForms,
    WeightForm,
    common_form,
    form_made_at_load,
    weight_bytes,
)
from tgi.worker.tensor_shapes import MatrixShape, VectorShape

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_RANKS = 64
INDEX = "model.safetensors.index.json"
GGUF_PACKAGES = ("gguf", "numpy")

# The reserve on a GPU: estimates, larger than what is expected.
CONTEXT_BYTES = 1 << 30  # CUDA's context, libraries and compiled kernels
COLLECTIVE_BYTES = 1 << 30  # NCCL's buffers, where there are several ranks
GRAPH_POOL_BYTES = 1 << 28  # which the CUDA graphs share
LOGIT_COPIES = 6  # float32 [rows, vocabulary]: logits, and what sampling makes of them
# On CPU: libraries, activations, and the pages of embeddings in use.
HOST_BYTES = 1 << 30


class PlannedModel(NamedTuple):
    """A model and how it is served, as far as sizes go."""

    config: DecoderConfig
    dtype: str  # in which it computes
    stored: str  # dtype of the files
    made: str | None  # what --quantize makes of plain weights
    checkpoint: QuantizationConfig | None = None  # how the files are quantized
    # Of weights in the bits of a GGUF file: the tensors that its import writes.
    tensors: dict[str, StoredTensor] | None = None
    tower: int = 0  # bytes of a vision tower; 0: it has none, or its weights are not here
    head: DraftHeadConfig | None = None  # of a head that drafts, whose decoder is `config`
    # Of an encoder, or an encoder-decoder model, the numbers of its weights: `config` has what limits depend on.
    numbers: int = 0
    text_tokens: int = 0  # of a model that ends in a vector, which has no KV cache: a text's most by default

    def matrices(self, shard: Shard) -> Iterator[MatrixShape]:
        """Its matrices; a head is whole on each rank."""
        return matrices(self.config, shard) if self.head is None else head_matrices(self.head)

    def vectors(self, shard: Shard) -> Iterator[VectorShape]:
        """Its norms and biases."""
        return vectors(self.config, shard) if self.head is None else head_vectors(self.head)

    def forms(self, device: Devices) -> StoredForms | None:
        """The forms of the layers in the files; None: all are plain."""
        if self.tensors is not None:
            return PackedForms(self.tensors, exact=self.dtype == "float32", cpu=device.is_cpu)
        return None if self.checkpoint is None else CheckpointForms(self.checkpoint, device.float8, device.is_cpu)


class PlannedDeployment(NamedTuple):
    """What each replica loads."""

    served: PlannedModel
    draft: PlannedModel | None = None  # whole on each rank
    adapters: tuple[LoraConfig, ...] = ()

    @property
    def context(self) -> int:
        """The longest sequence that the models can compute."""
        drafts = self.draft is not None and self.draft.head is None  # a head follows the model
        return min(model.config.context_length for model in (self.served, self.draft if drafts else None) if model)


class RankMemory(NamedTuple):
    """What one rank allocates, in bytes."""

    weights: int
    adapters: int
    reserve: int
    kv_token: int  # of each token of KV cache
    state: int = 0  # of each slot of recurrent state


@dataclass(frozen=True)
class Split:
    """One division: `replicas` groups of `ranks` devices of a kind."""

    device: str
    ranks: int
    replicas: int
    idle: int  # devices of the kind that are left over
    command: str  # that runs it
    weight_bytes: int  # of the rank with the most, as the other figures of a device
    adapter_bytes: int
    reserve_bytes: int
    kv_token_bytes: int  # of each token of a request of the longest length
    kv_tokens: int = 0  # of each replica; 0: it does not fit
    longest: int = 0  # tokens of a request at most
    longest_requests: int = 0  # of that length that fit at once, on each replica
    typical_requests: int = 0  # the same of typical length
    all_kv_tokens: int = 0  # of all replicas together
    all_longest_requests: int = 0
    all_typical_requests: int = 0
    problem: str = ""  # why it does not fit

    @property
    def fits(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Plan:
    """What fits on the given devices."""

    model: str
    parameters: int
    dtype: str
    weights: str  # their form, in words
    draft_parameters: int  # 0: there is no draft model
    adapters: int  # their number
    context: int
    typical_tokens: int
    wanted_requests: int
    splits: tuple[Split, ...]
    recommendation: str
    commands: tuple[str, ...]  # that run what is recommended, one for each kind of device


class PlanRequest(NamedTuple):
    """What to plan for. Models are directories or GGUF files, adapters directories."""

    model: Path
    settings: Settings  # those of the model, the limits and the memory count
    devices: list[Devices]
    typical_tokens: int = 1000
    wanted_requests: int = 16  # of typical length, on each replica
    draft: Path | None = None
    adapters: tuple[Path, ...] = ()
    replicas: int | None = None  # None: as many as there are devices for
    arguments: tuple[str, ...] = ()  # of `tgi up`, besides those of a split


def make_plan(request: PlanRequest) -> Plan:
    """The plan. Raises UserError if a model or adapter cannot be planned from its configuration, or if there are fewer
    devices than the ranks and replicas that are asked for."""
    if request.settings.num_shard == 0:
        raise UserError("Invalid argument: `num_shard` cannot be < 1")
    deployment = read_planned_deployment(request)
    splits = tuple(split for devices in request.devices for split in _splits(deployment, devices, request))
    if not splits:
        raise _too_few_devices(request)
    model, recommended = deployment.served, _recommended(splits, request)
    return Plan(
        model=str(request.settings.model_id or request.model),
        parameters=_parameters(model),
        dtype=model.dtype,
        weights=_form_in_words(model),
        draft_parameters=0 if deployment.draft is None else _parameters(deployment.draft),
        adapters=len(deployment.adapters),
        context=deployment.context,
        typical_tokens=request.typical_tokens,
        wanted_requests=request.wanted_requests,
        splits=splits,
        recommendation=" ".join(_why(split, deployment, request) for split in recommended)
        or _why_nothing(splits, deployment, request),
        commands=tuple(split.command for split in recommended),
    )


def read_planned_deployment(request: PlanRequest) -> PlannedDeployment:
    """The models and adapters of a request. Raises UserError if their sizes do not follow from their configuration."""
    settings = request.settings
    served = read_planned_model(request.model, settings)
    draft, of_draft = None, replace(settings, dtype=served.dtype, quantize=settings.draft_quantize)
    if settings.draft_model_id == MTP:  # whether the checkpoint has the layer is not known
        head = mtp_configs(served.config)[0]
        draft = served._replace(config=head.decoder, head=head, tensors=None, tower=0)
    elif request.draft is not None and request.draft.is_dir() and is_draft_head(request.draft):
        head = read_eagle3_config(request.draft, served.config)
        made = QUANTIZED_AT_LOAD.get(of_draft.quantize or "")
        draft = PlannedModel(head.decoder, served.dtype, served.dtype, made, head=head)
    elif request.draft is not None:
        draft = read_planned_model(request.draft, of_draft)
    if (served.numbers or served.text_tokens) and request.adapters:
        kind = "models that end in a vector" if served.text_tokens else "encoder-decoder models"
        raise UserError(f"--lora-adapters is not for {kind}, as that in {request.model}. Leave it out.")
    found = PlannedDeployment(served, draft, tuple(LoraConfig(directory) for directory in request.adapters))
    memory.require_context(settings, found.context)
    return found


def read_planned_model(path: Path, settings: Settings) -> PlannedModel:
    """The model of a directory, of which only config.json and the config of quantization are read, or of a GGUF file.
    Raises UserError if its sizes do not follow from them."""
    with reading(path):
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            config, tensors, tower, text_tokens = _read_gguf(path, settings)
            found = None
        else:
            config = read_config(path)
            pooling = read_pooling_config(path)
            text_tokens = 0 if pooling is None else pooling.max_tokens
            found, tensors, tower = find_config(path, config), None, None
            if found is not None and found.method == GGUF_METHOD:  # a directory that was imported
                found, tensors = None, stored_tensors(path)
    stored = stored_dtype(config)
    dtype = stored if settings.dtype == "auto" else settings.dtype
    for name in (stored, dtype):
        if name not in ITEM_SIZES:
            raise UserError(f"dtype {name!r} is not supported; choose one of {', '.join(ITEM_SIZES)} with --dtype.")
    if config["model_type"] in T5_FAMILY:
        return _planned_t5(path, config, dtype, stored, settings)
    if text_tokens:
        _refuse_settings(path, settings, "models that end in a vector", {})
    if config["model_type"] in ENCODERS:
        return _planned_encoder(path, config, dtype, stored)._replace(text_tokens=text_tokens)
    decoder = _read_decoder(path, config, pooled=text_tokens > 0)
    decoder = replace(decoder, tied=True) if text_tokens else decoder  # a vector needs no output head
    asked = settings.quantize
    made = QUANTIZED_AT_LOAD.get(asked or "")
    if asked == "fp8" and found is not None:
        made = None  # the format of the files
    if asked is not None and made is None and found is None:
        raise UserError(
            f"--quantize {asked} is for weights that are quantized already, and those in {path} are not. Choose "
            "int8 or int4, which are made at load, or leave out --quantize."
        )
    numbers = _tower_numbers(path, settings) if tower is None else tower
    tower_bytes = numbers * ITEM_SIZES[dtype]
    return PlannedModel(decoder, dtype, stored, made, found, tensors, tower_bytes, text_tokens=text_tokens)


def _refuse_settings(path: Path, settings: Settings, kind: str, further: dict[str, bool]) -> None:
    """Raises UserError for a setting that such models do not have. `further`: ones of the kind, and whether they are
    given."""
    refused = {
        "--quantize": settings.quantize is not None,
        "--kv-cache-dtype": settings.kv_cache_dtype is not None,
        "--draft-model-id": settings.draft_model_id is not None,
        "--num-shard": (settings.num_shard or 1) > 1,
    }
    for option, given in (*refused.items(), *further.items()):
        if given:
            raise UserError(f"{option} is not for {kind}, as that in {path}. Leave it out.")


def _planned_t5(path: Path, config: dict[str, Any], dtype: str, stored: str, settings: Settings) -> PlannedModel:
    """An encoder-decoder model. All its weights have the type in which it computes, and pages hold keys and values of
    cross-attention at the positions of an input, those of self-attention at the decoder's."""
    _refuse_settings(
        path,
        settings,
        "encoder-decoder models",
        {"--dtype float16": dtype == "float16", "--quantize": config.get("quantization_config") is not None},
    )
    try:
        numbers = read_t5_config(config)
        tied = config.get("tie_word_embeddings", True) is not False
        shapes = dict(t5_shapes(numbers, tied))
        decoder = DecoderConfig(
            vocab_size=numbers.vocab_size,
            hidden=numbers.hidden,
            intermediate=numbers.intermediate,
            heads=numbers.heads,
            kv_heads=numbers.heads,
            head_dim=numbers.head_dim,
            context_length=T5_CONTEXT,
            layers=(LayerConfig(rope=None),) * numbers.decoder_layers,
            ropes=(),
            tied=tied,
            names=TensorNames(),
            norm_epsilon=numbers.epsilon,
        )
        return PlannedModel(
            require_sizes(decoder), dtype, stored, None, numbers=sum(math.prod(shape) for shape in shapes.values())
        )
    except KeyError as error:
        raise UserError(f"{path} has no {error}, which {config['model_type']} needs.") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} does not describe a model: {error}. Fetch it again.") from error


def _planned_encoder(path: Path, config: dict[str, Any], dtype: str, stored: str) -> PlannedModel:
    """An encoder, without the head of a classifier. All its weights have the type in which it computes."""
    try:
        hidden, inner, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
        vocabulary, context, layers = config["vocab_size"], text_positions(config), config["num_hidden_layers"]
        decoder = DecoderConfig(
            vocab_size=vocabulary,
            hidden=hidden,
            intermediate=inner,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            context_length=context,
            layers=(),
            ropes=(),
            tied=True,
            names=TensorNames(),
            norm_epsilon=0.0,
        )
        if config["model_type"] == "modernbert":  # gated, without biases; the first layer has one norm
            rows, vectors, matrices_of_layer = vocabulary, 2 * layers + 1, hidden * (4 * hidden + 3 * inner)
        else:
            rows = vocabulary + config["max_position_embeddings"] + config.get("type_vocab_size", 2)
            vectors, matrices_of_layer = 9 * layers + 2, hidden * (4 * hidden + 2 * inner) + inner
        numbers = (rows + vectors) * hidden + layers * matrices_of_layer
        return PlannedModel(require_sizes(decoder), dtype, stored, None, numbers=numbers)
    except KeyError as error:
        raise UserError(f"{path} has no {error}, which {config['model_type']} needs.") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path} does not describe a model: {error}. Fetch it again.") from error


def _tower_numbers(path: Path, settings: Settings) -> int:
    """Of the vision tower of a model directory, by its weight files."""
    if not settings.media_workers or vision_family(path) is None:
        return 0
    if not choose_weight_files([one.name for one in path.iterdir()]):
        return 0
    others = (tensor for name, tensor in stored_tensors(path).items() if not name.startswith((*OF_DECODER, *OF_AUDIO)))
    return sum(math.prod(tensor.shape) for tensor in others)


def _read_gguf(path: Path, settings: Settings) -> tuple[dict[str, Any], dict[str, StoredTensor], int, int]:
    """The config.json of the text model that the import of a GGUF file makes, its tensors, how many numbers its vision
    part has, and PlannedModel.text_tokens."""
    require_packages(GGUF_PACKAGES, "Planning with a GGUF file")
    from tgi.hub.gguf.architecture import plan_conversion
    from tgi.hub.gguf.projector import plan_vision
    from tgi.hub.gguf.reader import read_gguf
    from tgi.hub.gguf.weights import packed_tensors

    file = read_gguf(path)
    plan = plan_conversion(file)
    images = vision_part(path, settings.mmproj) if settings.media_workers else None
    vision = [] if images is None else plan_vision(read_gguf(images), file, plan.config).tensors
    packed = {} if plan.plain else packed_tensors(file, plan.tensors)
    text_tokens = text_positions(plan.config) if ends_in_vector(plan.config, MODULES in plan.files) else 0
    return plan.config, packed, sum(math.prod(tensor.shape) for tensor in vision), text_tokens


def _parameters(model: PlannedModel) -> int:
    if model.numbers:
        return model.numbers
    whole = shard_decoder(model.config, 0, 1)
    stored = {vector.name: vector.numbers for vector in model.vectors(whole)}
    return sum(matrix.local_numbers for matrix in model.matrices(whole)) + sum(stored.values())


def rank_memory(deployment: PlannedDeployment, shard: Shard, device: Devices, settings: Settings) -> RankMemory:
    """What a rank with this shard of the served model allocates on a device of this kind. Raises UserError for settings
    that are not for the device, or an adapter that is not for the model."""
    served, draft = deployment.served, deployment.draft
    weights, kv_token = _model_memory(served, shard, device, settings)
    if draft is not None:
        draft_weights, draft_kv = _model_memory(draft, whole_model(draft.config), device, settings)
        weights, kv_token = weights + draft_weights, kv_token + draft_kv
    adapters = sum(
        adapter_bytes(adapter, served.config, shard, ITEM_SIZES[served.dtype], packed=device.is_cpu)
        for adapter in deployment.adapters
    )
    state = _state_bytes(local_config(served.config, shard), ITEM_SIZES[served.dtype])
    reserve = _reserve(deployment, shard, device, settings)
    if served.tower:
        largest = local_config(served.config, shard).image_bytes(ITEM_SIZES[served.dtype])
        reserve += memory.feature_bytes(largest, device.type, settings.max_images)
    return RankMemory(weights + served.tower, adapters, reserve, kv_token, state)


def _state_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of the recurrent state of a request."""
    if config.recurrent is None:
        return 0
    layer = sum(state_tensor_bytes(one.shape, 4 if one.wide else itemsize) for one in config.recurrent.state.values())
    return layer * config.recurrent_layers


def _model_memory(model: PlannedModel, shard: Shard, device: Devices, settings: Settings) -> tuple[int, int]:
    """Bytes of the weights, and of each token of KV cache."""
    config = model.config
    if model.numbers:
        item = ITEM_SIZES[model.dtype]  # with no KV cache where there are no layers
        return model.numbers * item, len(config.layers) * 2 * config.heads * config.head_dim * item
    memory.require_kv_cache_dtype(settings.kv_cache_dtype, device.type)
    if model.made == "fp8" and not device.float8:
        raise UserError(f"--quantize fp8 makes weights 8-bit floats, which {device.name} does not multiply.")
    matrix_bytes = sum(matrix_sizes(model, shard, device).values())
    vector_bytes = sum(
        vector.local_numbers * (4 if vector.norm or device.is_cpu else ITEM_SIZES[model.dtype])
        for vector in model.vectors(shard)
    )
    kv_dtype = settings.kv_cache_dtype or model.dtype
    own = local_config(config, shard)
    kv_token = 0 if model.text_tokens else sum(_layer_bytes(own, shape, kv_dtype, device) for shape in own.head_shapes)
    return matrix_bytes + vector_bytes, kv_token


def _layer_bytes(config: DecoderConfig, shape: HeadShape, kv_dtype: str, device: Devices) -> int:
    """Bytes of a token's keys and values in a layer of this shape."""
    return token_bytes(
        layers=1,
        kv_heads=shape.kv_heads,
        stored_dim=cpu_head_dim(shape.head_dim) if device.is_cpu else shape.head_dim,
        itemsize=ITEM_SIZES.get(kv_dtype, 1),
        scaled=kv_dtype == "int8",
        parts=2 if config.latent is None else 1,
    )


def _layer_sizes(model: PlannedModel, shard: Shard, device: Devices, settings: Settings) -> list[tuple[HeadShape, int]]:
    """CacheRequirements.shapes of a rank."""
    own, kv_dtype = local_config(model.config, shard), settings.kv_cache_dtype or model.dtype
    if len(set(own.head_shapes)) == 1:
        return []
    page = CPU_PAGE_SIZE if device.is_cpu else GPU_PAGE_SIZE
    return [(shape, page * _layer_bytes(own, shape, kv_dtype, device)) for shape in own.head_shapes]


def matrix_sizes(model: PlannedModel, shard: Shard, device: Devices) -> dict[str, int]:
    """Bytes of the shard's part of each matrix, by name: on CPU as our own kernels hold them, without an embedding that
    is not the output head too, whose rows are read from the mapped file."""
    config, item, forms = model.config, ITEM_SIZES[model.dtype], model.forms(device)
    listed = [matrix for matrix in model.matrices(shard) if not (_is_lookup(matrix, config) and device.is_cpu)]
    stored_outputs: Counter[str] = Counter()
    stacks: defaultdict[str, list[MatrixShape]] = defaultdict(list)
    for matrix in listed:
        stored_outputs[matrix.name] += matrix.outputs
        stacks[matrix.stack or f"{matrix.name} alone"].append(matrix)

    def form_of(matrix: MatrixShape) -> WeightForm | None:
        if not matrix.quantizable:
            return None
        shape = matrix.name, stored_outputs[matrix.name], matrix.inputs
        form = None if forms is None else forms.of_layer(*shape)
        return form_made_at_load(model.made, *shape) if form is None and model.made is not None else form

    found: Counter[str] = Counter()
    for stack in stacks.values():
        own = [form_of(matrix) for matrix in stack]
        form = common_form(own, stack[0].inputs)
        for matrix in stack:
            plain = item
            # Our CPU kernels widen 16-bit weights in products, and the embedding keeps its type.
            if not any(own) and (_is_lookup(matrix, config) or (device.is_cpu and model.dtype == "float32")):
                stored = None if forms is None else forms.plain_bytes(matrix.name)
                plain = stored or ITEM_SIZES[model.stored]
            found[matrix.name] += weight_bytes(form, matrix.local_outputs, matrix.local_inputs, matrix.inputs, plain)
    return dict(found)


def _is_lookup(matrix: MatrixShape, config: DecoderConfig) -> bool:
    """Whether this is an embedding that is not the output head too."""
    return (matrix.name == EMBEDDING and not config.tied) or matrix.name == config.names.input_embedding


def _read_decoder(path: Path, config: dict[str, Any], *, pooled: bool) -> DecoderConfig:
    described = path if path.suffix.lower() == ".gguf" else path / "config.json"
    try:
        if config["model_type"] in FAMILIES:
            return require_sizes(read_pooled_config(config) if pooled else read_decoder_config(config))
        reason = f"model_type {config['model_type']!r}"
    except UnsupportedConfig as error:
        reason = str(error)
    except KeyError as error:
        raise UserError(f"{described} has no {error}, which {config['model_type']} needs.") from error
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError) as error:
        raise UserError(f"{described} does not describe a model: {error}. Fetch it again.") from error
    if pooled:
        raise UserError(f"{reason} in {described}: not served in a model that ends in a vector (docs/embeddings.md).")
    size = _indexed_size(path)
    told = "" if size is None else f" Its index says that the weights take {size / 1e9:.2f} GB as stored."
    raise UserError(
        f"The model in {path} ({reason}) runs through transformers, on one device, and cannot be planned from its "
        f"config.json.{told}"
    )


def _indexed_size(directory: Path) -> int | None:
    """The bytes of all weights that the index of the files names; None if there is none."""
    try:
        return int(json.loads((directory / INDEX).read_text())["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _reserve(deployment: PlannedDeployment, shard: Shard, device: Devices, settings: Settings) -> int:
    """An estimate of what a rank allocates besides weights, adapters and KV cache."""
    if device.is_cpu:
        return HOST_BYTES
    return (
        CONTEXT_BYTES
        + (COLLECTIVE_BYTES if shard.ranks > 1 else 0)
        + _activations(deployment, shard, settings, device.bytes)
    )


def _activations(deployment: PlannedDeployment, shard: Shard, settings: Settings, device_bytes: int) -> int:
    """An estimate for the largest step: the models are computed one after the other."""
    draft = deployment.draft
    own = 0 if draft is None else _model_activations(draft, whole_model(draft.config), settings, device_bytes)
    return max(own, _model_activations(deployment.served, shard, settings, device_bytes))


def _model_activations(model: PlannedModel, shard: Shard, settings: Settings, device_bytes: int) -> int:
    """An estimate for the largest step: of each token the residual stream and its copies, queries, keys and values, and
    the inner columns of an MLP; of each row the logits; and the graphs."""
    config = model.config
    tokens, rows = (of(settings, "cuda", device_bytes) for of in (memory.max_prefill_tokens, memory.max_batch_size))
    experts = config.experts
    chosen = 0 if experts is None else experts.top_k
    inner = max(len(shard.inner), chosen * len(shard.expert_inner))
    own = local_config(config, shard)
    attention = max(((2 * own.heads + 2 * kv_heads) * dim for kv_heads, dim in own.head_shapes), default=0)
    token = ITEM_SIZES[model.dtype] * ((6 + chosen) * config.hidden + 2 * attention + 3 * inner)
    return tokens * token + LOGIT_COPIES * rows * config.vocab_size * 4 + GRAPH_POOL_BYTES


def _splits(deployment: PlannedDeployment, devices: Devices, request: PlanRequest) -> Iterator[Split]:
    """The splits over the devices of one kind: by the ranks and replicas that are asked for, else by powers of two and
    divisors of the number of devices, among which the model can be divided."""
    asked, wanted = request.settings.num_shard, request.replicas or 1
    for ranks in range(1, min(devices.number // wanted, MAX_RANKS) + 1) if asked is None else [asked]:
        if (deployment.served.numbers or deployment.served.text_tokens) and ranks > 1:
            continue
        if ranks * wanted > devices.number or (asked is None and ranks & (ranks - 1) and devices.number % ranks):
            continue
        try:
            shards = [shard_decoder(deployment.served.config, rank, ranks) for rank in range(ranks)]
        except UserError:
            if asked is not None:
                raise
            continue
        yield _split(deployment, shards, devices, request)


def _too_few_devices(request: PlanRequest) -> UserError:
    ranks, replicas = request.settings.num_shard or 1, request.replicas or 1
    return UserError(
        f"--devices has fewer than the {replicas * ranks} devices of a kind that {_replicas(replicas)} of "
        f"{_ranks(ranks)} need. Several ranks or replicas of one host are planned as parts of its memory: 2xcpu:32GB "
        "for two on a host with 64 GB.",
        code=2,
    )


def _split(deployment: PlannedDeployment, shards: list[Shard], devices: Devices, request: PlanRequest) -> Split:
    settings, ranks = request.settings, len(shards)
    needs = [rank_memory(deployment, shard, devices, settings) for shard in shards]
    replicas = request.replicas or devices.number // ranks
    most = RankMemory(*(max(column) for column in zip(*needs, strict=True)))
    none = Split(
        devices.name, ranks, replicas, devices.number - ranks * replicas, _command(ranks, replicas, devices, request),
        most.weights, most.adapters, most.reserve, most.kv_token,
    )  # fmt: skip
    usable = devices.bytes * (1.0 if devices.is_cpu else settings.cuda_memory_fraction)
    if most.weights + most.reserve >= usable:
        needed = f"weights and reserve take {(most.weights + most.reserve) / 1e9:.1f} GB of each device"
        return replace(none, problem=f"with {_ranks(ranks)}, {needed}, which has {usable / 1e9:.1f} GB")
    if deployment.served.text_tokens:
        longest = settings.max_input_tokens or settings.max_total_tokens or deployment.served.text_tokens
        slots = memory.max_batch_size(settings, devices.type, devices.bytes)
        return replace(
            none,
            longest=longest,
            longest_requests=slots,
            typical_requests=slots,
            all_longest_requests=replicas * slots,
            all_typical_requests=replicas * slots,
        )
    page = CPU_PAGE_SIZE if devices.is_cpu else GPU_PAGE_SIZE
    left = [_cache_memory(deployment, *each, devices, settings) for each in zip(shards, needs, strict=True)]
    # As many pages as every rank has memory for.
    pages = [
        min(getattr(one, name) // (need.kv_token * page or need.state) for one, need in zip(left, needs, strict=True))
        for name in ("default", "available")
    ]
    page_bytes = most.kv_token * page
    required = memory.CacheRequirements(
        context=deployment.context,
        page_size=page,
        page_bytes=page_bytes,
        vocab_size=deployment.served.config.vocab_size,
        dtype=deployment.served.dtype,
        device=devices.type,
        windows=() if deployment.draft else deployment.served.config.attention_windows,
        shapes=() if deployment.draft else _layer_sizes(deployment.served, shards[0], devices, settings),
        state_bytes=most.state,
    )
    try:
        found = memory.CacheMemory(*(n * required.unit_bytes for n in pages))._replace(device=devices.bytes)
        limits = memory.choose_limits(settings, required, found)
    except UserError as error:
        return replace(none, problem=str(error))
    # The worker loads adapters last, into the memory that the KV cache leaves.
    spare = usable - most.weights - most.reserve - limits.cache_bytes
    if most.adapters > spare:
        lower = "--max-batch-total-tokens" if devices.is_cpu else "--memory-fraction"
        taken = f"adapters take {most.adapters / 1e9:.1f} GB of each device, of which"
        problem = f"with {_ranks(ranks)}, {taken} the KV cache leaves {max(0, spare) / 1e9:.1f} GB: lower {lower}"
        return replace(none, problem=problem)

    def at_once(length: int) -> int:
        return min(limits.max_batch_size, limits.pages // limits.pages_needed(length))

    longest, capacity = limits.max_total_tokens, limits.max_batch_total_tokens
    of_longest, of_typical = at_once(longest), at_once(min(request.typical_tokens, longest))
    return replace(
        none,
        kv_token_bytes=limits.pages * limits.groups[0].page_bytes // capacity,
        kv_tokens=capacity,
        longest=longest,
        longest_requests=of_longest,
        typical_requests=of_typical,
        all_kv_tokens=replicas * capacity,
        all_longest_requests=replicas * of_longest,
        all_typical_requests=replicas * of_typical,
    )


def _command(ranks: int, replicas: int, devices: Devices, request: PlanRequest) -> str:
    """The command line that runs a split."""
    words = ["tgi", "up", *request.arguments]
    words += ["--device", "cpu"] if devices.is_cpu else []
    # Without it, several visible devices would be one group of ranks.
    words += ["--num-shard", str(ranks)] if devices.number > replicas else []
    words += ["--replicas", str(replicas)] if replicas > 1 else []
    return shlex.join(words)


def _cache_memory(
    deployment: PlannedDeployment, shard: Shard, need: RankMemory, devices: Devices, settings: Settings
) -> memory.CacheMemory:
    """The memory of a rank for the KV cache."""
    if devices.is_cpu:
        free = max(0, devices.bytes - need.weights - need.reserve)
        whole = memory.cache_memory_on_host(free * shard.ranks)  # ranks on one host share its memory
        return memory.CacheMemory(whole.default // shard.ranks, whole.available // shard.ranks)
    activations = _activations(deployment, shard, settings, devices.bytes)
    free = devices.bytes - need.weights - (need.reserve - activations)
    return memory.cache_memory_on_cuda(free, devices.bytes, settings, activations)


def _recommended(splits: tuple[Split, ...], request: PlanRequest) -> list[Split]:
    """For each kind of device the fewest ranks with room for the wanted requests, else the split with the most room."""
    fitting = [split for split in splits if split.fits]
    found = []
    for kind in dict.fromkeys(split.device for split in fitting):
        of_kind = [split for split in fitting if split.device == kind]
        roomy = [split for split in of_kind if split.typical_requests >= request.wanted_requests]
        found.append(roomy[0] if roomy else max(of_kind, key=lambda split: split.typical_requests))
    return found


def _why(split: Split, deployment: PlannedDeployment, request: PlanRequest) -> str:
    """The sentence about a recommended split."""
    wanted = request.wanted_requests
    if split.typical_requests >= wanted:
        why = f"the fewest ranks with room for {wanted} requests on each replica"
    else:
        why = f"the most room, though less than for {wanted} requests on each replica"
    shape = f"{_replicas(split.replicas)} of {_ranks(split.ranks)} on {split.device}"
    most = request.settings.max_total_tokens or deployment.context
    limit = f"; requests of up to {split.longest:,} of {most:,} tokens" if split.longest < most else ""
    idle = f"; {split.idle} left over" if split.idle else ""
    typical = min(request.typical_tokens, split.longest)
    at_once = f"{split.all_typical_requests:,} requests of {typical:,} tokens at once"
    return f"Recommended: {shape}, {why}: {at_once}{limit}{idle}."


def _why_nothing(splits: tuple[Split, ...], deployment: PlannedDeployment, request: PlanRequest) -> str:
    """Why no split fits, and what would."""
    most_divided = max(splits, key=lambda split: split.ranks)
    return f"Nothing fits: {most_divided.problem.rstrip('.')}. {_what_would_fit(deployment, request)}"


def _replicas(count: int) -> str:
    return f"{count} replica{'s' * (count != 1)}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _what_would_fit(deployment: PlannedDeployment, request: PlanRequest) -> str:
    """What would fit instead: fewer bits on the same devices, or more devices of the first kind."""
    served, draft = deployment.served, deployment.draft
    proposals = []
    smaller = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}.get(served.made, ())
    for form in smaller if served.checkpoint is None and served.tensors is None else ():
        changed = deployment._replace(
            served=served._replace(made=form), draft=None if draft is None else draft._replace(made=form)
        )
        fitting = (split for one in request.devices for split in _splits(changed, one, request) if split.fits)
        if split := next(fitting, None):
            proposals.append(f"--quantize {form} with {_ranks(split.ranks)} on {split.device}")
            break
    first = request.devices[0]
    free = request._replace(settings=replace(request.settings, num_shard=None), replicas=None)
    more = next((split for split in _splits(deployment, first._replace(number=MAX_RANKS), free) if split.fits), None)
    wanted = request.replicas or 1
    if more and more.ranks * wanted > first.number:
        proposals.append(f"{more.ranks * wanted}x{first.name}")
    if not proposals:
        return "No smaller type and no number of these devices among which the model can be divided would be enough."
    return f"What would fit: {', or '.join(proposals)}."


def _form_in_words(model: PlannedModel) -> str:
    if model.tensors is not None:
        return "as stored in GGUF"
    if model.checkpoint is not None:
        return f"{model.checkpoint.method} as stored"
    return "as stored" if model.made is None else f"quantized at load to {model.made}"
