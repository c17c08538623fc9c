"""Starts the torch engine: loads the models, sizes the KV cache, warms up, captures CUDA graphs, loads adapters."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from llguidance import LLTokenizer

from tgi import __version__
from tgi.hub.llguidance_tables import token_table
from tgi.hub.model_config import is_draft_head, read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.hub.vision_towers import VisionFamily, vision_family
from tgi.hub.weight_files import weights_identity
from tgi.microkernel.errors import UserError
from tgi.microkernel.host.control_groups import available_memory
from tgi.microkernel.host.heap import release_freed_memory
from tgi.microkernel.host.rundir import media_directory, received_images, site_id
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT8, pack_column
from tgi.microkernel.messages.kv_groups import ONE_FULL_GROUP, GroupKind, KVGroup, paged_groups, recurrent_group
from tgi.microkernel.messages.protocol import DeploymentLimits, LastExit, SlotAssignment, Step, encode
from tgi.microkernel.messages.sampling_params import PARAMETERS, SamplingParams
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.microkernel.recovery.exit_causes import OUT_OF_MEMORY
from tgi.microkernel.settings.table import MTP, Settings
from tgi.worker.attention import build_attention, page_bytes, page_size
from tgi.worker.attention.interface import AttentionBackend, CapturableBackend, KVCacheSpec, PrefaultingBackend
from tgi.worker.cpu_kernels.build import KernelsUnavailable, packed_weights_directory
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.distributed.communicator import Communicator, TorchCommunicator
from tgi.worker.distributed.rank_place import RankPlace
from tgi.worker.distributed.shared_memory import SharedMemoryCommunicator
from tgi.worker.engine import memory
from tgi.worker.engine.cuda_graphs import CudaGraphCapturer, chunk_tokens, graph_batch_sizes
from tgi.worker.engine.draft_runner import DraftModel, require_same_tokenizer
from tgi.worker.engine.encoder_inputs import EncoderInputs
from tgi.worker.engine.engine import GraphCaptureConfig, TorchEngine
from tgi.worker.engine.page_files import PageFiles
from tgi.worker.engine.prompt_parts import PromptParts
from tgi.worker.engine.torch_threads import choose_threads
from tgi.worker.gpu_kernels.selection import select_gpu_kernels
from tgi.worker.host_cpu import kernel_set, numa_nodes, threads_from_environment, usable_cores
from tgi.worker.lora.registry import load_adapters
from tgi.worker.models.config_reader import read_config
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.draft_head_config import read_eagle3_config
from tgi.worker.models.dtype import DTYPES, dtype_name, quickest_dtype, resolve_dtype
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import HeadOptions, build_eagle3, build_model, build_mtp, read_model_spec
from tgi.worker.models.packed_weights import PackedWeightFiles
from tgi.worker.models.t5 import T5Model
from tgi.worker.sampling.sampling_batch import FIELDS_WITHOUT_EFFECT_ON_LOGITS
from tgi.worker.sampling.watermark import Watermark
from tgi.worker.vision.image_file import ImageFiles
from tgi.worker.vision.prompt_images import PromptImages
from tgi.worker.vision.tower import load_tower

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]
# In the run directory, for the worker that replaces this one: the supervisor's pid and what was chosen.
PAGES_FILE = "worker.pages"  # the number of pages, and the bytes of a step on a GPU
DTYPE_FILE = "worker.dtype"  # the quickest dtype


TEXT_ALONE = "Start with --media-workers 0, which serves the model without images."


class GraphSizes(NamedTuple):
    """Steps that are captured as CUDA graphs."""

    rows: Sequence[int] = ()  # see cuda_graphs.graph_batch_sizes; empty: no graphs
    chunk_tokens: int = 0  # see cuda_graphs.chunk_tokens


class LoadedModels(NamedTuple):
    """The served model and the draft model."""

    served: Model
    draft: Model | DraftHead | None
    kv_cache_dtype: torch.dtype | None = None  # None: the dtype of each model
    kernels: str = ""  # which kernels compute, for the start summary
    cpu_kernels: CpuKernels | None = None
    communicator: Communicator | None = None  # of the served model's ranks; the draft model is whole on each of them

    def all(self) -> list[Model | DraftHead]:
        """The models that are loaded."""
        return [self.served] if self.draft is None else [self.served, self.draft]

    def cache_spec(self, model: Model | DraftHead, groups: Sequence[KVGroup] = ONE_FULL_GROUP) -> KVCacheSpec:
        """The KV cache of one of them, in the chosen dtype."""
        return model.kv._replace(stored_dtype=self.kv_cache_dtype, groups=groups)


class Caches(NamedTuple):
    """The KV caches of the served model and the draft model, as the backends that compute with them."""

    served: AttentionBackend
    draft: AttentionBackend | None

    def discard(self) -> None:
        """Gives the memory of all pages and states back to the system."""
        for one in self:
            if isinstance(one, PrefaultingBackend):
                one.discard_pages()
            if one is not None and one.state is not None:
                one.state.discard()


class EngineState(NamedTuple):
    """What an engine is made of. A worker shares it with those that replace it, which see the same pages."""

    models: LoadedModels
    images: PromptParts | None
    limits: DeploymentLimits
    caches: Caches
    graphs: GraphSizes
    files: list[list[list[Any]]]  # `_files` when the models were loaded
    inherited: bool = False


# In processes that are forked from a worker after it has loaded its models.
_shared: EngineState | None = None


def keeps_pages(last_exit: LastExit | None) -> bool:
    """Whether this process has the pages that its predecessor, which ended like this, had computed. Not where memory
    was short, which they take."""
    return _shared is not None and last_exit is not None and last_exit.outside and last_exit.cause != OUT_OF_MEMORY


def start_engine(
    settings: Settings,
    progress: Progress,
    place: RankPlace | None = None,
    share: Callable[[], None] | None = None,
    last_exit: LastExit | None = None,
) -> TorchEngine:
    """Returns the engine, ready to serve; that of one rank, if it has a `place` among several. `share` forks from this
    process what forks its successors, which start with the models that are loaded then, and the pages that are computed
    since, unless `last_exit` tells of a crash. Raises UserError where model, device or memory do not allow it."""
    device = choose_device(settings.device)
    if place is not None and device != "cpu":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())  # fewer if each rank sees its own only
    if device != "cpu":
        progress("initializing CUDA", 0)
        torch.cuda.init()
    else:
        limited = "" if settings.cpu is None else ", limited by --cpu"
        torchs, ours = torch.backends.cpu.get_cpu_capability(), kernel_set()
        log.debug("instruction set of the CPU: torch's %s, ours %s%s", torchs, ours and ours.name, limited)
        if place is None and (nodes := len(numa_nodes())) > 1:
            log.info(
                "this host has %d NUMA nodes, and this worker uses all of them: with --num-shard %d each node computes "
                "its part of the model, from memory of its own",
                *(nodes, nodes),
            )
    files = _packed_weight_files(settings)
    if _shared is not None:
        state = _inherit(_shared, settings, keeps_pages(last_exit))
    else:
        state = _load_state(settings, device, progress, place, share is not None, files)
        if share is not None and state.models.cpu_kernels is not None:
            _share(state, share)
    models, limits, images = state.models, state.limits, state.images
    served = models.served
    watermark = Watermark(served.vocab_size, served.device, settings.watermark_gamma, settings.watermark_delta)
    load_token_table = partial(_load_token_table, settings.model_dir, served.vocab_size)
    engine = _build_engine(models, limits, state.graphs, state.caches, load_token_table, watermark, images)
    if not state.inherited:  # its steps would write to pages, and all modules are loaded
        progress("warming up", 98)
        rows = min(2, limits.max_batch_size, limits.max_batch_prefill_tokens)
        longest = WARMUP_PROMPT_TOKENS if models.cpu_kernels is None else 2  # our library has nothing to load by size
        tokens = min(longest, limits.max_input_tokens, limits.max_batch_prefill_tokens // rows)
        warm_up(engine, limits, rows, tokens, settings.speculate or 0, models.draft is not None)
    if state.graphs.rows:
        progress("capturing CUDA graphs", 98)
        engine.capture_decode_graphs(1)  # the largest; the others when a step needs them
    if adapters := settings.adapters:
        progress("loading adapters", 99)
        load_adapters(engine.adapters, adapters)
    if settings.prefix_cache_dir is not None:
        engine.page_files = _open_page_files(settings, Path(settings.prefix_cache_dir), models, engine)
    engine.served = _worker_facts(settings, models, limits, 0 if images is None else images.weight_bytes)
    if device == "cpu":
        release_freed_memory()
    if files is not None:
        files.write_behind()
    return engine


def _packed_weight_files(settings: Settings) -> PackedWeightFiles | None:
    """The files of packed weights of this user; None: there are none."""
    if not settings.packed_weights_bytes:
        return None
    try:
        return PackedWeightFiles(packed_weights_directory(), settings.packed_weights_bytes)
    except KernelsUnavailable as reason:
        log.info("packed weights are not kept for the next start: %s", reason)
        return None


def _load_state(
    settings: Settings,
    device: str,
    progress: Progress,
    place: RankPlace | None,
    shared: bool,
    files: PackedWeightFiles | None,
) -> EngineState:
    """Loads the models, and makes KV caches of the size for which there is memory. `shared`: so that processes that are
    forked from this one see the same pages, if our CPU kernels compute. Raises UserError as `start_engine`."""
    models = _load_models(settings, device, progress, place, files)
    _require_draft_pages(models)
    images = _load_prompt_parts(settings, models, progress, place)
    progress("sizing the KV cache", 96)
    graphs = _graph_sizes(settings, models.served)
    required = _cache_requirements(models)
    previous, step_bytes = _read_previous_cache(settings.run_dir)
    if models.served.device.type == "cpu":
        step_bytes = 0
    elif step_bytes is None or models.communicator is not None:  # ranks measure together
        step_bytes = _measure_step(settings, models, graphs, progress, images)
    taken = step_bytes + _feature_bytes(settings, models.served, images)
    mapped = 0 if files is None else files.mapped_bytes
    available = _cache_memory(settings, models.served.device, taken, mapped)
    if models.communicator is not None:
        sharing = place.local_ranks if place is not None and device == "cpu" else 1
        required, available, previous = _agree_on_cache(models.communicator, sharing, required, available, previous)
    limits = memory.choose_limits(settings, required, available, previous)
    if images is not None:
        limits = limits._replace(undivided=images.undivided, tower_slices=images.slices)
        if _image_bytes(models.served):
            limits = limits._replace(max_running_images=memory.RUNNING_IMAGES[limits.device])
        if images.encodes_prompt:  # in one step
            longest = min(limits.max_input_tokens, limits.max_batch_prefill_tokens)
            limits = limits._replace(max_input_tokens=longest)
    if place is None or place.rank == 0:
        chosen = limits.pages, limits.max_batch_size, step_bytes
        _write_choice(settings.run_dir / PAGES_FILE, *(str(number) for number in chosen))
    return EngineState(models, images, limits, _build_caches(models, limits, shared), graphs, _files(settings))


def _share(state: EngineState, share: Callable[[], None]) -> None:
    global _shared
    _shared = state._replace(inherited=True)
    gc.collect()
    release_freed_memory()  # which would be kept twice from now on
    share()


def _inherit(shared: EngineState, settings: Settings, keep_pages: bool) -> EngineState:
    """What a predecessor of this process has loaded, with empty KV caches if not `keep_pages`. Exits if the files of
    the models are others by now: then the next worker loads them."""
    if shared.files != _files(settings):
        log.warning("the files of the model have changed since they were loaded: the next worker loads them again")
        sys.exit(1)
    assert shared.models.cpu_kernels is not None
    shared.models.cpu_kernels.restart_threads(threads_from_environment() or usable_cores())
    if not keep_pages:
        shared.caches.discard()
    return shared


def _files(settings: Settings) -> list[list[list[Any]]]:
    """What tells the files of the models from others."""
    return [weights_identity(path) for path in quantization_by_directory(settings)]


def _open_page_files(
    settings: Settings, directory: Path, models: LoadedModels, engine: TorchEngine
) -> PageFiles | None:
    """The files of the engine's pages; None: the model keeps something else of a request than pages for all positions.
    Raises UserError where pages cannot be kept in files."""
    groups, memory = engine.limits.groups, engine.page_memory
    if memory is None:
        raise UserError("--prefix-cache-dir is for workers on CPU: pages on a GPU are not kept in files. Leave it out.")
    if len(groups) > 1 or groups[0].kind != GroupKind.FULL:
        kinds = ", ".join(sorted({group.kind for group in groups}))
        log.warning("--prefix-cache-dir has no effect: layers of this model keep %s positions or states", kinds)
        return None
    identity = {
        "version": __version__,
        "kernels": [models.kernels.partition(",")[0], _instructions()],
        "quantize": [settings.quantize, settings.draft_quantize],
        "models": _files(settings),
        "dtypes": [str(model.kv.dtype) for model in models.all()],
        "dummy": not settings.needs_weights,
        "mtp": settings.draft_model_id == MTP,
    }
    return PageFiles(directory, identity, memory, settings.prefix_cache_bytes)


def _require_draft_pages(models: LoadedModels) -> None:
    """Raises UserError if the draft model has recurrent layers: it computes some tokens twice, and others later. One
    with an encoder cannot draft, either."""
    if isinstance(models.draft, T5Model):
        raise UserError("An encoder-decoder model cannot draft. Choose another --draft-model-id.")
    if models.draft is not None and models.draft.kv.state is not None:
        raise UserError(
            "A model with recurrent layers cannot draft: a draft model computes positions again, for which the state "
            "of such layers is gone. Choose another --draft-model-id, or --speculate without one."
        )


def _load_prompt_parts(
    settings: Settings, models: LoadedModels, progress: Progress, place: RankPlace | None
) -> PromptParts | None:
    """The model's encoder, or its vision tower if requests have images. Raises UserError if they cannot be served."""
    if isinstance(models.served, T5Model):
        if settings.speculate or models.draft is not None:
            raise UserError(
                "Drafts are not for encoder-decoder models. Start without --speculate and --draft-model-id."
            )
        return EncoderInputs(models.served.encode)
    family = vision_family(settings.model_dir) if settings.sees_images else None
    if family is None:
        return None
    if fault := _image_obstacle(settings, family, place):
        raise UserError(f"The images of {settings.model_dir} cannot be served: {fault}. {TEXT_ALONE}")
    served = models.served
    tower = load_tower(settings.model_dir, family, served.kv.dtype, served.device, progress, served.kv.cpu_kernels)
    states = None
    if family.crosses and isinstance(served, DecoderModel):
        count = memory.stored_images(served.device.type, settings.max_images)
        try:
            states = served.image_states(count)
        except (OSError, torch.OutOfMemoryError) as error:
            raise UserError(
                f"There is no memory for what layers attend to of {count} images, of up to "
                f"{_image_bytes(served) / 1e6:.0f} MB each. Choose a lower --max-images. {TEXT_ALONE}"
            ) from error
    run = settings.run_dir
    files = ImageFiles(media_directory(run), site_id(run), received_images(run, settings.replica_index))
    return PromptImages(tower, files, memory.FEATURE_BYTES, states)


def _image_bytes(served: Model) -> int:
    """Bytes of the largest image, if layers of the model attend to images; else 0."""
    return served.image_bytes if isinstance(served, DecoderModel) else 0


def _feature_bytes(settings: Settings, served: Model, images: PromptParts | None) -> int:
    """The bytes that images will take. Those of ImageStates are taken on a GPU already."""
    device = served.device.type
    if images is None or (images.states is not None and device == "cuda"):
        return 0
    return memory.feature_bytes(_image_bytes(served), device, settings.max_images)


def _image_obstacle(settings: Settings, family: VisionFamily, place: RankPlace | None) -> str:
    """Why the images of a model of this family cannot be computed here, in words; "" if they can."""
    decoder = read_model_spec(settings.model_dir, "auto", settings.quantize).decoder
    if decoder is None:
        return "its text part runs through transformers"
    if family.rope is not None and any(rope.axes is None for rope in decoder.ropes):
        return "mrope_section in its config.json does not fit the rotary embedding"
    if not settings.needs_weights:
        return "--load-format dummy makes no weights for a vision tower"
    if place is not None and place.local_ranks < place.ranks:
        return "the ranks of a worker on several hosts do not all have the files of images"
    return ""


def _worker_facts(settings: Settings, models: LoadedModels, limits: DeploymentLimits, tower_bytes: int) -> WorkerFacts:
    """The facts that the start summary shows."""
    footprints = [model.footprint for model in models.all()]
    served = models.served
    return WorkerFacts.of(
        settings,
        limits,
        device="cpu" if served.device.type == "cpu" else torch.cuda.get_device_name(served.device),
        kernels=models.kernels,
        weight_bytes=sum(footprint.bytes for footprint in footprints) + tower_bytes,
        weight_bits=round(8 * served.footprint.bytes / max(1, served.footprint.numbers), 1),
        kv_cache_bytes=limits.cache_bytes,
    )


def _load_models(
    settings: Settings, device: str, progress: Progress, place: RankPlace | None, files: PackedWeightFiles | None
) -> LoadedModels:
    """Loads the models. Checks first that the draft model has the tokenizer of the served model, or that a head is for
    it."""
    has_head = settings.draft_model_dir is not None and is_draft_head(settings.draft_model_dir)
    if settings.draft_model_dir is not None and not has_head:
        require_same_tokenizer(settings.model_dir, settings.draft_model_dir)
    if (settings.draft_model_id == MTP or has_head) and not settings.needs_weights:
        raise UserError(
            "A head that drafts needs its weights, and the model's. Start without --load-format dummy, or without "
            "--draft-model-id."
        )

    quantize = quantization_by_directory(settings)
    # The draft model computes in the served model's dtype, whatever its own is.
    dtype = dtype_name(resolve_dtype(read_config(settings.model_dir), settings.dtype))
    progress("choosing kernels", 0)
    kernels = gpu = None
    reason = "--disable-custom-kernels"
    specs = [read_model_spec(path, dtype, asked) for path, asked in quantize.items()]
    if has_head and settings.draft_model_dir is not None:  # refuses one for another model before that is loaded
        read_eagle3_config(settings.draft_model_dir, specs[0].decoder)
    if not settings.disable_custom_kernels:
        if device == "cpu":
            kernels, reason = select_cpu_kernels(specs, device, progress)
        else:
            gpu, reason = select_gpu_kernels(specs, device, settings.batch_invariant)
    if settings.batch_invariant and device != "cpu":
        if any(spec.decoder is None for spec in specs):
            reason = "the model is not computed by the built-in decoder"
        if reason:
            raise UserError(
                f"--batch-invariant needs our own GPU kernels for the whole model, and torch's compute here: {reason}. "
                "Start without it."
            )
    kv_cache_dtype = _kv_cache_dtype(settings.kv_cache_dtype, device, kernels is not None)
    words = f"torch's ({reason})" if reason else "our own"
    if device == "cpu":
        chosen = kernel_set()
        if kernels is not None and chosen is not None:
            words += f" for {chosen.name}"
        threads = choose_threads() if kernels is None else kernels.threads
        words += f", {threads} thread{'s' if threads > 1 else ''}"
        words += "" if place is None else f" on each of {place.ranks} ranks"

    communicator = None if place is None else _connect_ranks(place, device, kernels)
    if settings.dtype == "auto" and device == "cpu" and kernels is None:
        own, dtype = dtype, _dtype_by_trial(settings.run_dir, dtype)
        if communicator is not None and communicator.minimum(dtype != own) == [0]:
            dtype = own  # it is the quickest on another rank

    def build(directory: Path, model_progress: Progress, communicator: Communicator | None = None) -> Model:
        asked, narrow = quantize[directory], kv_cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        trusted = settings.trust_remote_code
        dummy = not settings.needs_weights
        return build_model(
            directory, dtype, device, model_progress, trusted, kernels, asked, gpu, narrow, communicator, dummy,
            files,
        )  # fmt: skip

    served = build(settings.model_dir, progress, communicator)
    if settings.draft_model_id == MTP or has_head:
        if settings.draft_model_dir is not None:
            build_head, directory, what = build_eagle3, settings.draft_model_dir, "EAGLE-3 head"
        else:
            build_head, directory, what = build_mtp, settings.model_dir, "layer for multi-token prediction"
        progress(f"loading the {what}", 95)
        head = build_head(directory, served, HeadOptions(dtype, kernels, quantize[directory], gpu))
        return LoadedModels(served, head, kv_cache_dtype, words, kernels, communicator)
    if settings.draft_model_dir is None:
        return LoadedModels(served, None, kv_cache_dtype, words, kernels, communicator)
    draft = build(settings.draft_model_dir, lambda stage, percent: progress(f"draft model: {stage}", percent))
    if draft.context_length < (settings.max_total_tokens or 0):
        raise UserError(
            f"`max_total_tokens` is {settings.max_total_tokens}, but the draft model's sequences have at most "
            f"{draft.context_length} tokens. Lower --max-total-tokens, or choose another --draft-model-id or none."
        )
    if draft.context_length < served.context_length:
        log.warning("sequences are limited to %d tokens, those of the draft model", draft.context_length)
    return LoadedModels(served, draft, kv_cache_dtype, words, kernels, communicator)


def _connect_ranks(place: RankPlace, device: str, kernels: CpuKernels | None) -> Communicator:
    """The communicator of this rank, when all others are there."""
    torchs = TorchCommunicator(place.rank, place.ranks, place.rendezvous, torch.device(device))
    own = int(kernels is not None)
    if torchs.minimum(own, -own) != [own, -own]:
        raise UserError(
            "Our own CPU kernels can be used on some ranks only: their logs say why. Fix that, or start with "
            "--disable-custom-kernels."
        )
    kind = _instructions() if device == "cpu" else torch.cuda.get_device_name()
    own = crc32(kind.encode())
    if torchs.minimum(own, -own) != [own, -own]:  # they would round differently, and sample different tokens
        raise UserError(
            f"The ranks compute on different devices; this one on {kind}. Give them devices of one kind, or on CPU the "
            "same --cpu, an instruction set that all of them have."
        )
    communicator: Communicator = torchs
    if device != "cpu":
        way = "over NCCL"
    elif kernels is None or place.memory is None:
        way = f"over gloo, since {place.memory_error if kernels is not None else 'torch computes'}"
    else:
        way = "in shared memory"
        communicator = SharedMemoryCommunicator(kernels, place.memory, torchs, own_core=usable_cores() >= place.ranks)
    if place.rank == 0:
        log.info("the %d ranks combine their results %s", place.ranks, way)
    return communicator


def _instructions() -> str:
    """The instruction sets with which this rank computes."""
    own = kernel_set()
    return f"{torch.backends.cpu.get_cpu_capability()} and {own.name if own is not None else 'no kernels of ours'}"


def _agree_on_cache(
    communicator: Communicator,
    sharing: int,
    required: memory.CacheRequirements,
    available: memory.CacheMemory,
    previous: memory.PreviousCache | None,
) -> tuple[memory.CacheRequirements, memory.CacheMemory, memory.PreviousCache | None]:
    """The bytes of the rank with the largest pages and states, the memory of this rank for as many of them as every
    rank has memory for, and the previous cache that the first rank knows. `sharing`: the number of ranks that share the
    memory that this one has found."""
    page_bytes, state_bytes = (-n for n in communicator.minimum(-required.page_bytes, -required.state_bytes))
    required = required._replace(page_bytes=page_bytes, state_bytes=state_bytes)
    unknown, unit = 1 << 40, required.unit_bytes
    default, most, pages, rows = communicator.minimum(
        available.default // sharing // unit,
        available.available // sharing // unit,
        *((unknown, unknown) if previous is None else previous),
    )
    found = None if pages == unknown else memory.PreviousCache(pages, rows)
    return required, memory.CacheMemory(default * unit, most * unit, available.device), found


def quantization_by_directory(settings: Settings) -> dict[Path, str | None]:
    """The value of --quantize for the models in these directories."""
    found = {settings.model_dir: settings.quantize}
    if settings.draft_model_dir is not None:
        found.setdefault(settings.draft_model_dir, settings.draft_quantize)
    return found


def _build_caches(models: LoadedModels, limits: DeploymentLimits, shared: bool = False) -> Caches:
    """KV caches of `limits.pages` pages. `shared`: with processes that are forked from this one."""
    served, draft = models.served, models.draft
    spec = models.cache_spec(served, paged_groups(limits.groups))
    return Caches(
        build_attention(spec, limits.pages, served.device, limits.state_slots, shared),
        None if draft is None else build_attention(models.cache_spec(draft), limits.pages, draft.device, shared=shared),
    )


def _build_engine(
    models: LoadedModels,
    limits: DeploymentLimits,
    graphs: GraphSizes,
    caches: Caches,
    load_token_table: Callable[[], LLTokenizer] | None = None,
    watermark: Watermark | None = None,
    images: PromptParts | None = None,
) -> TorchEngine:
    """The engine with these KV caches, which can capture these graphs."""
    served, draft, attention = models.served, models.draft, caches.served
    draft_model = None if draft is None or caches.draft is None else DraftModel(draft, caches.draft)
    graph_capture = None
    if graphs.rows and isinstance(attention, CapturableBackend):
        graph_capture = GraphCaptureConfig(CudaGraphCapturer(), attention, list(graphs.rows), graphs.chunk_tokens)
    return TorchEngine(
        served,
        attention,
        limits,
        load_token_table=load_token_table,
        draft_model=draft_model,
        watermark=watermark,
        graph_capture=graph_capture,
        images=images,
    )


def _graph_sizes(settings: Settings, served: Model) -> GraphSizes:
    """The steps that are captured as CUDA graphs; none on CPU."""
    if served.device.type != "cuda":
        if any(settings.cuda_graphs):
            log.warning("--cuda-graphs has no effect on CPU")
        return GraphSizes()
    max_rows = memory.max_batch_size(settings, "cuda", _device_bytes(served.device))
    rows = graph_batch_sizes(settings.cuda_graphs, max_rows)
    if not rows and 0 not in settings.cuda_graphs:
        log.warning("no CUDA graphs: --cuda-graphs names no size from 1 to %d, the rows of a step", max_rows)
    if rows and served.cuda_graph_obstacle is not None:
        log.warning("decode steps run without CUDA graphs: %s", served.cuda_graph_obstacle)
        return GraphSizes()
    return GraphSizes(rows, chunk_tokens(served.footprint.numbers, settings.cuda_graphs))


def _device_bytes(device: torch.device) -> int:
    """The memory of a GPU; 0 on CPU."""
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def _load_token_table(directory: Path, vocab_size: int) -> LLTokenizer:
    config = read_model_config(directory, weights=False)
    return token_table(read_tokenizer(config), config.eos_token_ids, vocab_size)


def choose_device(name: str) -> str:
    """The device of a --device: "cpu" or "cuda". Raises UserError if it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device that torch can use. Start with --device cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _kv_cache_dtype(name: str | None, device: str, cpu_kernels: bool) -> torch.dtype | None:
    """The dtype that --kv-cache-dtype names; None: the model's. Raises UserError if the kernels that compute do not
    support it."""
    memory.require_kv_cache_dtype(name, device)
    if name is None:
        return None
    if device == "cpu" and not cpu_kernels:
        raise UserError(
            f"`kv_cache_dtype` is {name}, which only our own CPU kernels support, but torch's kernels compute this "
            "model, where keys and values have the model's type. Leave out --kv-cache-dtype."
        )
    found: torch.dtype = getattr(torch, name.replace("fp8", "float8"))
    return found


def _cache_requirements(models: LoadedModels) -> memory.CacheRequirements:
    loaded, served = models.all(), models.served
    size = page_size(served.kv, served.device)
    return memory.CacheRequirements(
        context=min(model.context_length for model in loaded),
        page_size=size,
        page_bytes=sum(page_bytes(models.cache_spec(model), model.device) for model in loaded),
        vocab_size=served.vocab_size,
        dtype=str(served.kv.dtype).removeprefix("torch."),
        device=served.device.type,
        # The layers of a draft model have pages in each page of the served model, so those must hold all positions.
        windows=served.kv.sliding_windows if models.draft is None else (),
        shapes=() if models.draft is not None else tuple(models.cache_spec(served).layer_bytes(size)),
        state_bytes=0 if served.kv.state is None else served.kv.state.bytes,
    )


def _read_previous_cache(run: Path) -> tuple[memory.PreviousCache | None, int | None]:
    """The cache of the previous worker of this supervisor, if there was one, and what `_measure_step` found: the same
    model on the same device takes the same memory, and requests wait for this start."""
    words = _read_choice(run / PAGES_FILE)
    if len(words) != 3:
        return None, None
    pages, rows, step_bytes = map(int, words)
    return memory.PreviousCache(pages, rows), step_bytes


def _dtype_by_trial(run: Path, own: str) -> str:
    """The dtype in which torch's CPU kernels compute a model of dtype `own`: that of the previous worker of this
    supervisor, since its requests continue with the same numbers, else the quickest."""
    known = _read_choice(run / DTYPE_FILE)
    if len(known) == 1 and known[0] in (own, "float32"):
        return known[0]
    chosen = dtype_name(quickest_dtype(DTYPES[own]))
    _write_choice(run / DTYPE_FILE, chosen)
    return chosen


def _read_choice(path: Path) -> list[str]:
    """What `_write_choice` wrote for the previous worker of this supervisor; empty if there was none."""
    try:
        supervisor, *words = path.read_text().split()
    except (FileNotFoundError, ValueError):
        return []
    return words if supervisor == str(os.getppid()) else []


def _write_choice(path: Path, *words: str) -> None:
    path.write_text(" ".join((str(os.getppid()), *words)))


def _cache_memory(
    settings: Settings, device: torch.device, step_bytes: int, mapped_bytes: int = 0
) -> memory.CacheMemory:
    """The memory for the KV cache. `mapped_bytes`: of weights in the file cache, which the system counts as
    available."""
    if device.type != "cuda":
        return memory.cache_memory_on_host(max(0, available_memory() - mapped_bytes) // settings.replicas)
    free, total = torch.cuda.mem_get_info(device)
    return memory.cache_memory_on_cuda(free, total, settings, step_bytes)


def _measure_step(
    settings: Settings, models: LoadedModels, graphs: GraphSizes, progress: Progress, images: PromptParts | None
) -> int:
    """The bytes on a GPU that a step takes besides weights and KV cache. Runs the largest step that may occur, which
    shows the memory of its activations, and captures the largest graph, whose pool the others share."""
    device = models.served.device
    required, drafts = _cache_requirements(models), settings.speculate or 0
    rows = memory.rows_at_once(settings, required, _cache_memory(settings, device, 0))
    total = memory.max_prefill_tokens(settings, "cuda", _device_bytes(device))
    further = 2 + drafts  # positions after the prompt
    tokens = max(1, min(total // rows, (settings.max_total_tokens or required.context) - further))
    pages = rows * -(-(tokens + further) // required.page_size)
    limits = DeploymentLimits(
        max_total_tokens=max(settings.max_total_tokens or required.context, tokens + further),
        max_input_tokens=tokens,
        max_batch_total_tokens=pages * required.page_size,
        max_batch_prefill_tokens=total,
        max_batch_size=rows,
        pages=pages,
        page_size=required.page_size,
        vocab_size=required.vocab_size,
        dtype=required.dtype,
        device="cuda",
        groups=[*ONE_FULL_GROUP, *memory.recurrent_groups(settings, required, 0)],
    )
    torch.cuda.reset_peak_memory_stats(device)
    try:
        engine = _build_engine(models, limits, graphs, _build_caches(models, limits), images=images)
        before = torch.cuda.memory_allocated(device)
        warm_up(engine, limits, rows, tokens, drafts, models.draft is not None, full=True)
        progress("compiling kernels", 97)
        warm_up_sizes(engine, limits, rows, total)  # also the longest chunk of one prompt
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"Not enough memory to handle {total} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        ) from error
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    graph_count = engine.capture_decode_graphs(1)
    free, total_bytes = torch.cuda.mem_get_info(device)
    graph_bytes = free_before - free + graph_count * memory.GRAPH_BYTES
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    free, total_bytes = torch.cuda.mem_get_info(device)
    log.debug(
        "activations of a step take up to %.2f GB, %d CUDA graphs %.2f GB; %.2f of %.2f GB are free",
        *(activations / 1e9, graph_count, graph_bytes / 1e9, free / 1e9, total_bytes / 1e9),
    )
    return activations + graph_bytes


WARMUP_PROMPT_TOKENS = 20  # more than one page
WARMUP_ALTERNATIVES = 5  # to a token: the default of --max-top-n-tokens
# Each parameter that changes logits has its example value, so that all logits processors run.
_EXAMPLES: dict[str, Any] = {
    name: field.example
    for name, parameter in PARAMETERS.items()
    if name not in FIELDS_WITHOUT_EFFECT_ON_LOGITS and (field := parameter.native or parameter.openai)
}
WARMUP_SAMPLING_PARAMS = SamplingParams(
    seed=1,
    bias_ids=pack_column(INT32, [0]),
    biases=pack_column(FLOAT32, [1.0]),
    end_ids=pack_column(INT32, [0]),
    bad_word_ids=pack_column(INT32, [0, 0]),
    bad_word_lengths=pack_column(INT32, [2]),
    **_EXAMPLES,
)


def warm_up(
    engine: TorchEngine,
    limits: DeploymentLimits,
    rows: int,
    tokens: int,
    drafts: int,
    draft_model: bool,
    full: bool = False,
) -> None:
    """Runs a prefill of `rows` prompts of `tokens` tokens, a decode step after it, and, with `drafts`, a step with this
    many drafts in as many rows as may have them at once. Kernels are loaded before a request waits for them,
    and the peak of memory shows what a step takes. Removes all requests afterwards.

    `draft_model`: the engine has one, which proposes the drafts. `full`: every row has all logits processors,
    alternatives and prompt logprobs, which take the most memory; else every second one has the processors."""
    if drafts and draft_model:
        drafts = max(drafts, 2)  # after the first draft, the draft model computes single tokens
    drafts = max(0, min(drafts, limits.max_total_tokens - tokens - 2))
    pages_each = -(-min(tokens + 2 + drafts, limits.max_total_tokens) // limits.page_size)
    ids = pack_column(INT32, [0] * tokens)
    slots = [
        SlotAssignment(slot, ids, tokens, encode(WARMUP_SAMPLING_PARAMS if slot % 2 else SamplingParams(0, top_p=0.9)))
        for slot in range(rows)
    ]
    if full:
        params = encode(WARMUP_SAMPLING_PARAMS._replace(top_n=WARMUP_ALTERNATIVES))
        begin, alternatives = (1, WARMUP_ALTERNATIVES) if tokens > 1 else (0, 0)
        slots = [
            slot._replace(sampling=params, prompt_logprobs_from=begin, prompt_top_n=alternatives) for slot in slots
        ]
    tables = rows * len(paged_groups(limits.groups))
    pages = [
        (table, (table * pages_each + page) % limits.pages) for table in range(tables) for page in range(pages_each)
    ]
    _run_step(engine, _step(1, rows, 0, tokens, slots, pages))
    _run_step(engine, _step(2, rows, tokens, 1))
    if drafts:
        recurrent = recurrent_group(limits.groups)
        most = limits.max_batch_prefill_tokens if recurrent is None else recurrent.drafts
        draft_rows = max(1, min(rows, limits.max_batch_prefill_tokens // (1 + drafts), most // drafts))
        draft_step = _step(3, draft_rows, tokens + 1, 1)
        draft_ids = [0] * (0 if draft_model else draft_rows * drafts)
        _run_step(
            engine,
            draft_step._replace(
                drafts=pack_column(INT32, [drafts] * draft_rows), draft_ids=pack_column(INT32, draft_ids)
            ),
        )
    engine.reset()


def warm_up_sizes(engine: TorchEngine, limits: DeploymentLimits, rows: int, tokens: int) -> None:
    """Runs decode steps of up to `rows` rows and prompts of up to `tokens` tokens, in powers of two and the longest:
    kernels that differ with the size of a step are compiled, and kept on disk, before all streams wait for it."""
    for size in _powers(rows):
        warm_up(engine, limits, size, 1, 0, False)
    longest = min(tokens, limits.max_total_tokens - 2, limits.pages * limits.page_size - 2)
    for size in _powers(longest):
        warm_up(engine, limits, 1, size, 0, False, full=size == longest)


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _step(
    number: int,
    rows: int,
    start: int,
    count: int,
    slots: Sequence[SlotAssignment] = (),
    pages: Sequence[tuple[int, int]] = (),
) -> Step:
    """A step of the first `rows` slots, all of which sample."""
    owners, page_ids = (pack_column(INT32, [page[at] for page in pages]) for at in range(2))
    starts, counts, samples = (
        pack_column(INT32, [start] * rows),
        pack_column(INT32, [count] * rows),
        pack_column(UINT8, [1] * rows),
    )
    return Step(number, 0, list(slots), owners, page_ids, pack_column(INT32, range(rows)), starts, counts, samples)


def _run_step(engine: TorchEngine, step: Step) -> None:
    engine.collect(engine.launch(step))
