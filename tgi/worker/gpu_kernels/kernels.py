"""The GPU kernels as functions of tensors on the GPU. A call launches a kernel and does not wait for it."""

from functools import partial

import torch
from torch import Tensor


class GpuKernels:
    """The functions of this package's modules, which describe them. Made only in a worker with a GPU: it imports
    Triton."""

    def __init__(self, capability: tuple[int, int], batch_invariant: bool = False) -> None:
        """`capability` is CUDA's compute capability. `batch_invariant`: the bits of a row do not depend on the number
        of rows either."""
        from tgi.worker.gpu_kernels import (
            causal_conv,
            delta_rule,
            float8,
            gated_activation,
            grouped_matmul,
            kv_write,
            latent_write,
            lora,
            matmul,
            norm,
            paged_attention,
            quantized_matmul,
            routing,
            sampling,
            ssd,
        )

        self.capability = capability
        self.norm, self.norm_in_place = norm.norm, norm.norm_in_place
        self.gated_activation = gated_activation.gated_activation
        self.activation, self.sigmoid_gate = gated_activation.activation, gated_activation.sigmoid_gate
        self.quantized_matmul = partial(quantized_matmul.quantized_matmul, batch_invariant=batch_invariant)
        self.route, self.combine = partial(routing.route, batch_invariant=batch_invariant), routing.combine
        self.choose_expert_tile, self.grouped_matmul = grouped_matmul.choose_tile, grouped_matmul.grouped_matmul
        self.quantize_rows = float8.quantize_rows
        self.sample = sampling.sample
        self.rotate_and_write_kv = kv_write.rotate_and_write_kv
        self.rotate_and_write_latent = latent_write.rotate_and_write_latent
        self.causal_conv = causal_conv.causal_conv
        self.delta_rule = partial(delta_rule.delta_rule, batch_invariant=batch_invariant)
        self.ssd, self.gated_norm = partial(ssd.ssd, batch_invariant=batch_invariant), ssd.gated_norm
        self.paged_attention = partial(
            paged_attention.paged_attention, capability=capability, batch_invariant=batch_invariant
        )
        self.matmul = matmul.matmul
        self.add_lora = partial(lora.add_lora, batch_invariant=batch_invariant)
        self.batch_invariant = batch_invariant
        if batch_invariant:
            self.choose_expert_tile = grouped_matmul.invariant_tile

    def split_counters(self, device: torch.device) -> Tensor:
        """The `counters` of paged_attention."""
        from tgi.worker.gpu_kernels.paged_attention import COUNTERS

        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
