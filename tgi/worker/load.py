"""From a model directory to a model in memory."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tgi.kernel.errors import UserError
from tgi.worker import float8
from tgi.worker.batch import Model
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.models.cache_scales import cache_scales
from tgi.worker.models.config import DecoderConfig, Unsupported
from tgi.worker.models.decoder import Decoder
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.reading import decoder_config
from tgi.worker.models.weights import WeightReader, stored_embedding
from tgi.worker.native.kernels import Kernels
from tgi.worker.native.quantize import Quantizer
from tgi.worker.processor import multiplies
from tgi.worker.quantization.quantize import quantized
from tgi.worker.quantization.scheme import Scheme, read_scheme

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]  # stage, percent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Recipe(NamedTuple):
    """What the config.json of a model says of how it is computed."""

    decoder: DecoderConfig | None  # None: through transformers
    dtype: torch.dtype
    scheme: Scheme = Scheme()


def read_recipe(directory: Path, dtype: str, quantize: str | None = None, device: str = "cpu") -> Recipe:
    """Of the model in a directory. `dtype` is "auto" (see resolve_dtype), "float32", "bfloat16" or "float16",
    `quantize` None or one of settings.QUANTIZATIONS. Raises UserError where there is none that can be computed."""
    config = read_config(directory)
    number = resolve_dtype(config, dtype, device)
    scheme = read_scheme(directory, config, quantize)
    if config["model_type"] in FAMILIES:
        try:
            return Recipe(decoder_config(config), number, scheme)
        except Unsupported as reason:
            log.debug("%s in %s/config.json: this model runs through transformers", reason, directory)
        except KeyError as error:
            raise UserError(f"{directory}/config.json has no {error}, which {config['model_type']} needs.") from error
    if scheme != Scheme() or config.get("quantization_config") is not None:
        raise UserError(
            f"The model in {directory} runs through transformers, which cannot be done with quantized weights. Serve "
            "the original weights, without --quantize."
        )
    return Recipe(None, number)


def build_model(
    directory: Path,
    dtype: str,
    device: str,
    progress: Progress,
    trust_code: bool = False,
    kernels: Kernels | None = None,
    quantize: str | None = None,
    gpu: Gpu | None = None,
    narrow: bool = False,
) -> Model:
    """The model in a directory, ready to compute on `device` ("cpu", "cuda"). `dtype`, `quantize` as for read_recipe.

    `trust_code` lets Python code in the directory run. `kernels`, if given, fit this model (native/choose.py), and
    `gpu` this device (gpu/choose.py). `narrow`: its cache will be of 8 bits. Raises UserError for whatever is wrong
    with the directory.
    """
    recipe, place = read_recipe(directory, dtype, quantize, device), torch.device(device)
    if device == "cpu":
        _tell_type(stored_dtype(read_config(directory)), recipe.dtype)
    if recipe.decoder is not None:
        return _build_decoder(directory, recipe.decoder, recipe, place, progress, kernels, gpu, narrow)
    from tgi.worker.models.fallback import build_fallback  # imports transformers, which takes seconds

    return build_fallback(directory, recipe.dtype, place, progress, trust_code)


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json. Raises UserError unless it is one, with a model_type."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no config.json, so it is no model directory.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Fetch the model again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} names no model_type. A model directory as transformers writes it is expected.")
    return config


def resolve_dtype(config: dict[str, Any], dtype: str, device: str) -> torch.dtype:
    """The number format to compute in. "auto": the config's own, but float32 on a CPU that only emulates that."""
    if dtype != "auto":
        return _dtype(dtype)
    own = stored_dtype(config)
    return own if device != "cpu" or multiplies(_name(own)) else torch.float32


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """The number format that the config names, float32 if it names none."""
    return _dtype(config.get("dtype") or config.get("torch_dtype") or "float32")


def _tell_type(own: torch.dtype, chosen: torch.dtype) -> None:
    """Logs what follows from a type that the CPU emulates: the model's `own`, or the one that was asked for."""
    if not multiplies(_name(chosen)):
        name = _name(chosen)
        log.warning("this CPU has no arithmetic for %s and emulates it: prompts are faster in --dtype float32", name)
    elif chosen is not own and not multiplies(_name(own)):
        log.debug("computing in %s: this CPU has no arithmetic for the model's %s", _name(chosen), _name(own))


def _name(dtype: torch.dtype) -> str:
    """As in settings.DTYPES."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    """The type of a name."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)} with --dtype.")
    return DTYPES[name]


def _build_decoder(
    directory: Path,
    config: DecoderConfig,
    recipe: Recipe,
    device: torch.device,
    progress: Progress,
    kernels: Kernels | None,
    gpu: Gpu | None,
    narrow: bool,
) -> Decoder:
    progress("loading weights", 0)
    dtype, scheme = recipe.dtype, recipe.scheme
    if scheme.made is not None and device.type == "cpu" and kernels is None:
        log.warning("--quantize saves no memory here: torch's kernels make weights in few bits plain")
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        quantize = quantized if kernels is None else Quantizer(kernels).quantized
        source = scheme.source(checkpoint, quantize, float8.held_on(device))
        reader = WeightReader(source, config, dtype, device, kernels, gpu)
        weights = reader.weights(lambda percent: progress("loading weights", percent * 9 // 10))
        scales = cache_scales(checkpoint, len(config.layers)) if narrow else ()
    if device.type == "cpu" and (scheme.made is not None or not weights.embedding.shared):
        # Mapped anew, so that what was read of the file so far is given back. Rows come into memory when looked up.
        with Checkpoint(directory) as checkpoint:
            weights = weights._replace(embedding=stored_embedding(scheme.stored_source(checkpoint), config, dtype))
    progress("measuring kernels", 95)
    return Decoder(config, weights, dtype, device, kernels, gpu, scales)
