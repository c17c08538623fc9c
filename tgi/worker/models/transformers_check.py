"""Checks of a model of transformers at load: what its layers ask of attention, and that pages give its own results.

No model is served that was not compared with transformers' plain forward pass. Rules that show only in long prompts
(sliding windows, chunks) are read from the mask that the model asks for, at its real sizes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from tgi.microkernel.errors import UserError
from tgi.worker.attention import build_attention
from tgi.worker.attention.interface import ForwardBatch
from tgi.worker.models.interface import Model

PROBE = "tgi_probe"
# Arguments of attention functions that change the result and that our backends do not implement.
UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "head_mask")
MAX_MASK = 1 << 20  # mask rules are evaluated at positions below this one
PROMPT, FIRST_CHUNK, COMPARED = 72, 40, 16  # tokens; the last COMPARED positions of each chunk are compared
# Allowed norm of the difference of a position's centred logits, relative to their norm. In 16 bits, whose rounding may
# send a token to another expert, the median of the positions counts. Wrong models differ by 0.5 to 2.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.2, torch.float16: 0.2}

MaskRule = Callable[
    [Tensor, Tensor, Tensor, Tensor], Tensor
]  # batch, head, query, key -> whether the query sees the key


class AttentionShape(NamedTuple):
    """What the layers of a model ask of attention."""

    layers: dict[int, tuple[int, int, int]]  # layer -> heads, kv_heads, head_dim
    windows: dict[int, int | None]
    softcap: float | None


class AttentionProbe:
    """Takes the place of attention in one forward pass: records what each layer passes, and returns zeros."""

    def __init__(self, name: str, context: int, device: torch.device) -> None:
        self.name = name
        self.found = AttentionShape({}, {}, None)
        self._context = min(context, MAX_MASK)
        self._device = device
        self._window = functools.cache(self._window_of)  # layers share few rules

    def record(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> None:
        """Records the arguments of a layer's attention function. Raises UserError if a backend cannot compute it."""
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UserError(
                f"{self.name} has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers per head, "
                "which the paged cache does not hold."
            )
        for argument in UNSUPPORTED_ARGUMENTS:
            if arguments.get(argument) is not None:
                raise UserError(
                    f"{self.name} uses {argument} in its attention, which the paged cache does not compute."
                )
        if arguments.get("is_causal") is False:
            raise UserError(f"{self.name} attends to later tokens; only causal language models are served.")
        window = arguments.get("sliding_window")
        if mask is not None:
            rule = getattr(mask, "rule", None)
            if rule is None:
                raise UserError(
                    f"{self.name} adds numbers of its own to attention scores, which the paged cache does not compute."
                )
            window = self._window(rule)
        self.found.layers[layer] = (query.shape[1], key.shape[1], query.shape[3])
        self.found.windows[layer] = window
        self.found = self.found._replace(softcap=arguments.get("softcap"))

    def _window_of(self, rule: MaskRule) -> int | None:
        """The sliding window of a mask rule; None: full attention. Raises UserError for all other rules."""
        keys = torch.arange(self._context, device=self._device)
        zero = torch.zeros_like(keys[0])
        last = self._context - 1
        width = int(rule(zero, zero, keys[last], keys).sum())
        for query in (last, last - 1, 2 * last // 3, last // 2, last // 7):
            seen = rule(zero, zero, keys[query], keys)
            if not torch.equal(seen, (keys <= query) & (keys > query - width)):
                raise UserError(
                    f"{self.name} chooses the tokens that it attends to neither causally nor by a sliding window (it "
                    "attends in chunks or to later tokens), which the paged cache does not compute."
                )
        return width if width < self._context else None


def register_probe() -> None:
    """Makes the probe known to transformers as an attention implementation."""
    transformers.AttentionInterface.register(PROBE, _record)
    transformers.AttentionMaskInterface.register(PROBE, _mask_with_rule)


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Lets the model's layers use another attention implementation of transformers."""
    # Each layer asks its own configuration, which may be a part or a copy of the model's.
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


@torch.inference_mode()
def compare_with_plain(model: nn.Module, paged: Model, name: str) -> None:
    """Computes a prompt by transformers' plain forward pass and through pages: whole, and in two chunks in batches.

    `paged` computes `model` over pages. Raises UserError if the results differ.
    """
    device, vocab = paged.device, paged.vocab_size
    count = min(PROMPT, paged.context_length)
    first = count * FIRST_CHUNK // PROMPT
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(min(3, vocab - 1), min(vocab, 20000), (count,), generator=generator).to(device)
    try:
        with attention_implementation(model, "eager"):
            plain = model(input_ids=ids[None], use_cache=False).logits[0].float()
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name} cannot be compared with transformers: its plain forward pass fails: {error}"
        ) from error
    attention = build_attention(paged.kv, 2 * -(-count // 16) + 2, device)
    pages = -(-count // attention.page_size)
    whole, again = range(pages), range(pages, 2 * pages)
    steps = [
        [(ids, 0, whole), (ids[:first], 0, again)],
        [(ids[first:], first, again)],
    ]
    for rows in steps:
        batch, positions = _batch(rows, attention.page_size)
        difference = _difference(paged.forward(batch, attention), plain[positions])
        for part in difference.split(COMPARED):
            reached = part.max() if paged.kv.dtype is torch.float32 else part.median()
            if not reached <= TOLERANCE[paged.kv.dtype]:  # NaN is refused, too
                raise UserError(
                    f"{name} cannot be served: over pages its logits differ from those of transformers by "
                    f"{float(reached):.0%} for the same prompt, so its layers need more of a step than positions and "
                    "attention. Serve a model of another type."
                )


def _batch(rows: list[tuple[Tensor, int, range]], page_size: int) -> tuple[ForwardBatch, Tensor]:
    """The step of rows (ids, first position, pages), and the positions whose logits it computes."""
    device = rows[0][0].device
    lengths = [len(ids) for ids, _, _ in rows]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in rows])
    slots = torch.cat([pages[0] * page_size + torch.arange(s, s + len(ids)) for ids, s, pages in rows])
    indices = torch.cat(
        [torch.arange(end - min(COMPARED, n), end) for end, n in zip(ends[1:].tolist(), lengths, strict=True)]
    )
    contexts = [start + len(ids) for ids, start, _ in rows]
    return ForwardBatch(
        tokens=torch.cat([ids for ids, _, _ in rows]),
        positions=positions.to(device),
        slot_mapping=slots.to(device)[None],
        cu_query_lens=ends.to(torch.int32).to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        page_table=torch.tensor([[[*pages] for _, _, pages in rows]], dtype=torch.int32, device=device),
        logits_indices=indices.to(device),
        query_lens_host=lengths,
        context_lens_host=contexts,
    ), positions[indices].to(device)


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    """The relative difference of logits [D, vocab] at each position, apart from a constant: [D]."""
    found, expected = (logits - logits.mean(-1, keepdim=True) for logits in (found, expected))
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *arguments: Any,
    paged_step: AttentionProbe | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out."""
    if paged_step is None:
        raise UserError(
            f"The {type(module).__name__} of this model gets no further arguments of a step, so keys and values cannot "
            "be kept in pages. Serve a model of another type."
        )
    paged_step.record(module.layer_idx, query, key, value, attention_mask, named)
    return torch.zeros_like(query).transpose(1, 2), None


def _mask_with_rule(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: MaskRule, device: Any = "cpu", **arguments: Any
) -> Tensor:
    """transformers' mask interface: a mask that carries the rule that it follows."""
    mask: Any = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.rule = mask_function
    return mask
