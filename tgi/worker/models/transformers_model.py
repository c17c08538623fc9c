"""Fallback for other model types: any causal model of transformers, over our paged KV cache.

transformers computes everything except attention. A step's T tokens are passed as one sequence with their positions; an
attention implementation registered with transformers' attention interface passes queries, keys and values to our
attention backend, which knows the rows of the batch. The model must use that interface in every layer.

Batch invariance on CPU: each nn.Linear and Conv1D is replaced by our batch-invariant Linear, and norms compute each row
alone. So logits do not depend on the batch for GPT-2 and most models whose activation uses tanh. Those of other models
(silu, erf-gelu) may differ in the last bit with the number of rows and threads, because torch computes the odd elements
at the end of a thread's share with another exponential; mixtures of experts may differ more, because the number of rows
in their products depends on the batch. On CUDA no layer is replaced.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tgi.hub.model_config import scaled_context
from tgi.microkernel.errors import UserError
from tgi.worker.attention.interface import AttentionBackend, ForwardBatch, KVCacheSpec
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.greedy import FindGreedyTokens, GreedyTokens, find_greedy_tokens
from tgi.worker.head_logits import HeadLogits
from tgi.worker.layers.linear import ANY_ROWS, Linear, choose_row_counts
from tgi.worker.models.interface import LogitsReader, WeightFootprint
from tgi.worker.models.transformers_check import (
    PROBE,
    AttentionProbe,
    attention_implementation,
    compare_with_plain,
    register_probe,
)

log = logging.getLogger(__name__)

IMPLEMENTATION = "tgi_paged"
# Rotary types whose angles depend on the longest sequence of the batch, if it exceeds the original length.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


class TransformersStep(NamedTuple):
    """The argument that the model passes on to its attention layers."""

    attention: AttentionBackend
    plan: Any  # of `attention`
    tokens: int  # rows from this one on are padding


def build_transformers_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int], None],
    trust_code: bool = False,
    gpu: GpuKernels | None = None,
) -> "TransformersModel":
    """Loads the model of a directory. Its Python code runs only if `trust_code`, and if transformers lacks the type.
    `gpu`: our GPU kernels, for attention and sampling; None = torch's.

    Raises UserError if transformers cannot load the model or it does not support the attention interface.
    """
    progress("loading weights", 0)
    transformers.AttentionInterface.register(IMPLEMENTATION, _attend)
    register_probe()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its warnings concern padding and masks, which are not used here
    values = json.loads((directory / "config.json").read_text())
    kind, brings_code = values["model_type"], "auto_map" in values
    trusted = trust_code and kind not in transformers.CONFIG_MAPPING
    if kind not in transformers.CONFIG_MAPPING and not (brings_code and trusted):
        hint = " The code that comes with it runs only with --trust-remote-code." if brings_code else ""
        raise UserError(
            f"Unsupported model type {kind}: neither this server nor transformers {transformers.__version__} knows it."
            + hint
        )
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trusted)
        name = config.model_type
        if config.is_encoder_decoder:
            raise UserError(f"{name} is an encoder-decoder model, which does not run through transformers here.")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True,
            use_safetensors=True, trust_remote_code=trusted,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if error.args == (IMPLEMENTATION,):  # looked up among the model's own attention classes
            raise UserError(
                f"{kind} computes attention in classes of its own and not through transformers' attention interface, "
                "so its keys and values cannot be kept in pages. Serve a model of another type."
            ) from error
        raise UserError(f"transformers cannot load the model in {directory}: {error}") from error
    if not model._supports_attention_backend:
        raise UserError(
            f"{name} does not support transformers' attention interface, so its keys and values cannot be kept in "
            "pages. Serve a model of another type."
        )
    progress("loading weights", 80)
    model.eval().requires_grad_(False).to(device)
    parameters = list(model.parameters())
    footprint = WeightFootprint(sum(one.nbytes for one in parameters), sum(one.numel() for one in parameters))
    if device.type == "cpu":
        _replace_linears(model)
    progress("measuring kernels", 90)
    return TransformersModel(model, dtype, device, footprint, gpu)


class TransformersModel:
    """Implements Model with a model of transformers."""

    cuda_graph_obstacle: str | None = "models of transformers are not checked for CUDA graphs"

    @torch.inference_mode()
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        footprint: WeightFootprint,
        gpu: GpuKernels | None = None,
    ) -> None:
        self.device = device
        self.footprint = footprint
        self.find_greedy_tokens: FindGreedyTokens = find_greedy_tokens
        self._model = model
        decoder = model.get_decoder()
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters and decoder is not model
        self._body = decoder if self._selects_logits else model  # a model that always computes all logits runs once
        linears = [module.linear for module in model.modules() if isinstance(module, _BatchInvariantLinear)]
        self._row_counts = choose_row_counts(linears) if linears else ANY_ROWS
        config = model.config.get_text_config(decoder=True)
        layers = config.num_hidden_layers
        self.context_length = _context_length(config)
        probe = AttentionProbe(config.model_type, self.context_length, device)
        ids = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            with attention_implementation(model, PROBE):
                logits = self._run(ids, torch.arange(2, device=device), ids[:1], probe)
        except (TypeError, AttributeError, KeyError, IndexError) as error:
            raise UserError(f"{config.model_type} cannot run over a paged cache: {error}") from error
        found = probe.found
        if sorted(found.layers) != list(range(layers)):
            raise UserError(
                f"{config.model_type} keeps state of its own in some layers: {len(found.layers)} of {layers} use "
                "transformers' attention interface. Only models with attention in every layer are served."
            )
        if len(shapes := set(found.layers.values())) > 1:
            raise UserError(f"{config.model_type} has layers with different heads {sorted(shapes)}; expected one kind.")
        self.vocab_size = logits.shape[-1]
        windows = tuple(found.windows[layer] for layer in range(layers))
        self.kv = KVCacheSpec(layers, *shapes.pop(), dtype, windows, found.softcap, gpu_kernels=gpu)
        compare_with_plain(model, self, config.model_type)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None) -> Tensor:
        """See Model. Pads the tokens once, to a row count that all linear layers accept."""
        count = batch.tokens.shape[0]
        pad = (0, self._row_counts.padded(count) - count)
        step = TransformersStep(attention, attention.plan(batch), count)
        logits_indices = batch.logits_indices if len(batch.logits_indices) else batch.cu_query_lens[:1].long()
        tokens, positions = F.pad(batch.tokens, pad), F.pad(batch.positions, pad)
        if reader is None:
            logits = self._run(tokens, positions, logits_indices, step)
        else:
            with _cached_result(self._body):
                logits = self._run(tokens, positions, logits_indices, step)
                for block in reader.blocks:
                    reader.read_logits(self._run(tokens, positions, block, step).float())
        return logits[: len(batch.logits_indices)].float()

    def forward_head(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> HeadLogits:
        return HeadLogits(self.forward(batch, attention, reader))

    def forward_greedy(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> GreedyTokens:
        return find_greedy_tokens(self.forward(batch, attention, reader))

    def prepare_decode(self, batch: ForwardBatch, attention: AttentionBackend) -> None:
        return None

    def load_adapter(self, directory: Path) -> Any:
        """See Model. Always raises UserError: the names of this model's projections are unknown."""
        raise UserError(
            f"The adapter in {directory} cannot be served: LoRA adapters need a model that this server computes "
            "itself, and this one runs through transformers. Merge the adapter into the model's weights instead."
        )

    def _run(self, tokens: Tensor, positions: Tensor, logits_indices: Tensor, step: Any) -> Tensor:
        """Logits [D, vocab] at `logits_indices`, in the model's dtype."""
        keep = {"logits_to_keep": logits_indices} if self._selects_logits else {}
        logits = self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged_step=step, **keep
        ).logits[0]
        return logits if self._selects_logits else logits.index_select(0, logits_indices)


@contextmanager
def _cached_result(body: nn.Module) -> Iterator[None]:
    """Lets `body` compute once; later calls return the first result.

    If `body` is the model without its head, repeated calls of the model compute only the head and its logit scaling,
    for a few rows at a time.
    """
    forward = body.forward
    results: list[Any] = []

    def once(*arguments: Any, **named: Any) -> Any:
        if not results:
            results.append(forward(*arguments, **named))
        return results[0]

    body.forward = once
    try:
        yield
    finally:
        del body.forward


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    paged_step: TransformersStep,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out."""
    attention, plan, tokens = paged_step
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    qkv = torch.cat([states[0, :, :tokens] for states in (query, key, value)]).transpose(0, 1).contiguous()
    mixed = attention.write_and_attend(plan, module.layer_idx, qkv, scale)
    return F.pad(mixed, (0, 0, 0, 0, 0, query.shape[2] - tokens))[None], None


class _BatchInvariantLinear(nn.Module):
    """Replaces an nn.Linear or a Conv1D of the model."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        raise TypeError("its code reads the weight of a linear layer, which on CPU is kept in the order of our kernels")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _replace_linears(model: nn.Module) -> None:
    """Replaces the linear layers one by one, so that memory holds few weights twice."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight.detach()
            elif type(child) is Conv1D:  # a linear layer with its weight transposed
                weight = child.weight.detach().T.contiguous()
            else:
                continue
            bias = None if child.bias is None else child.bias.detach()
            setattr(parent, name, _BatchInvariantLinear(Linear(weight, bias)))


def _context_length(config: Any) -> int:
    """Maximal sequence length: within the original length, if the rotary angles depend on the batch beyond it."""
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if trained is None:
        raise UserError(f"{config.model_type} does not say its longest sequence (max_position_embeddings).")
    longest = scaled_context(trained, config.to_dict())
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in LENGTH_DEPENDENT_ROPES:
        return longest
    limit = min(longest, rope.get("original_max_position_embeddings") or trained)
    if limit < longest:
        log.warning("sequences are limited to %d tokens instead of %d: %s", limit, longest, config.model_type)
    return limit
