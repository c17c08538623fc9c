"""Which tokens the rows with a grammar may draw."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.params import Draws
from tgi.worker.rows import put, take

BITS = 32  # of a word


class Masks(NamedTuple):
    """The masks of those of a step's D drawing rows that have a grammar."""

    rows: NDArray[np.int64]  # [n] which of the drawing rows, ascending
    words: NDArray[np.int32]  # [n, W]: token t is allowed if bit t % 32 of word t // 32 is set
    faults: list[str]  # [D] why a row cannot draw, "" if it can


def forbid(scores: Tensor, draws: Draws) -> None:
    """-inf for every token with which a row's text could not go on in its grammar."""
    masks = draws.masks
    if masks is None:
        return
    words = torch.from_numpy(masks.words).to(scores.device)
    bits = words[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=scores.device)
    forbidden = (bits & 1).view(len(words), -1)[:, : scores.shape[1]] == 0
    put(scores, masks.rows, take(scores, masks.rows).masked_fill_(forbidden, -torch.inf))
