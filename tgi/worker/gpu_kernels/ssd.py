"""State space duality of Mamba2 layers (cpu_kernels/ssd.h), in two launches: the recurrence, and the gated norm of its
result.

A program keeps some columns of the state of one head of one row, which are independent of the others, from the first
token of the row to its last. Rows of one token, and steps with drafts, are computed as the recurrence says:

    S = exp(decay) S + B x^T; y = S^T C + skip x.

Other steps are computed in chunks of CHUNK tokens, each of which is products of matrices (Dao and Gu, 2024, section 6).
The state is float32, as all sums. `batch_invariant`: token by token always, so that a row has the same bits in any
chunks.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.cpu_kernels.recurrent import GatedNorm, GatedNormForm, Ssd
from tgi.worker.gpu_kernels.causal_conv import random_rows
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor
from tgi.worker.state_cache import StateRows, StateTensor

CHUNK = 32  # tokens
COLUMNS = 32  # of the state, of a program
MAX_WARPS = 16


def ssd(rule: Ssd, x: Tensor, dt: Tensor, state: Tensor, rows: StateRows, batch_invariant: bool = False) -> Tensor:
    """y float32 [T, heads * elements of a head] of x, which has the columns x, B and C. `dt` [T, heads] may be some
    columns of a larger matrix. Reads and overwrites `state`, float32 [slots, heads, elements of a B, of a head]."""
    heads, groups, head_dim, state_dim = rule.sizes
    scale, least, most = rule.factors
    y = torch.empty(len(x), rule.inner, dtype=torch.float32, device=x.device)
    single = batch_invariant or rows.kept is not None or max(rows.query_lens_host) == 1
    _ssd[len(rows.slots), heads, triton.cdiv(head_dim, COLUMNS)](
        *(x, dt, rule.decay, rule.offset, rule.skip, state, y),
        *(rows.slots, rows.cu_query_lens, rows.context_lens, rows.kept),
        *(x.stride(0), dt.stride(0), state.stride(0), scale, least, most),
        HEADS=heads,
        GROUPS=groups,
        SIZE=head_dim,
        STATE=state_dim,
        WIDTH=max(16, triton.next_power_of_2(state_dim)),
        COLUMNS=COLUMNS,
        CHUNK=1 if single else CHUNK,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )
    return y


def gated_norm(norm: GatedNorm, y: Tensor, z: Tensor) -> Tensor:
    """GatedNorm of y float32 [T, columns] in the type of z [T, columns], which may be some columns of a larger
    matrix."""
    tokens, columns = y.shape
    size = columns // norm.groups
    block = triton.next_power_of_2(size)
    found = z.new_empty(tokens, columns)
    _gated_norm[tokens, norm.groups](
        *(y, z, norm.weight, found, z.stride(0), size, norm.gate_scale, norm.epsilon),
        FORM=int(norm.form),
        BLOCK=block,
        num_warps=max(1, min(MAX_WARPS, block // 256)),
    )
    return found


@triton.jit
def _steps(dt, place, there, scale, offset, decay, least, most):
    """The time steps of some tokens and the logarithms of their decay; 0 of those that are not there."""
    grown = tl.load(dt + place, mask=there, other=0.0).to(tl.float32) * scale + offset
    grown = tl.where(grown > 20.0, grown, tl.log(1.0 + tl.exp(tl.minimum(grown, 20.0))))
    step = tl.where(there, tl.minimum(tl.maximum(grown, least), most), 0.0)
    return step, -decay * step


# The alignment of a step's columns does not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots", "bounds", "contexts", "kept"])
def _ssd(
    x,
    dt,
    decays,
    offsets,
    skips,
    state,
    y,
    slots,
    bounds,
    contexts,
    kept,
    x_row,
    dt_row,
    state_row,
    scale,
    least,
    most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of the state of one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds + row)
    count = tl.load(bounds + row + 1) - first
    started = tl.load(contexts + row) > count
    decay, offset, skip = tl.load(decays + head), tl.load(offsets + head), tl.load(skips + head)
    element = tl.arange(0, WIDTH)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    own = (element < STATE)[:, None] & (column < SIZE)[None, :]
    of_head = (head * STATE + element)[:, None] * SIZE + column[None, :]
    place = state + tl.load(slots + row).to(tl.int64) * state_row + of_head
    found = tl.load(place, mask=own & started, other=0.0)
    values = x + head * SIZE
    inputs = x + HEADS * SIZE + head // (HEADS // GROUPS) * STATE  # the head's B; C comes GROUPS * STATE later
    if CHUNK == 1:
        for number in range(0, count):
            token = (first + number).to(tl.int64)
            step, kept_log = _steps(dt, token * dt_row + head, True, scale, offset, decay, least, most)
            value = tl.load(values + token * x_row + column, mask=column < SIZE, other=0.0).to(tl.float32)
            line = inputs + token * x_row + element
            into = tl.load(line, mask=element < STATE, other=0.0).to(tl.float32)
            out_of = tl.load(line + GROUPS * STATE, mask=element < STATE, other=0.0).to(tl.float32)
            found = found * tl.exp(kept_log) + into[:, None] * (value * step)[None, :]
            result = tl.sum(found * out_of[:, None], 0) + value * skip
            tl.store(y + (token * HEADS + head) * SIZE + column, result, mask=column < SIZE)
            if kept is not None:
                slot = tl.load(kept + token).to(tl.int64)
                if slot > 0:
                    tl.store(state + slot * state_row + of_head, found, mask=own)
    else:
        place_in_chunk = tl.arange(0, CHUNK)
        later = place_in_chunk[:, None] < place_in_chunk[None, :]
        for start in range(0, count, CHUNK):
            token = (first + start + place_in_chunk).to(tl.int64)
            there = start + place_in_chunk < count
            step, kept_log = _steps(dt, token * dt_row + head, there, scale, offset, decay, least, most)
            visible = there[:, None] & (column < SIZE)[None, :]
            value = tl.load(values + token[:, None] * x_row + column[None, :], mask=visible, other=0.0).to(tl.float32)
            given = there[:, None] & (element < STATE)[None, :]
            line = inputs + token[:, None] * x_row + element[None, :]
            into = tl.load(line, mask=given, other=0.0).to(tl.float32)
            out_of = tl.load(line + GROUPS * STATE, mask=given, other=0.0).to(tl.float32)
            upto = tl.cumsum(kept_log, 0)
            ratio = tl.exp(tl.where(later, float("-inf"), upto[:, None] - upto[None, :]))
            turned, grown = tl.trans(into), value * step[:, None]
            scores = tl.dot(out_of, turned, input_precision=PRECISION) * ratio
            result = tl.exp(upto)[:, None] * tl.dot(out_of, found, input_precision=PRECISION) + value * skip
            result = tl.dot(scores, grown, result, input_precision=PRECISION)
            tl.store(y + (token[:, None] * HEADS + head) * SIZE + column[None, :], result, mask=visible)
            whole = tl.sum(kept_log, 0)
            late = turned * tl.exp(whole - upto)[None, :]
            found = tl.dot(late, grown, found * tl.exp(whole), input_precision=PRECISION)
    tl.store(place, found, mask=own)


@triton.jit
def _gated_norm(y, z, weight, out, z_row, size, gate_scale, epsilon, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """One group of columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    column = tl.program_id(1) * size + at
    place = token * tl.num_programs(1) * size + column
    found = tl.load(y + place, mask=inside, other=0.0)
    gate = tl.load(z + token * z_row + column, mask=inside, other=0.0).to(tl.float32) * gate_scale
    gate *= tl.sigmoid(gate)
    if FORM < 2:
        found *= gate
    if FORM > 0:
        found *= 1.0 / tl.sqrt(tl.sum(found * found, 0) / size + epsilon)
    found *= tl.load(weight + column, mask=inside, other=0.0)
    if FORM == 2:
        found *= gate
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


def self_test(device: torch.device) -> None:
    """Decode rows, prompts of several chunks, and drafts, at the start of a sequence and behind other tokens; all forms
    of the norm. Raises SelfTestFailed if results or states differ from torch's."""
    sizes = heads, groups, head_dim, state_dim = 4, 2, 40, 24
    decay, offset, skip = (random_tensor(device, heads, seed=seed) for seed in (1, 2, 3))
    rule = Ssd(sizes, decay.abs(), offset, skip, (0.5, 0.01, 2.0))
    for dtype, counts, drafts in (
        (torch.bfloat16, [1, 1, 1], False),
        (torch.bfloat16, [1, 3, 70], False),
        (torch.float32, [33, 1, 2], False),
        (torch.float32, [1, 3, 2], True),
    ):
        contexts = [counts[0], counts[1] + 4, counts[2] + 9]
        rows = random_rows(device, counts, contexts, matrix=StateTensor((heads, state_dim, head_dim), torch.float32))
        if drafts:  # the second row has one
            rows = rows._replace(kept=torch.tensor([0, 0, 4, 0, 0, 0], dtype=torch.int32, device=device))
        (state,) = rows.cache.tensors
        before, tokens = state.clone(), sum(counts)
        x = random_tensor(device, tokens, rule.channels, dtype=dtype)
        wide = random_tensor(device, tokens, heads + rule.inner, dtype=dtype, seed=5)
        dt, z = wide[:, :heads], wide[:, heads:]
        y, tolerance = ssd(rule, x, dt, state, rows), 0.02 if dtype is torch.bfloat16 else 1e-4
        for row, (slot, own) in enumerate(zip(rows.slots.tolist(), torch.arange(tokens).split(counts), strict=True)):
            matrix = before[slot] * (contexts[row] > counts[row])
            expected, after = reference_ssd(rule, x[own].float(), dt[own].float(), matrix)
            check_close("state space duality", y[own], expected, tolerance)
            check_close("its state", state[slot], after[-1], tolerance)
            if drafts and row == 1:
                check_close("its state before a draft", state[4], after[1], tolerance)
        for form in GatedNormForm:
            norm = GatedNorm(form, random_tensor(device, rule.inner, seed=6), groups, 1.5, 1e-5)
            gate, expected = F.silu(1.5 * z.float()), y
            if form != GatedNormForm.GATE_LAST:
                expected = expected * gate
            if form != GatedNormForm.NONE:
                expected = F.rms_norm(expected.unflatten(1, (groups, -1)), (rule.inner // groups,), eps=1e-5).flatten(1)
            expected = expected * norm.weight * (gate if form == GatedNormForm.GATE_LAST else 1)
            check_close("a gated norm", gated_norm(norm, y, z), expected.to(dtype), tolerance)


def reference_ssd(rule: Ssd, x: Tensor, dt: Tensor, matrix: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The reference for one row that begins with the state `matrix`, token by token: y, and the states after each
    token."""
    heads, groups, head_dim, state_dim = rule.sizes
    scale, least, most = rule.factors
    value, into, out_of = x.split((rule.inner, groups * state_dim, groups * state_dim), 1)
    value = value.unflatten(1, (heads, head_dim))
    into, out_of = (
        one.unflatten(1, (groups, state_dim)).repeat_interleave(heads // groups, 1) for one in (into, out_of)
    )
    steps = F.softplus(dt * scale + rule.offset).clamp(least, most)
    found, after = [], []
    for token in range(len(x)):
        keep = (-rule.decay * steps[token]).exp()[:, None, None]
        matrix = matrix * keep + into[token][:, :, None] * (value[token] * steps[token][:, None])[:, None]
        after.append(matrix)
        found.append((matrix * out_of[token][:, :, None]).sum(1) + value[token] * rule.skip[:, None])
    return torch.stack(found).flatten(1), after
