"""Any causal model of transformers that speaks its attention interface, over our paged cache.

transformers computes everything but attention. A step's tokens go in as one sequence of T tokens with their positions;
a function registered as attention implementation hands queries, keys and values to our backend, which knows the rows.

What load does to results, on CPU: every nn.Linear and Conv1D is replaced by our batch-invariant linear layer, and
normalizations work row by row. So GPT-2's logits have the same bits under any load, and those of most models do whose
activation is built from tanh. Others (silu, erf-gelu) may differ in the last bit with the number of rows and threads,
because torch computes the odd elements at the end of a thread's share with another exponential; mixtures of experts
may differ more, because they multiply as many rows at a time as an expert is given. On CUDA nothing is replaced.
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

from tgi.kernel.errors import UserError
from tgi.worker.batch import Attention, Batch, Footprint, KVShape, Reader
from tgi.worker.best import Best, find_best
from tgi.worker.linear import ANY_ROWS, Linear, choose_rows

log = logging.getLogger(__name__)

IMPLEMENTATION = "tgi_paged"
# Arguments of attention functions that change what is computed and that the backends do not know.
UNKNOWN = ("s_aux", "position_bias", "head_mask")
# Rotary types whose angles depend on the longest sequence of the batch, once it is longer than what was trained.
BY_LENGTH = ("dynamic", "longrope")


class Step(NamedTuple):
    """What travels through the model to its attention layers. The first `tokens` are real, the rest padding."""

    attention: Attention
    plan: Any
    tokens: int


def build_fallback(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int], None],
    trust_code: bool = False,
) -> "Fallback":
    """The model in `directory`. Python code in it runs if `trust_code`, and only where transformers has none.

    Raises UserError where transformers or its attention interface cannot run the model.
    """
    progress("loading weights", 0)
    transformers.AttentionInterface.register(IMPLEMENTATION, _attend)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its warnings are about padding and masks that we do not use
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
            raise UserError(f"{name} is an encoder-decoder model. Only decoder-only language models are served.")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True,
            use_safetensors=True, trust_remote_code=trusted,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(f"transformers cannot load the model in {directory}: {error}") from error
    if not model._supports_attention_backend:
        raise UserError(f"{name} does not support transformers' attention interface, so it cannot be served.")
    progress("loading weights", 80)
    model.eval().requires_grad_(False).to(device)
    parameters = list(model.parameters())
    footprint = Footprint(sum(one.nbytes for one in parameters), sum(one.numel() for one in parameters))
    if device.type == "cpu":
        _replace_linears(model)
    progress("measuring kernels", 90)
    return Fallback(model, dtype, device, footprint)


class Fallback:
    """A Model around one of transformers'."""

    unrecordable: str | None = "transformers computes it, which nobody has checked for that"

    @torch.inference_mode()
    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device, footprint: Footprint) -> None:
        self.device = device
        self.footprint = footprint
        self._model = model
        decoder = model.get_decoder()
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters and decoder is not model
        self._body = decoder if self._keeps else model  # a model that always computes all logits does so once
        linears = [module.linear for module in model.modules() if isinstance(module, _Linear)]
        self._rows = choose_rows(linears) if linears else ANY_ROWS
        config = model.config.get_text_config(decoder=True)
        layers = config.num_hidden_layers
        probe = _Probe(config.model_type)
        ids = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            logits = self._run(ids, torch.arange(2, device=device), ids[:1], Step(probe, None, 2))
        except (TypeError, AttributeError, KeyError) as error:
            raise UserError(f"{config.model_type} cannot run over a paged cache: {error}") from error
        if sorted(probe.seen) != list(range(layers)):
            raise UserError(
                f"{config.model_type} keeps state of its own in some layers: {len(probe.seen)} of {layers} use "
                "transformers' attention interface. Only models with attention in every layer are served."
            )
        if len(shapes := set(probe.seen.values())) > 1:
            raise UserError(f"{config.model_type} has layers with different heads {sorted(shapes)}; expected one kind.")
        self.vocab_size = logits.shape[-1]
        windows = tuple(probe.windows.get(layer) for layer in range(layers))
        self.kv = KVShape(layers, *shapes.pop(), dtype, windows, probe.softcap)
        self.context = _context(config)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Tensor:
        """See Model. Tokens are padded once to a number of rows that the linear layers take as it is."""
        count = batch.tokens.shape[0]
        pad = (0, self._rows.padded(count) - count)
        step = Step(attention, attention.plan(batch), count)
        draw_at = batch.draw_at if len(batch.draw_at) else batch.cu_query[:1].long()
        tokens, positions = F.pad(batch.tokens, pad), F.pad(batch.positions, pad)
        if reader is None:
            logits = self._run(tokens, positions, draw_at, step)
        else:
            with _computed_once(self._body):
                logits = self._run(tokens, positions, draw_at, step)
                for block in reader.blocks:
                    reader.read(self._run(tokens, positions, block, step).float())
        return logits[: len(batch.draw_at)].float()

    def best(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Best:
        """See Model."""
        return find_best(self.forward(batch, attention, reader))

    def again(self, batch: Batch, attention: Attention) -> None:
        """See Model."""
        return None

    def adapter(self, directory: Path) -> Any:
        """See Model. None fits: nobody knows what the projections of this model are called."""
        raise UserError(
            f"The adapter in {directory} cannot be served: LoRA adapters need a model that this server computes "
            "itself, and this one runs through transformers. Merge the adapter into the model's weights instead."
        )

    def _run(self, tokens: Tensor, positions: Tensor, draw_at: Tensor, step: Step) -> Tensor:
        """Logits [D, vocab] at `draw_at`."""
        keep = {"logits_to_keep": draw_at} if self._keeps else {}
        logits = self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged_step=step, **keep
        ).logits[0]
        return logits if self._keeps else logits.index_select(0, draw_at)


@contextmanager
def _computed_once(body: nn.Module) -> Iterator[None]:
    """What `body` finds first is what each later call of it returns. Where it is all of a model but the head, the head
    alone is computed for some rows at a time, with whatever the model does to its logits."""
    forward = body.forward
    found: list[Any] = []

    def once(*arguments: Any, **named: Any) -> Any:
        if not found:
            found.append(forward(*arguments, **named))
        return found[0]

    body.forward = once
    try:
        yield
    finally:
        del body.forward


class _Probe:
    """An attention backend that only looks at what it is given: layer -> (heads, kv_heads, head_dim)."""

    page_size = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.softcap: float | None = None

    def plan(self, batch: Batch) -> None:
        """Never asked."""

    def write_and_attend(self, plan: Any, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """Zeros."""
        return torch.zeros_like(qkv[:, : self.seen[layer][0]])

    def check(self, layer: int, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        """Looks at the arguments of a layer's attention function, once."""
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UserError(
                f"{self.name} has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers per head, "
                "which the paged cache does not hold."
            )
        self.seen[layer] = (query.shape[1], key.shape[1], query.shape[3])
        for unknown in UNKNOWN:
            if arguments.get(unknown) is not None:
                raise UserError(f"{self.name} uses {unknown} in its attention, which the paged cache does not compute.")
        if arguments.get("is_causal") is False:
            raise UserError(f"{self.name} attends to later tokens; only causal language models are served.")
        self.windows[layer] = arguments.get("sliding_window")
        self.softcap = arguments.get("softcap")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    paged_step: Step,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out."""
    attention, plan, tokens = paged_step
    if isinstance(attention, _Probe):
        attention.check(module.layer_idx, query, key, value, arguments)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    qkv = torch.cat([states[0, :, :tokens] for states in (query, key, value)]).transpose(0, 1).contiguous()
    found = attention.write_and_attend(plan, module.layer_idx, qkv, scale)
    return F.pad(found, (0, 0, 0, 0, 0, query.shape[2] - tokens))[None], None


class _Linear(nn.Module):
    """Stands where an nn.Linear or a Conv1D stood."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _replace_linears(model: nn.Module) -> None:
    """Swaps the linear layers one by one, so that few weights exist twice at a time."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight.detach()
            elif type(child) is Conv1D:  # the same with its weight transposed
                weight = child.weight.detach().T.contiguous()
            else:
                continue
            bias = None if child.bias is None else child.bias.detach()
            setattr(parent, name, _Linear(Linear(weight, bias)))


def _context(config: Any) -> int:
    """The longest sequence that is computed as the model would: within its rotary angles' length."""
    longest: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in BY_LENGTH:
        return longest
    limit = min(longest, rope.get("original_max_position_embeddings") or longest)
    if limit < longest:
        log.warning("sequences are limited to %d tokens instead of %d: %s", limit, longest, config.model_type)
    return limit
