#!/usr/bin/env python3
"""Checks an installed wheel: the compiled CPU kernels for the instruction set in use, which TGI_CPU limits, load from
the package and compute as torch does. Arguments: element types, by default all. Run it with the Python of that
installation."""

import os
import sys
from collections.abc import Sequence

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
    # A result is rounded to its type, after sums in float32.
    allowed = torch.finfo(dtype).eps + INPUTS * torch.finfo(torch.float32).eps
    assert off <= allowed * exact.abs().max(), f"{path.name} is {off} off"
    print(f"{path.name} computes as torch does")


def main(elements: Sequence[str]) -> None:
    """Checks these element types with the instruction set in use."""
    limit_instruction_set(os.environ.get(CPU_VARIABLE) or None)
    if kernel_set() is None:
        sys.exit("This processor has none of the instruction sets that kernels are compiled for.")
    for element in elements:
        check(element)


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(ELEMENTS))
