"""Compiles all launched kernels to GPU machine code, on a machine without a GPU.

    python -m tests.worker.gpu_kernels.compile_launches tests.worker.gpu_kernels.launch_rows ...

Each module has `launches(dtype)`, which calls our functions with tensors of the sizes and kinds that they will have.
They are on CPU and stay as they are: a launch compiles its kernel, as it would on a GPU, and goes no further. Raises
what the compiler does; prints how many kernels there are. It takes a tenth of a second for each of them, so only
bfloat16 is compiled for all capabilities.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, KernelInterface

CAPABILITIES = {torch.bfloat16: (80, 90, 100), torch.float16: (80,), torch.float32: (90,)}


class AbsentDriver:
    """A Triton driver for an absent GPU. The device number is its compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compiled(launches: Callable[[torch.dtype], None]) -> int:
    """Compiles the kernels that `launches` launches. Returns their number."""
    kernels: list[Any] = []

    def launch(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            kernels.append(kernel.warmup(*args, grid=grid, **options))

        return call

    KernelInterface.__getitem__ = launch
    for dtype, capabilities in CAPABILITIES.items():
        for capability in capabilities:
            triton.runtime.driver.set_active(AbsentDriver(capability))
            launches(dtype)
    assert all(kernel.asm["cubin"] for kernel in kernels)
    return len({id(kernel) for kernel in kernels})


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, compiled(importlib.import_module(name).launches))
