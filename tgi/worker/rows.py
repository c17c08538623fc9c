"""Some rows of a matrix on the device, for what concerns only these: taken out, worked on, put back."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.staging import sent

Rows = NDArray[np.int64]


def take(matrix: Tensor, rows: Rows) -> Tensor:
    """These rows; the matrix itself where they are all."""
    return matrix if len(rows) == len(matrix) else matrix[sent(rows, matrix.device)]


def put(matrix: Tensor, rows: Rows, values: Tensor) -> None:
    """Writes rows back that `take` took."""
    if len(rows) < len(matrix):
        matrix[sent(rows, matrix.device)] = values
    elif values is not matrix:
        matrix.copy_(values)


def column(values: NDArray, like: Tensor) -> Tensor:
    """A host column as [n, 1] beside `like`."""
    return sent(values, like.device)[:, None]
