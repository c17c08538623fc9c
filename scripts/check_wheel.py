#!/usr/bin/env python3
"""Checks an installed wheel: for the instruction set in use, which TGI_CPU limits, and every element type the
compiled CPU kernels load from the package and compute as torch does. Run it with the Python of that installation."""

import os
import sys

from tgi.worker.host_cpu import CPU_VARIABLE, kernel_set, limit_instruction_set
from tgi.worker.instruction_sets import ELEMENTS

OUTPUTS, INPUTS, ROWS = 96, 64, 5


def check(element: str) -> None:
    """Raises AssertionError if the library is not from the package, or if its products are wrong."""
    import torch  # after limit_instruction_set

    from tgi.worker.cpu_kernels.build import PACKAGED, build_library
    from tgi.worker.cpu_kernels.kernels import CpuKernels

    path = build_library(element)
    assert path.parent == PACKAGED, f"{path} is not from the package"
    dtype: torch.dtype = getattr(torch, element)
    kernels = CpuKernels(path, 2, dtype)
    x, weight = torch.randn(ROWS, INPUTS).to(dtype), torch.randn(OUTPUTS, INPUTS).to(dtype)
    exact = x.double() @ weight.double().T
    off = (kernels.linear(x, kernels.pack_weight(weight)) - exact).abs().max()
    assert off <= torch.finfo(dtype).eps * exact.abs().max(), f"{path.name} is {off} off"
    print(f"{path.name} computes as torch does")


def main() -> None:
    """Checks all element types of the instruction set in use."""
    limit_instruction_set(os.environ.get(CPU_VARIABLE) or None)
    chosen = kernel_set()
    if chosen is None:
        sys.exit("This processor has none of the instruction sets that kernels are compiled for.")
    for element in ELEMENTS:
        check(element)


if __name__ == "__main__":
    main()
