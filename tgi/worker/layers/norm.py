"""Root mean square norm, computed in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in x's dtype (Zhang and Sennrich, 2019).

    `weight` is float32, since operations on mixed dtypes are slow. It may have more than one dimension: then it scales
    the last ones of x, which is normed over the last alone.
    """
    wide = x.to(torch.float32)
    if weight.ndim == 1:
        return F.rms_norm(wide, weight.shape, weight, epsilon).to(x.dtype)
    return (F.rms_norm(wide, weight.shape[-1:], None, epsilon) * weight).to(x.dtype)
