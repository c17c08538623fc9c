"""Starts the torch engine: model, memory, a first step to warm everything up."""

import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from llguidance import LLTokenizer

from tgi.hub.card import read_card
from tgi.hub.grammar import token_table
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.errors import UserError
from tgi.kernel.presence import Limits
from tgi.kernel.settings import MADE_AT_LOAD, Settings
from tgi.kernel.summary import Served
from tgi.worker import memory
from tgi.worker.attention import build_attention, page_bytes, page_size
from tgi.worker.batch import KVShape, Model, Recordable
from tgi.worker.drafting import Draft, need_same_tokens
from tgi.worker.engine import Recording, TorchEngine
from tgi.worker.gpu.choose import find_gpu
from tgi.worker.load import build_model, read_recipe
from tgi.worker.lora.shelf import stock
from tgi.worker.native.choose import find_kernels
from tgi.worker.recorded import CudaGraphs, sizes
from tgi.worker.threads import choose_threads
from tgi.worker.warm import WARM_PROMPT, warm_up
from tgi.worker.watermark import Watermark

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]
PAGES_FILE = "worker.pages"  # in the run directory: supervisor's pid, pages


class Models(NamedTuple):
    """What is loaded."""

    served: Model
    draft: Model | None
    stored: torch.dtype | None = None  # what their caches are to hold; None: the type of each
    kernels: str = ""  # whose compute, in words

    def all(self) -> list[Model]:
        """Those that there are."""
        return [self.served] if self.draft is None else [self.served, self.draft]

    def kv(self, model: Model) -> KVShape:
        """What one of them keeps."""
        return model.kv._replace(stored=self.stored)


def start_engine(settings: Settings, progress: Progress) -> TorchEngine:
    """The engine, ready to serve. Raises UserError where model, device or memory do not allow it."""
    device = _device(settings.device)
    if device == "cpu":
        held = "" if settings.cpu is None else ", held to it by --cpu"
        log.debug("instruction set of the CPU: %s%s", torch.backends.cpu.get_cpu_capability(), held)
    stored = _stored(settings.kv_cache_dtype, device)
    models = _load(settings, device, progress)._replace(stored=stored)
    progress("sizing the KV cache", 96)
    graphs = _graphs(settings, models.served)
    room = _room(settings, models, graphs)
    limits = memory.choose_limits(settings, _need(models), room, _held(settings.run_dir))
    served = models.served
    mark = Watermark(served.vocab_size, served.device, settings.watermark_gamma, settings.watermark_delta)
    engine = _engine(models, limits, graphs, partial(_tokens, settings.model_dir, served.vocab_size), mark)
    progress("warming up", 98)
    rows = min(2, limits.max_batch_size, limits.max_batch_prefill_tokens)
    tokens = min(WARM_PROMPT, limits.max_input_tokens, limits.max_batch_prefill_tokens // rows)
    warm_up(engine, limits, rows, tokens, settings.speculate or 0, models.draft is not None)
    if graphs:
        progress("recording decode steps", 98)
        engine.record()
    _hold(settings.run_dir, limits.pages)
    if adapters := settings.adapters:
        progress("loading adapters", 99)
        stock(engine.adapters, adapters)
    engine.served = _served(settings, models, limits)
    return engine


def _served(settings: Settings, models: Models, limits: Limits) -> Served:
    """What the summary says of what is loaded."""
    footprints = [model.footprint for model in models.all()]
    served = models.served
    return Served.of(
        settings,
        limits,
        device="cpu" if served.device.type == "cpu" else torch.cuda.get_device_name(served.device),
        kernels=models.kernels,
        weight_bytes=sum(footprint.bytes for footprint in footprints),
        weight_bits=round(8 * served.footprint.bytes / max(1, served.footprint.numbers), 1),
        kv_cache_bytes=limits.pages * _need(models).page_bytes,
    )


def _load(settings: Settings, device: str, progress: Progress) -> Models:
    """The models, the draft model after a look at whether it has the same tokens."""
    if settings.draft_model_dir is not None:
        need_same_tokens(settings.model_dir, settings.draft_model_dir)

    quantize = quantizations(settings)
    progress("choosing kernels", 0)
    kernels = gpu = None
    reason = "--disable-custom-kernels"
    if not settings.disable_custom_kernels:
        recipes = [read_recipe(path, settings.dtype, asked, device) for path, asked in quantize.items()]
        if device == "cpu":
            kernels, reason = find_kernels(recipes, device)
        else:
            gpu, reason = find_gpu(recipes, device)
    words = f"torch's ({reason})" if reason else "our own"
    if device == "cpu":
        words += f", {choose_threads() if kernels is None else kernels.threads} threads"

    def build(directory: Path, told: Progress) -> Model:
        asked, narrow = quantize[directory], settings.kv_cache_dtype is not None
        trusted = settings.trust_remote_code
        return build_model(directory, settings.dtype, device, told, trusted, kernels, asked, gpu, narrow)

    served = build(settings.model_dir, progress)
    if settings.draft_model_dir is None:
        return Models(served, None, kernels=words)
    draft = build(settings.draft_model_dir, lambda stage, percent: progress(f"draft model: {stage}", percent))
    if draft.context < (settings.max_total_tokens or 0):
        raise UserError(
            f"`max_total_tokens` is {settings.max_total_tokens}, but the draft model's sequences have at most "
            f"{draft.context} tokens. Lower --max-total-tokens, or choose another --draft-model-id or none."
        )
    if draft.context < served.context:
        log.warning("sequences are limited to %d tokens, those of the draft model", draft.context)
    return Models(served, draft, kernels=words)


def quantizations(settings: Settings) -> dict[Path, str | None]:
    """What --quantize says of the models in these directories: what is made at load is made of the draft model too, but
    what weights are already is said of the served model alone."""
    found = {settings.model_dir: settings.quantize}
    if settings.draft_model_dir is not None:
        found.setdefault(settings.draft_model_dir, settings.quantize if settings.quantize in MADE_AT_LOAD else None)
    return found


def _engine(
    models: Models,
    limits: Limits,
    graphs: list[int],
    tokens: Callable[[], LLTokenizer] | None = None,
    mark: Watermark | None = None,
) -> TorchEngine:
    """The engine over caches of so many pages, which will record decode steps of these numbers of rows."""
    served, draft = models.served, models.draft
    attention = build_attention(models.kv(served), limits.pages, served.device)
    second = None if draft is None else Draft(draft, build_attention(models.kv(draft), limits.pages, draft.device))
    recording = None
    if graphs and isinstance(attention, Recordable):
        recording = Recording(CudaGraphs(), attention, graphs)
    return TorchEngine(served, attention, limits, tokens, second, mark, recording)


def _graphs(settings: Settings, served: Model) -> list[int]:
    """The numbers of rows of the decode steps that are recorded."""
    if served.device.type != "cuda":
        if any(settings.cuda_graphs):
            log.warning("--cuda-graphs has no effect on CPU")
        return []
    most = memory.batch_size(settings, "cuda")
    rows = sizes(settings.cuda_graphs, most)
    if not rows and 0 not in settings.cuda_graphs:
        log.warning("no CUDA graphs: --cuda-graphs names no size from 1 to %d, the rows of a step", most)
    if rows and served.unrecordable is not None:
        log.warning("decode steps run without CUDA graphs: %s", served.unrecordable)
        return []
    return rows


def _tokens(directory: Path, vocab_size: int) -> LLTokenizer:
    card = read_card(directory)
    return token_table(read_tokenizer(card), card.eos_token_ids, vocab_size)


def _device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device that torch can use. Start with --device cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _stored(name: str | None, device: str) -> torch.dtype | None:
    """What --kv-cache-dtype asks for."""
    if name is None:
        return None
    if device != "cuda":
        raise UserError(
            f"`kv_cache_dtype` is {name}, and caches of 8 bits are for GPUs, but this worker is on CPU, where keys and "
            "values have the model's type. Leave out --kv-cache-dtype."
        )
    found: torch.dtype = getattr(torch, name.replace("fp8", "float8"))
    return found


def _need(models: Models) -> memory.Need:
    loaded, served = models.all(), models.served
    return memory.Need(
        context=min(model.context for model in loaded),
        page_size=page_size(served.kv, served.device),
        page_bytes=sum(page_bytes(models.kv(model), model.device) for model in loaded),
        vocab_size=served.vocab_size,
        dtype=str(served.kv.dtype).removeprefix("torch."),
        device=served.device.type,
    )


def _held(run: Path) -> int | None:
    """The number of pages that an earlier worker of this supervisor had, if there was one."""
    try:
        supervisor, pages = (run / PAGES_FILE).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pages) if supervisor == str(os.getppid()) else None


def _hold(run: Path, pages: int) -> None:
    """Leaves the number of pages to a worker that may take this one's place."""
    (run / PAGES_FILE).write_text(f"{os.getppid()} {pages}")


def _room(settings: Settings, models: Models, graphs: list[int]) -> memory.Room:
    """Room for the KV cache. On CUDA after a step as large as any to come, which shows what a step itself takes, and
    the largest recording, whose memory the others share."""
    device = models.served.device
    if device.type != "cuda":
        return memory.room_on_host()
    rows = memory.batch_size(settings, "cuda")
    total = memory.prefill_tokens(settings, "cuda")
    need, drafts = _need(models), settings.speculate or 0
    behind = 2 + drafts  # positions
    tokens = max(1, min(total // rows, (settings.max_total_tokens or need.context) - behind))
    pages = rows * -(-(tokens + behind) // need.page_size)
    limits = Limits(
        max(settings.max_total_tokens or need.context, tokens + behind),
        tokens,
        pages * need.page_size,
        total,
        rows,
        pages,
        need.page_size,
        need.vocab_size,
        need.dtype,
        "cuda",
    )
    torch.cuda.reset_peak_memory_stats(device)
    try:
        engine = _engine(models, limits, graphs)
        before = torch.cuda.memory_allocated(device)
        warm_up(engine, limits, rows, tokens, drafts, models.draft is not None)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"Not enough memory to handle {total} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        ) from error
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    unrecorded, _ = torch.cuda.mem_get_info(device)
    recordings = engine.record(1)
    free, whole = torch.cuda.mem_get_info(device)
    recorded = unrecorded - free + recordings * memory.RECORDING_BYTES
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    log.debug(
        "a step takes up to %.2f GB, %d recorded ones %.2f GB; %.2f of %.2f GB are free",
        *(activations / 1e9, recordings, recorded / 1e9, free / 1e9, whole / 1e9),
    )
    return memory.room_on_cuda(free, whole, settings, activations + recorded)
