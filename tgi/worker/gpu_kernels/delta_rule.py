"""The gated delta rule of recurrent layers (cpu_kernels/delta_rule.h), in two launches: the rule, and the norm and gate
of its result.

A program keeps some columns of the state of one value head of one row, which are independent of the others, from the
first token of the row to its last. Rows of one token, and steps with drafts, are computed as the rule says:

    S = keep S; u = beta (v - S^T k); S = S + k u^T; y = S^T q.

Other steps are computed in chunks of CHUNK tokens. With G the products of `keep` up to each token of a
chunk, the vectors u of a chunk are the solution of a triangular system, and all else is matrix products:

    u_t + beta_t sum over s < t of G_t / G_s (k_t k_s) u_s = beta_t (v_t - G_t S^T k_t)
    y_t = G_t S^T q_t + sum over s <= t of G_t / G_s (q_t k_s) u_s

(Yang et al., Gated Delta Networks, 2024, section 3.3.) The state is float32, as all sums. `batch_invariant`: token by
token always, so that a row has the same bits in any chunks.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.cpu_kernels.recurrent import DeltaRule
from tgi.worker.gpu_kernels.causal_conv import random_rows
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor
from tgi.worker.state_cache import StateRows, StateTensor

CHUNK = 32  # tokens
COLUMNS = 32  # of the state, of a program
LEAST_SQUARES = tl.constexpr(1e-6)  # added to the squared length of queries and keys
ELEMENTS = 1024  # of a program of the norm


def delta_rule(
    rule: DeltaRule, x: Tensor, z: Tensor, ba: Tensor, state: Tensor, rows: StateRows, batch_invariant: bool = False
) -> Tensor:
    """norm(y) * silu(z) [T, value heads * elements of a value] in the type of x, which has the columns q, k and v, as
    `ba` has b and a; `z` may be some columns of a larger matrix. Reads and overwrites `state`, float32 [slots, value
    heads, elements of a key, of a value]."""
    key_heads, heads, key_dim, value_dim = rule.sizes
    tokens = len(x)
    mixed = torch.empty(tokens, heads, value_dim, dtype=torch.float32, device=x.device)
    single = batch_invariant or rows.kept is not None or max(rows.query_lens_host) == 1
    _delta_rule[len(rows.slots), heads, triton.cdiv(value_dim, COLUMNS)](
        *(x, ba, rule.decay, rule.offset, state, mixed),
        *(rows.slots, rows.cu_query_lens, rows.context_lens, rows.kept),
        *(x.stride(0), ba.stride(0), state.stride(0), key_dim**-0.5, rule.most),
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY=key_dim,
        KEY_WIDTH=max(16, triton.next_power_of_2(key_dim)),
        VALUE=value_dim,
        COLUMNS=COLUMNS,
        CHUNK=1 if single else CHUNK,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )
    y = x.new_empty(tokens, heads * value_dim)
    width = triton.next_power_of_2(value_dim)
    together = min(triton.next_power_of_2(heads), max(1, ELEMENTS // width))
    _norm_and_gate[tokens, triton.cdiv(heads, together)](
        *(mixed, z, rule.norm, y, z.stride(0), rule.epsilon),
        HEADS=heads,
        VALUE=value_dim,
        WIDTH=width,
        TOGETHER=together,
    )
    return y


@triton.jit
def _gates(ba, token, there, ba_row, head, decay, offset, most, HEADS: tl.constexpr):
    """beta, and the logarithm of `keep`, of some tokens; 0 of those that are not there."""
    place = ba + token * ba_row + head
    b = tl.load(place, mask=there, other=0.0).to(tl.float32)
    a = tl.load(place + HEADS, mask=there, other=0.0).to(tl.float32) + offset
    grown = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return tl.where(there, most * tl.sigmoid(b), 0.0), tl.where(there, -decay * grown, 0.0)


# The alignment of a step's columns does not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots", "bounds", "contexts", "kept_states"])
def _delta_rule(
    x,
    ba,
    decays,
    offsets,
    state,
    mixed,
    slots,
    bounds,
    contexts,
    kept_states,
    x_row,
    ba_row,
    state_row,
    scale,
    most,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of the state of one value head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds + row)
    count = tl.load(bounds + row + 1) - first
    started = tl.load(contexts + row) > count
    decay, offset = tl.load(decays + head), tl.load(offsets + head)
    element = tl.arange(0, KEY_WIDTH)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    own = (element < KEY)[:, None] & (column < VALUE)[None, :]
    of_head = (head * KEY + element)[:, None] * VALUE + column[None, :]
    place = state + tl.load(slots + row).to(tl.int64) * state_row + of_head
    found = tl.load(place, mask=own & started, other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    values = x + 2 * KEY_HEADS * KEY + head * VALUE
    if CHUNK == 1:
        for number in range(0, count):
            token = (first + number).to(tl.int64)
            beta, kept = _gates(ba, token, True, ba_row, head, decay, offset, most, HEADS)
            line = x + token * x_row + key_head * KEY + element
            query = tl.load(line, mask=element < KEY, other=0.0).to(tl.float32)
            key = tl.load(line + KEY_HEADS * KEY, mask=element < KEY, other=0.0).to(tl.float32)
            query *= scale / tl.sqrt(tl.sum(query * query, 0) + LEAST_SQUARES)
            key /= tl.sqrt(tl.sum(key * key, 0) + LEAST_SQUARES)
            value = tl.load(values + token * x_row + column, mask=column < VALUE, other=0.0).to(tl.float32)
            found *= tl.exp(kept)
            update = (value - tl.sum(found * key[:, None], 0)) * beta
            found += key[:, None] * update[None, :]
            result = tl.sum(found * query[:, None], 0)
            tl.store(mixed + (token * HEADS + head) * VALUE + column, result, mask=column < VALUE)
            if kept_states is not None:
                slot = tl.load(kept_states + token).to(tl.int64)
                if slot > 0:
                    tl.store(state + slot * state_row + of_head, found, mask=own)
    else:
        place_in_chunk = tl.arange(0, CHUNK)
        earlier = place_in_chunk[:, None] > place_in_chunk[None, :]
        later = place_in_chunk[:, None] < place_in_chunk[None, :]
        for start in range(0, count, CHUNK):
            token = (first + start + place_in_chunk).to(tl.int64)
            there = start + place_in_chunk < count
            beta, kept = _gates(ba, token, there, ba_row, head, decay, offset, most, HEADS)
            given = there[:, None] & (element < KEY)[None, :]
            line = x + token[:, None] * x_row + key_head * KEY + element[None, :]
            query = tl.load(line, mask=given, other=0.0).to(tl.float32)
            key = tl.load(line + KEY_HEADS * KEY, mask=given, other=0.0).to(tl.float32)
            query *= (scale / tl.sqrt(tl.sum(query * query, 1) + LEAST_SQUARES))[:, None]
            key *= (1.0 / tl.sqrt(tl.sum(key * key, 1) + LEAST_SQUARES))[:, None]
            visible = there[:, None] & (column < VALUE)[None, :]
            value = tl.load(values + token[:, None] * x_row + column[None, :], mask=visible, other=0.0).to(tl.float32)
            upto = tl.cumsum(kept, 0)  # the logarithm of G
            ratio = tl.where(later, float("-inf"), upto[:, None] - upto[None, :])
            ratio = tl.exp(ratio)
            through = tl.exp(upto)[:, None]
            turned = tl.trans(key)
            system = tl.dot(key, turned, input_precision=PRECISION) * ratio * beta[:, None]
            system = tl.where(earlier, system, 0.0)
            update = (value - through * tl.dot(key, found, input_precision=PRECISION)) * beta[:, None]
            for solved in range(1, CHUNK):  # of the vectors before it
                mine = place_in_chunk[:, None] == solved
                factors = tl.sum(tl.where(mine, system, 0.0), 0)
                update -= tl.where(mine, tl.sum(factors[:, None] * update, 0)[None, :], 0.0)
            scores = tl.dot(query, turned, input_precision=PRECISION) * ratio
            result = through * tl.dot(query, found, input_precision=PRECISION)
            result = tl.dot(scores, update, result, input_precision=PRECISION)
            tl.store(mixed + (token[:, None] * HEADS + head) * VALUE + column[None, :], result, mask=visible)
            whole = tl.sum(kept, 0)
            late = turned * tl.exp(whole - upto)[None, :]
            found = tl.dot(late, update, found * tl.exp(whole), input_precision=PRECISION)
    tl.store(place, found, mask=own)


@triton.jit
def _norm_and_gate(
    mixed, z, weight, y, z_row, epsilon,
    HEADS: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    number = tl.arange(0, WIDTH)[None, :]
    inside = (head < HEADS) & (number < VALUE)
    column = head * VALUE + number
    x = tl.load(mixed + token * (HEADS * VALUE) + column, mask=inside, other=0.0)
    gate = tl.load(z + token * z_row + column, mask=inside, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 1) / VALUE + epsilon)[:, None]
    x *= tl.load(weight + number, mask=number < VALUE, other=0.0) * (gate * tl.sigmoid(gate))
    tl.store(y + token * (HEADS * VALUE) + column, x.to(y.dtype.element_ty), mask=inside)


def self_test(device: torch.device) -> None:
    """Decode rows, prompts of several chunks, and drafts, at the start of a sequence and behind other tokens. Raises
    SelfTestFailed if results or states differ from torch's."""
    sizes = key_heads, heads, key_dim, value_dim = 2, 4, 24, 40
    decay, offset, norm = (random_tensor(device, n, seed=n).abs() for n in (heads, heads, value_dim))
    rule = DeltaRule(sizes, decay, offset, norm, 1e-6, most=2.0)
    drafts = torch.float32, [1, 3, 2]  # the second row has one
    for dtype, counts in (
        (torch.bfloat16, [1, 1, 1]),
        (torch.bfloat16, [1, 3, 70]),
        (torch.float32, [33, 1, 2]),
        drafts,
    ):
        contexts = [counts[0], counts[1] + 4, counts[2] + 9]
        rows = random_rows(device, counts, contexts, matrix=StateTensor((heads, key_dim, value_dim), torch.float32))
        if counts == drafts[1]:
            rows = rows._replace(kept=torch.tensor([0, 0, 4, 0, 0, 0], dtype=torch.int32, device=device))
        (state,) = rows.cache.tensors
        before, tokens = state.clone(), sum(counts)
        x = random_tensor(device, tokens, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
        ba, z = (random_tensor(device, tokens, n, dtype=dtype, seed=n) for n in (2 * heads, heads * value_dim))
        found = delta_rule(rule, x, z, ba, state, rows)
        for row, (slot, own) in enumerate(zip(rows.slots.tolist(), torch.arange(tokens).split(counts), strict=True)):
            matrix = before[slot] * (contexts[row] > counts[row])
            y = reference_delta_rule(rule, x[own].float(), z[own].float(), ba[own].float(), matrix)
            tolerance = 0.02 if dtype is torch.bfloat16 else 1e-4
            check_close("the delta rule", found[own], y.to(dtype), tolerance)
            check_close("the state of the delta rule", state[slot], matrix, tolerance)
            if row == 1 and rows.kept is not None:
                matrix = before[slot].clone()
                known = own[:-1]
                reference_delta_rule(rule, x[known].float(), z[known].float(), ba[known].float(), matrix)
                check_close("the state before a draft", state[4], matrix, tolerance)


def reference_delta_rule(rule: DeltaRule, x: Tensor, z: Tensor, ba: Tensor, matrix: Tensor) -> Tensor:
    """The reference for one row, token by token in float32. Overwrites `matrix` [value heads, elements of a key, of a
    value]."""
    key_heads, heads, key_dim, value_dim = rule.sizes
    keys = key_heads * key_dim
    query, key, value = x.split((keys, keys, heads * value_dim), 1)
    query, key = (one.unflatten(1, (key_heads, key_dim)) for one in (query, key))
    query, key = (one / (one.square().sum(-1, keepdim=True) + LEAST_SQUARES.value).sqrt() for one in (query, key))
    query, key = (one.repeat_interleave(heads // key_heads, 1)[..., None] for one in (query / key_dim**0.5, key))
    beta, keep = rule.most * ba[:, :heads].sigmoid(), (F.softplus(ba[:, heads:] + rule.offset) * -rule.decay).exp()
    found = []
    for token, own in enumerate(value.unflatten(1, (heads, value_dim))):
        matrix *= keep[token, :, None, None]
        update = (own - (matrix * key[token]).sum(1)) * beta[token, :, None]
        matrix += key[token] * update[:, None]
        found.append((matrix * query[token]).sum(1))
    normed = F.rms_norm(torch.stack(found), (value_dim,), rule.norm, rule.epsilon)
    return normed.flatten(1) * F.silu(z)
