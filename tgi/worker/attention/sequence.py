"""Attention of one sequence by torch: fused kernels, or all scores materialized for what those lack."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
) -> Tensor:
    """softmax(cap * tanh(scale * q k / cap)) v, for [1, heads, tokens, head_dim] in and out. `hidden` [queries, keys]:
    the keys that a query does not see. `sinks` and `slopes` float32 [heads] are those of KVCacheSpec; with the latter,
    the queries are the last tokens."""
    if cap is None and sinks is None and slopes is None:
        mask, grouped = None if hidden is None else ~hidden, query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = query.float() @ keys.transpose(2, 3) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if slopes is not None:
        positions = torch.arange(keys.shape[2], device=query.device)
        distances = positions[-query.shape[2] :, None] - positions
        scores = scores - slopes.view(1, heads, 1, 1) * distances
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, heads, 1, 1).expand(-1, -1, scores.shape[2], -1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ values).to(query.dtype)
