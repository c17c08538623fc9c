"""From a model directory to a model in memory."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tgi.kernel.errors import UserError
from tgi.worker.batch import Model
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.models.config import DecoderConfig, Unsupported
from tgi.worker.models.decoder import Decoder
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.reading import decoder_config
from tgi.worker.models.weights import WeightReader, embedding
from tgi.worker.native.choose import find_kernels

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]  # stage, percent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(card_path: Path, dtype: str, device: str, progress: Progress, trust_code: bool = False) -> Model:
    """The model in directory `card_path`, ready to compute on `device` ("cpu", "cuda").

    `dtype` is "auto" (the one that config.json names), "float32", "bfloat16" or "float16".
    `trust_code` lets Python code in the directory run. Raises UserError for whatever is wrong with the directory.
    """
    config = read_config(card_path)
    number = resolve_dtype(config, dtype)
    place = torch.device(device)
    if "quantization_config" in config:
        raise UserError(f"The weights in {card_path} are quantized, which is not supported. Use the original weights.")
    if config["model_type"] in FAMILIES:
        try:
            return _build_decoder(card_path, decoder_config(config), number, place, progress)
        except Unsupported as reason:
            log.info("%s in %s/config.json: this model runs through transformers", reason, card_path)
        except KeyError as error:
            raise UserError(f"{card_path}/config.json has no {error}, which {config['model_type']} needs.") from error
    from tgi.worker.models.fallback import build_fallback  # imports transformers, which takes seconds

    return build_fallback(card_path, number, place, progress, trust_code)


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


def resolve_dtype(config: dict[str, Any], dtype: str) -> torch.dtype:
    """The number format to compute in. "auto": what the config names, float32 if it names none."""
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)} with --dtype.")
    return DTYPES[dtype]


def _build_decoder(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Decoder:
    kernels = find_kernels(config, dtype, device)
    progress("loading weights", 0)
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        reader = WeightReader(checkpoint, config, dtype, device, kernels)
        weights = reader.weights(lambda percent: progress("loading weights", percent * 9 // 10))
    if device.type == "cpu":
        # Mapped anew, so that what was read of the file so far is given back. Rows come into memory when looked up.
        with Checkpoint(directory) as checkpoint:
            weights = weights._replace(embedding=embedding(checkpoint, config))
    progress("measuring kernels", 95)
    return Decoder(config, weights, dtype, device, kernels)
