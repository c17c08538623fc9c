"""What attention on a GPU takes besides tensors of queries, keys and values, as data; without Triton."""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Rows of a step that one launch of paged_attention computes.

    `starts` int32 [R + 1] are indices into the tokens of the step: row r has the queries starts[r] to
    starts[r + 1] - 1, of which the last is the last position of its context. None: row r has the query `first` + r
    alone. `table` int32 [R, P] is the page table of each row, `context` int32 [R] the context lengths, from 1 on. Both
    are contiguous, but rows of `table` may have a larger stride.
    """

    first: int  # token
    tokens: int
    longest: int  # queries of a row at most
    starts: Tensor | None
    table: Tensor
    context: Tensor


class Rotation(NamedTuple):
    """The rotary embedding of a step."""

    angles: Tensor  # float32 [positions, 2, rotary_dim]: cos and sin, contiguous
    positions: Tensor  # int64 [T]
    neighbours: bool  # pairs are elements 2 i and 2 i + 1, else i and i + rotary_dim / 2
    start: int = 0  # elements of a head before the rotated ones; of latent attention alone


class HeadNorm(NamedTuple):
    """An RMS norm of each of the first heads of a step's queries, keys and values."""

    weight: Tensor  # float32 [heads, head_dim], contiguous: those of queries and keys, or of the values too
    epsilon: float
    after_rotation: bool = False


class HeadTransform(NamedTuple):
    """What happens to queries and keys between the qkv projection and attention: the norm, then the rotation, or, with
    `norm.after_rotation`, the other way round."""

    rotation: Rotation | None = None
    norm: HeadNorm | None = None
