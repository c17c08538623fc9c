"""From a model directory to a model in memory."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgi.kernel.errors import UserError
from tgi.worker.batch import Model
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.linear import Linear
from tgi.worker.models.config import MODEL_TYPES, DecoderConfig, Unsupported, decoder_config
from tgi.worker.models.decoder import Decoder, Layer, Weights

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
    if config["model_type"] in MODEL_TYPES:
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
    progress("loading weights", 0)
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        weights = _Reader(checkpoint, config, dtype, device).weights(progress)
    if device.type == "cpu":
        # Mapped anew, so that what was read of the file so far is given back. Rows come into memory when looked up.
        with Checkpoint(directory) as checkpoint:
            weights = weights._replace(embedding=_embedding(checkpoint, config))
    progress("measuring kernels", 95)
    return Decoder(config, weights, dtype, device)


def _embedding(checkpoint: Checkpoint, config: DecoderConfig) -> Tensor:
    return checkpoint.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden)


class _Reader:
    """Turns a checkpoint into the decoder's weights, one layer at a time, so that they exist once."""

    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device

    def weights(self, progress: Progress) -> Weights:
        config = self._config
        layers = []
        for number in range(config.layers):
            layers.append(self._layer(f"model.layers.{number}."))
            progress("loading weights", 90 * (number + 1) // config.layers)
        tied = config.tied or "lm_head.weight" not in self._checkpoint
        head = "model.embed_tokens" if tied else "lm_head"
        return Weights(
            embedding=_embedding(self._checkpoint, config).to(self._device),
            layers=layers,
            norm=self._norm("model.norm.weight", config.hidden),
            head=self._linear(False, config.hidden, (head, config.vocab_size)),
        )

    def _layer(self, prefix: str) -> Layer:
        config = self._config
        heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = ((attention + "q_proj", heads), (attention + "k_proj", kv_heads), (attention + "v_proj", kv_heads))
        output = (attention + "o_proj", config.hidden)
        bias = config.mlp_bias
        return Layer(
            attention_norm=self._norm(prefix + "input_layernorm.weight", config.hidden),
            qkv=self._linear(config.qkv_bias, config.hidden, *qkv),
            head_norm=self._head_norm(attention) if config.head_norm else None,
            output=self._linear(config.output_bias, heads, output, then="add"),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", config.hidden),
            gate=self._linear(bias, config.hidden, (mlp + "gate_proj", config.intermediate), then="silu"),
            up=self._linear(bias, config.hidden, (mlp + "up_proj", config.intermediate), then="mul"),
            down=self._linear(bias, config.intermediate, (mlp + "down_proj", config.hidden), then="add"),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        return self._checkpoint.tensor(name, size).to(self._device, torch.float32, copy=True)

    def _head_norm(self, prefix: str) -> Tensor:
        config = self._config
        query = self._norm(prefix + "q_norm.weight", config.head_dim)
        key = self._norm(prefix + "k_norm.weight", config.head_dim)
        return torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])

    def _linear(self, bias: bool, inputs: int, *parts: tuple[str, int], then: str = "none") -> Linear:
        """One linear layer from the weights of `parts` (name, outputs), one above the other."""
        weights = [self._checkpoint.tensor(f"{name}.weight", outputs, inputs) for name, outputs in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        weight = weight.to(self._device, self._dtype)
        if not bias:
            return Linear(weight, None, then)
        biases = torch.cat([self._checkpoint.tensor(f"{name}.bias", outputs) for name, outputs in parts])
        return Linear(weight, biases.to(self._device, self._dtype), then)
