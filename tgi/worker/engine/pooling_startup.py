"""Starts the engine of a model that ends in a vector: loads it, and derives the deployment's limits."""

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.hub.model_config import read_model_config
from tgi.hub.pooling import PoolingConfig
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.errors import UserError
from tgi.microkernel.host.heap import release_freed_memory
from tgi.microkernel.messages.protocol import DeploymentLimits
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.microkernel.settings.table import Settings
from tgi.worker.attention.packed import PackedSequences
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.decoder_config import UnsupportedConfig
from tgi.worker.engine import memory
from tgi.worker.engine.pooling_engine import PoolingEngine, Vectors
from tgi.worker.engine.startup import choose_device
from tgi.worker.engine.torch_threads import choose_threads
from tgi.worker.host_cpu import kernel_set
from tgi.worker.models.config_reader import read_config
from tgi.worker.models.dtype import dtype_name, resolve_dtype
from tgi.worker.models.encoder import ENCODER_FAMILIES, EncoderModel, read_encoder_config
from tgi.worker.models.interface import WeightFootprint
from tgi.worker.models.loader import Progress
from tgi.worker.models.pooled_decoder import BareCheckpoint, PooledDecoder
from tgi.worker.models.pooling_head import PoolingHead
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.scheme import resolve_scheme

log = logging.getLogger(__name__)

# Texts are packed up to this many tokens: more would not fit the caches of a core.
PACKED_TOKENS = {"cpu": 512, "cuda": 16384}


class HeadSize(NamedTuple):
    """What select_cpu_kernels needs of a model."""

    widest_head: int
    recurrent: None = None


class Candidate(NamedTuple):
    """The model for select_cpu_kernels."""

    dtype: torch.dtype
    decoder: HeadSize


class PooledModel(NamedTuple):
    """A loaded model."""

    vectors: Vectors
    size: int  # of a vector
    context_length: int
    footprint: WeightFootprint


def start_pooling_engine(settings: Settings, pooling: PoolingConfig, progress: Progress) -> PoolingEngine:
    """Returns the engine, ready to serve. Raises UserError where model, device or settings do not allow it."""
    device = choose_device(settings.device)
    directory = settings.model_dir
    config = read_config(directory)
    dtype = resolve_dtype(config, settings.dtype)
    kernels, reason = None, "--disable-custom-kernels"
    if not settings.disable_custom_kernels and device == "cpu":
        head_dim = read_model_config(directory, weights=False).head_dim
        kernels, reason = select_cpu_kernels([Candidate(dtype, HeadSize(head_dim))], device, progress)
    words = f"torch's ({reason})" if device == "cpu" and kernels is None else "our own"
    if device == "cpu":
        chosen = kernel_set()
        if kernels is not None and chosen is not None:
            words += f" for {chosen.name}"
        threads = choose_threads() if kernels is None else kernels.threads
        words += f", {threads} thread{'s' if threads > 1 else ''}"
    else:
        words = "torch's"
    tokens = PACKED_TOKENS[device]
    progress("loading weights", 0)
    with torch.inference_mode():
        model = load_pooled_model(directory, pooling, dtype, torch.device(device), kernels, progress, tokens)
    limits = _limits(settings, pooling, model, dtype, device)
    engine = PoolingEngine(model.vectors, model.size, limits, torch.device(device), tokens)
    progress("warming up", 98)
    with torch.inference_mode():
        model.vectors(PackedSequences.of([torch.zeros(min(20, limits.max_input_tokens)).numpy()], torch.device(device)))
    engine.served = WorkerFacts.of(
        settings,
        limits,
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(),
        kernels=words,
        weight_bytes=model.footprint.bytes,
        weight_bits=round(8 * model.footprint.bytes / max(1, model.footprint.numbers), 1),
        kv_cache_bytes=0,
    )
    if device == "cpu":
        release_freed_memory()
    return engine


def load_pooled_model(
    directory: Path,
    pooling: PoolingConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: CpuKernels | None,
    progress: Progress,
    tokens: int,
) -> PooledModel:
    """Loads a model and its head. `tokens`: that are computed at once. Raises UserError."""
    config = read_config(directory)
    kind = config["model_type"]

    def report(percent: int) -> None:
        progress("loading weights", percent * 9 // 10)

    try:
        with BareCheckpoint(directory) if kind not in ENCODER_FAMILIES else Checkpoint(directory) as checkpoint:
            model: EncoderModel | PooledDecoder
            if kind in ENCODER_FAMILIES:
                encoder = read_encoder_config(config)
                model = EncoderModel(encoder, checkpoint, dtype, device, kernels, report, tokens)
            else:
                scheme = resolve_scheme(directory, config, None)
                source = scheme.source(checkpoint, quantize_weight, False, exact=dtype is torch.float32)
                model = PooledDecoder(config, source, dtype, device, kernels, report, tokens)
            head = PoolingHead(pooling, config, checkpoint, model.hidden, device)
            if pooling.score_tokens is not None and isinstance(model, PooledDecoder):
                _add_token_score(head, directory, pooling.score_tokens, checkpoint)
    except UnsupportedConfig as reason:
        raise UserError(
            f"{reason} in {directory}/config.json: models that end in a vector do not run through transformers. "
            "docs/models.md lists those that are served."
        ) from reason
    except KeyError as error:
        raise UserError(f"{directory}/config.json has no {error}, which {kind} needs.") from error

    def vectors(batch: PackedSequences) -> Tensor:
        return head(model.hidden_states(batch), batch.bounds)

    return PooledModel(vectors, head.size, model.context_length, model.footprint)


def _add_token_score(head: PoolingHead, directory: Path, tokens: tuple[str, str], checkpoint: Checkpoint) -> None:
    """Adds the score of a model that ranks by the logits of two tokens, the second of which means yes."""
    tokenizer = read_tokenizer(read_model_config(directory, weights=False))
    name = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.embed_tokens.weight"
    rows = []
    for token in tokens:
        number = tokenizer.token_to_id(token)
        if number is None:
            raise UserError(f"{directory}/config.json: classifier_from_token names {token!r}, which is no token.")
        rows.append(checkpoint.raw_tensor(name)[number])
    head.add_token_score(*rows)


def _limits(
    settings: Settings, pooling: PoolingConfig, model: PooledModel, dtype: torch.dtype, device: str
) -> DeploymentLimits:
    """The limits of the deployment. Each request has one page, which stands for nothing but its slot."""
    asked = settings.max_input_tokens or settings.max_total_tokens
    longest = asked or pooling.max_tokens
    most = min(pooling.longest, model.context_length)
    if longest > most:
        raise UserError(
            f"`max_input_tokens` is {longest}, but the model's texts have at most {most} tokens. Lower "
            "--max-input-tokens or leave it out."
        )
    slots = memory.max_batch_size(settings, device)
    pages = 2 * slots  # more than are ever in use: none needs to be kept free
    return DeploymentLimits(
        max_total_tokens=longest,
        max_input_tokens=longest,
        max_batch_total_tokens=pages * longest,
        max_batch_prefill_tokens=min(memory.max_prefill_tokens(settings, device), pages * longest),
        max_batch_size=slots,
        pages=pages,
        page_size=longest,
        vocab_size=pooling.vocab_size * (2 if pooling.typed else 1),
        dtype=dtype_name(dtype),
        device=device,
    )
