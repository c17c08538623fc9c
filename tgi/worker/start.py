"""Starts the torch engine: model, memory, a first step to warm everything up."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from llguidance import LLTokenizer

from tgi.hub.card import read_card
from tgi.hub.grammar import token_table
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.errors import UserError
from tgi.kernel.messages import Limits, Sampling, Slot, Step, encode
from tgi.kernel.pack import FLOAT32, INT32, UINT8, pack
from tgi.kernel.settings import Settings
from tgi.worker import memory
from tgi.worker.attention import build_attention, page_bytes, page_size
from tgi.worker.batch import Model
from tgi.worker.engine import TorchEngine
from tgi.worker.load import build_model
from tgi.worker.lora.shelf import stock
from tgi.worker.threads import choose_threads

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]
PAGES_FILE = "worker.pages"  # in the run directory: supervisor's pid, pages
WARM_PROMPT = 20  # tokens: more than one page
# Every processor at work.
WARM_SAMPLING = Sampling(
    seed=1,
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    count_penalty=0.1,
    presence_penalty=0.1,
    bias_ids=pack(INT32, [0]),
    biases=pack(FLOAT32, [1.0]),
)


def start_engine(settings: Settings, progress: Progress) -> TorchEngine:
    """The engine, ready to serve. Raises UserError where model, device or memory do not allow it."""
    device = _device(settings.device)
    if device == "cpu":
        choose_threads()
    model = build_model(settings.model_dir, settings.dtype, device, progress, settings.trust_remote_code)
    progress("sizing the KV cache", 96)
    limits = memory.choose_limits(settings, _need(model), _room(settings, model), _held(settings.run_dir))
    attention = build_attention(model.kv, limits.pages, model.device)
    engine = TorchEngine(model, attention, limits, partial(_tokens, settings.model_dir, model.vocab_size))
    progress("warming up", 98)
    rows = min(2, limits.max_batch_size)
    tokens = min(WARM_PROMPT, limits.max_input_tokens, limits.max_batch_prefill_tokens // rows)
    _run(engine, limits, rows, tokens)
    _hold(settings.run_dir, limits.pages)
    if adapters := settings.adapters:
        progress("loading adapters", 99)
        stock(engine.adapters, adapters)
    return engine


def _tokens(directory: Path, vocab_size: int) -> LLTokenizer:
    card = read_card(directory)
    return token_table(read_tokenizer(card), card.eos_token_ids, vocab_size)


def _device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device that torch can use. Start with --device cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _need(model: Model) -> memory.Need:
    return memory.Need(
        context=model.context,
        page_size=page_size(model.device),
        page_bytes=page_bytes(model.kv, model.device),
        vocab_size=model.vocab_size,
        dtype=str(model.kv.dtype).removeprefix("torch."),
        device=model.device.type,
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


def _room(settings: Settings, model: Model) -> memory.Room:
    """Room for the KV cache. On CUDA after a step as large as any to come, which shows what a step itself takes."""
    if model.device.type != "cuda":
        return memory.room_on_host()
    rows = memory.batch_size(settings, "cuda")
    total = memory.prefill_tokens(settings, "cuda")
    tokens = max(1, min(total // rows, (settings.max_total_tokens or model.context) - 1))
    need = _need(model)
    pages = rows * -(-(tokens + 1) // need.page_size)
    limits = Limits(
        tokens + 1,
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
    torch.cuda.reset_peak_memory_stats(model.device)
    try:
        engine = TorchEngine(model, build_attention(model.kv, pages, model.device), limits)
        before = torch.cuda.memory_allocated(model.device)
        _run(engine, limits, rows, tokens)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"Not enough memory to handle {total} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        ) from error
    activations = torch.cuda.max_memory_allocated(model.device) - before
    del engine
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(model.device)
    log.info("a step takes up to %.2f GB; %.2f of %.2f GB are free", activations / 1e9, free / 1e9, whole / 1e9)
    return memory.room_on_cuda(free, whole, settings, activations)


def _run(engine: TorchEngine, limits: Limits, rows: int, tokens: int) -> None:
    """One prefill of `rows` prompts of `tokens` tokens, and a decode step behind it; then all is forgotten."""
    each = -(-(tokens + 1) // limits.page_size)
    ids = pack(INT32, [0] * tokens)
    slots = [Slot(slot, ids, tokens, encode(WARM_SAMPLING if slot % 2 else Sampling(0))) for slot in range(rows)]
    owners = pack(INT32, [slot for slot in range(rows) for _ in range(each)])
    pages = pack(INT32, [page % limits.pages for page in range(rows * each)])
    columns = pack(INT32, range(rows))
    draws = pack(UINT8, [1] * rows)
    prefill = Step(1, 0, slots, owners, pages, columns, pack(INT32, [0] * rows), pack(INT32, [tokens] * rows), draws)
    decode = Step(2, 0, [], b"", b"", columns, pack(INT32, [tokens] * rows), pack(INT32, [1] * rows), draws)
    for step in (prefill, decode):
        engine.collect(engine.launch(step))
    engine.reset()
