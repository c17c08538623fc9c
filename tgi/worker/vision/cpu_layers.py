"""Layers of a vision tower on our CPU kernels, in place of torch's. The code of transformers that calls them is kept.

Replaced are linear layers, with the activation that follows, convolutions whose patches do not overlap, layer norms and
attention that hides nothing. What else a tower has is computed by torch.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.attention.packed import ALL, PackedAttention, PackedSequences
from tgi.worker.cpu_kernels.kernels import MAX_HEAD_DIM, CpuKernels
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.norm import Norm

IMPLEMENTATION = "tgi_vision"  # of transformers' attention interface
# Linear layers whose result is the argument of an activation: names of both in a module of transformers.
ACTIVATED: dict[str, tuple[str, ...]] = {
    "fc1": ("activation_fn", "act"),
    "linear_fc1": ("act_fn",),
    "linear_1": ("act",),
    "gate_proj": ("act_fn",),
}
ACTIVATED_TWICE = ("Llama4VisionMLP2",)  # modules that call their activation for other layers, too
# Our names of activations, by those of the classes of transformers and of torch; a GELU of torch tells its own.
ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
}
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


def replace_layers(model: nn.Module, kernels: CpuKernels) -> None:
    """Replaces the layers of a tower one by one, so that memory holds few weights twice. The tower's type must be that
    of the kernels; layers of another type are left to torch."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    attention = _Attention(kernels)
    for parent in list(model.modules()):
        # By which the function that is registered finds the kernels.
        object.__setattr__(parent, "tgi_attention", attention)
        activations = dict(_activations(parent))
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            if not isinstance(weight, Tensor) or weight.dtype is not kernels.dtype:
                continue
            if type(child) is nn.Linear:
                after = activations.get(name)
                setattr(parent, name, _Linear(child, "none" if after is None else _epilogue(parent, after), kernels))
                if after is not None:
                    setattr(parent, after, nn.Identity())
            elif type(child) in CONVOLUTIONS and _has_separate_patches(child):
                setattr(parent, name, _Patches(child, kernels))
            elif type(child) is nn.LayerNorm and len(child.normalized_shape) == 1:
                setattr(parent, name, _LayerNorm(child, kernels))
    model.set_attn_implementation(IMPLEMENTATION)


def _activations(parent: nn.Module) -> Iterator[tuple[str, str]]:
    """Children of a module that are linear layers, and the activations of their results, which our kernels have."""
    if type(parent).__name__ in ACTIVATED_TWICE:
        return
    pairs: dict[str, tuple[str, ...]] = ACTIVATED
    if isinstance(parent, nn.Sequential):
        pairs = {str(number): (str(number + 1),) for number in range(len(parent) - 1)}
    for name, followers in pairs.items():
        after = next((one for one in followers if _epilogue(parent, one)), None)
        if after is not None and type(getattr(parent, name, None)) is nn.Linear:
            yield name, after


def _epilogue(parent: nn.Module, name: str) -> str:
    """Our name of the activation that is a child of a module; "": there is none."""
    child = getattr(parent, name, None)
    if isinstance(child, nn.GELU):
        return "gelu" if child.approximate == "none" else "gelu_tanh"
    return ACTIVATIONS.get(type(child).__name__, "")


def _has_separate_patches(layer: Any) -> bool:
    """Whether each number of the input is in at most one patch of a convolution."""
    unpadded = layer.padding == "valid" or set(layer.padding) == {0}
    return unpadded and set(layer.dilation) == {1} and layer.groups == 1 and layer.stride == layer.kernel_size


class _Layer(nn.Module):
    """A layer that has its weight in an order of our kernels. Code of transformers reads type, device and shape of
    `weight`, which takes no memory: it is one NaN."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.new_full((), math.nan).expand(weight.shape), requires_grad=False)


class _Linear(_Layer):
    """Replaces an nn.Linear and the activation behind it."""

    def __init__(self, layer: nn.Linear, epilogue: str, kernels: CpuKernels) -> None:
        super().__init__(layer.weight)
        self._linear = _packed(layer, epilogue, kernels)

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _Patches(_Layer):
    """Replaces a convolution: the product of its weight with each patch."""

    def __init__(self, layer: Any, kernels: CpuKernels) -> None:
        super().__init__(layer.weight)
        self._linear = _packed(layer, "none", kernels)
        self._size: tuple[int, ...] = layer.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        """[images, outputs, patches along each axis] of x [images, channels, size of each axis]."""
        images, channels, *sizes = x.shape
        counts = [whole // size for whole, size in zip(sizes, self._size, strict=True)]
        parts = []
        for axis, (count, size) in enumerate(zip(counts, self._size, strict=True)):
            x = x.narrow(2 + axis, 0, count * size)
            parts += [count, size]
        axes = len(counts)
        places, within = (range(2 + first, 2 + 2 * axes, 2) for first in range(2))
        patches = x.reshape(images, channels, *parts).permute(0, *places, 1, *within)
        found = self._linear(patches.reshape(images * math.prod(counts), -1))
        return found.view(images, *counts, -1).movedim(-1, 1)


class _LayerNorm(_Layer):
    """Replaces an nn.LayerNorm."""

    def __init__(self, layer: nn.LayerNorm, kernels: CpuKernels) -> None:
        super().__init__(layer.weight)
        bias = None if layer.bias is None else layer.bias.detach().float()
        self._norm = Norm(layer.weight.detach().float(), bias, layer.eps, True, kernels)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.reshape(-1, x.shape[-1])).view(x.shape)


def _packed(layer: Any, epilogue: str, kernels: CpuKernels) -> Linear:
    """A linear layer, or the product of a convolution."""
    weight = layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    return Linear(weight.reshape(len(weight), -1), bias, epilogue, kernels)


class _Attention:
    """Attention of sequences of one length that see all of themselves."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._by_shape: dict[tuple[int, int, int], PackedAttention] = {}  # heads, KV heads, head_dim

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """[B, T, heads, head_dim] of states [B, heads or KV heads, T, head_dim]. None: our kernels cannot."""
        (count, heads, length, size), kv_heads = query.shape, key.shape[1]
        computed = query.dtype is self._kernels.dtype and size <= MAX_HEAD_DIM and not heads % kv_heads
        if not computed or key.shape != value.shape or key.shape != (count, kv_heads, length, size):
            return None
        attention = self._by_shape.get((heads, kv_heads, size))
        if attention is None:
            kv = KVCacheSpec(1, heads, kv_heads, size, query.dtype, (None,), cpu_kernels=self._kernels)
            attention = self._by_shape[heads, kv_heads, size] = PackedAttention(kv, [ALL], length)
        positions = torch.arange(length).repeat(count)
        plan = attention.plan(PackedSequences(positions, positions, [*range(0, (count + 1) * length, length)]))
        qkv = torch.cat([states.transpose(1, 2) for states in (query, key, value)], dim=2).contiguous()
        found = attention.write_and_attend(plan, 0, qkv.view(count * length, -1, size), scale)
        return found.view(count, length, heads, size)


def _hides(mask: Tensor) -> bool:
    """Whether a mask hides anything: it is True for what is seen, or what is added to scores."""
    return not bool(mask.all()) if mask.dtype is torch.bool else bool(mask.any())


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: states [B, heads, T, head_dim] in, [B, T, heads, head_dim] out."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and (attention_mask is None or not _hides(attention_mask)):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if (found := module.tgi_attention(query, key, value, scale)) is not None:
            return found, None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **more
    )
    return result
