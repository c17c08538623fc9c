"""The GPU kernels as functions of tensors on the GPU. A call launches a kernel and does not wait for it."""

from functools import partial


class GpuKernels:
    """The functions of this package's modules, which describe them. Made only in a worker with a GPU: it imports
    Triton."""

    def __init__(self, capability: tuple[int, int]) -> None:
        """`capability` is CUDA's compute capability."""
        from tgi.worker.gpu_kernels import (
            float8,
            gated_activation,
            kv_write,
            norm,
            paged_attention,
            quantized_matmul,
            rope,
            sampling,
        )

        self.capability = capability
        self.norm, self.norm_in_place = norm.norm, norm.norm_in_place
        self.apply_rope = rope.apply_rope
        self.gated_activation = gated_activation.gated_activation
        self.quantized_matmul = quantized_matmul.quantized_matmul
        self.quantize_rows = float8.quantize_rows
        self.write_kv = kv_write.write_kv
        self.sample = sampling.sample
        self.paged_attention = partial(paged_attention.paged_attention, capability=capability)
