"""Cross-attention of tokens to the states of images, with torch's kernels.

On CPU each query is computed alone, over exactly the keys that it sees. So its bits depend on nothing but its own
sequence: they are the same in any batch and in any chunk.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.interface import SeenImages


def attend_images(queries: Tensor, seen: Sequence[SeenImages], layer: int, scale: float) -> Tensor:
    """The results [T, heads * head_dim] of queries [T, heads, head_dim] in the layer of this number, of those that
    attend to images; zeros for tokens that see none."""
    result = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for first, stop, images in seen:
        pairs = images[0][layer] if len(images) == 1 else torch.cat([image[layer] for image in images], 2)
        together = 1 if queries.device.type == "cpu" else stop - first
        for begin in range(first, stop, together):
            result[begin : begin + together] = _attend(queries[begin : begin + together], pairs, scale)
    return result.flatten(1)


def _attend(queries: Tensor, pairs: Tensor, scale: float) -> Tensor:
    """The queries of a KV head are rows of one matrix, so that its keys are read once."""
    count, heads, dim = queries.shape
    kv_heads = pairs.shape[1]
    by_head = queries.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    mixed = F.scaled_dot_product_attention(by_head, pairs[:1], pairs[1:], scale=scale)
    return mixed.view(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)
