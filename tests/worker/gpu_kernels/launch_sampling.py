"""Launches sample with vocabularies of real models."""

import torch

from tgi.worker.gpu_kernels.sampling import COLUMNS, sample


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. The number of rows compiles nothing more."""
    for rows in (1, 3, 16):
        logits, columns = torch.empty(rows, 128256, dtype=dtype), torch.zeros(COLUMNS, rows, dtype=torch.int32)
        sample(logits, columns, True)
    if dtype is torch.bfloat16:
        sample(torch.empty(2, 49153, dtype=dtype), torch.zeros(COLUMNS, 2, dtype=torch.int32), False, 0.0625, 30.0)
