"""Loads a model: reads config.json, chooses the implementation and the dtype, and loads the weights."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.quantizer import CpuQuantizer
from tgi.worker.decoder_config import DecoderConfig, UnsupportedConfig
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.host_cpu import has_arithmetic
from tgi.worker.models.config_reader import read_decoder_config
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.interface import Model
from tgi.worker.models.weight_loader import DecoderWeightLoader, read_kv_scales, stored_embedding
from tgi.worker.quantization import float8
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.scheme import QuantizationScheme, resolve_scheme

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]  # stage, percent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSpec(NamedTuple):
    """How a model is computed, from its config.json and the options."""

    decoder: DecoderConfig | None  # None: the model runs through transformers
    dtype: torch.dtype
    scheme: QuantizationScheme = QuantizationScheme()


def read_model_spec(
    directory: Path, dtype: str, quantize: str | None = None, device: str = "cpu", own_kernels: bool = False
) -> ModelSpec:
    """The ModelSpec of a model directory.

    `dtype` is "auto" (see resolve_dtype), "float32", "bfloat16" or "float16"; `quantize` is None or one of
    settings.QUANTIZATIONS. `own_kernels`: our kernels compute, not torch's. Raises UserError if the model cannot be
    served.
    """
    config = read_config(directory)
    number = resolve_dtype(config, dtype, device, own_kernels)
    scheme = resolve_scheme(directory, config, quantize)
    if config["model_type"] in FAMILIES:
        try:
            return ModelSpec(read_decoder_config(config), number, scheme)
        except UnsupportedConfig as reason:
            log.debug("%s in %s/config.json: this model runs through transformers", reason, directory)
        except KeyError as error:
            raise UserError(f"{directory}/config.json has no {error}, which {config['model_type']} needs.") from error
    if scheme != QuantizationScheme() or config.get("quantization_config") is not None:
        raise UserError(
            f"The model in {directory} runs through transformers, which cannot be done with quantized weights. Serve "
            "the original weights, without --quantize."
        )
    return ModelSpec(None, number)


def build_model(
    directory: Path,
    dtype: str,
    device: str,
    progress: Progress,
    trust_code: bool = False,
    kernels: CpuKernels | None = None,
    quantize: str | None = None,
    gpu: GpuKernels | None = None,
    quantized_cache: bool = False,
) -> Model:
    """Loads the model of a directory onto `device` ("cpu", "cuda"). `dtype` and `quantize` as in read_model_spec.

    `trust_code` allows Python code in the directory to run. `kernels` are our CPU kernels, which must support this
    model, and `gpu` our GPU kernels; None = torch's. `quantized_cache`: the KV cache will have an 8-bit type, so its
    scales are loaded. `progress` is called with a stage and a percentage. Raises UserError if the model cannot be
    served.
    """
    spec = read_model_spec(directory, dtype, quantize, device, kernels is not None)
    if device == "cpu" and kernels is None:
        _log_emulation(stored_dtype(read_config(directory)), spec.dtype)
    if spec.decoder is not None:
        return _build_decoder(
            directory, spec.decoder, spec, torch.device(device), progress, kernels, gpu, quantized_cache
        )
    from tgi.worker.models.transformers_model import (
        build_transformers_model,  # imports transformers, which takes seconds
    )

    return build_transformers_model(directory, spec.dtype, torch.device(device), progress, trust_code)


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json. Raises UserError if it is missing, invalid or names no model_type."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no config.json, so it is not a model directory.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Fetch the model again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} names no model_type. A model directory as transformers writes it is expected.")
    return config


def resolve_dtype(config: dict[str, Any], dtype: str, device: str, own_kernels: bool = False) -> torch.dtype:
    """The dtype to compute in. "auto": the config's, but float32 where torch's kernels compute on a CPU and would
    emulate the config's dtype."""
    if dtype != "auto":
        return _dtype(dtype)
    own = stored_dtype(config)
    return own if own_kernels or device != "cpu" or has_arithmetic(dtype_name(own)) else torch.float32


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that the config names; float32 if it names none."""
    return _dtype(config.get("dtype") or config.get("torch_dtype") or "float32")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in settings.DTYPES."""
    return str(dtype).removeprefix("torch.")


def _log_emulation(own: torch.dtype, chosen: torch.dtype) -> None:
    """Logs if the CPU emulates the chosen dtype, or would emulate the model's own."""
    if not has_arithmetic(dtype_name(chosen)):
        name = dtype_name(chosen)
        log.warning("this CPU has no arithmetic for %s and emulates it: prompts are faster in --dtype float32", name)
    elif chosen is not own and not has_arithmetic(dtype_name(own)):
        log.debug("computing in %s: this CPU has no arithmetic for the model's %s", dtype_name(chosen), dtype_name(own))


def _dtype(name: Any) -> torch.dtype:
    """The dtype of a name. Raises UserError if it is not supported."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)} with --dtype.")
    return DTYPES[name]


def _build_decoder(
    directory: Path,
    config: DecoderConfig,
    spec: ModelSpec,
    device: torch.device,
    progress: Progress,
    kernels: CpuKernels | None,
    gpu: GpuKernels | None,
    quantized_cache: bool,
) -> DecoderModel:
    progress("loading weights", 0)
    dtype, scheme = spec.dtype, spec.scheme
    if scheme.made is not None and device.type == "cpu" and kernels is None:
        log.warning("--quantize saves no memory here: torch's CPU kernels need dequantized weights")
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        quantize = quantize_weight if kernels is None else CpuQuantizer(kernels).quantize_weight
        source = scheme.source(checkpoint, quantize, float8.stays_float8_on(device))
        reader = DecoderWeightLoader(source, config, dtype, device, kernels, gpu)
        weights = reader.load(lambda percent: progress("loading weights", percent * 9 // 10))
        scales = read_kv_scales(checkpoint, len(config.layers)) if quantized_cache else ()
    if device.type == "cpu" and (scheme.made is not None or not weights.embedding.shared):
        # Maps the file again for the embedding, which releases the pages read so far; lookups read only their rows.
        with Checkpoint(directory) as checkpoint:
            weights = weights._replace(embedding=stored_embedding(scheme.stored_source(checkpoint), config, dtype))
    progress("measuring kernels", 95)
    return DecoderModel(config, weights, dtype, device, kernels, gpu, scales)
