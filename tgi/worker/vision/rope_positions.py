"""Positions with three axes for rotary embeddings (mrope; Qwen2-VL, 2024, section 2.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class PlacedGrid(NamedTuple):
    """The image tokens of an image in a prompt: `frames` * `rows` * `columns` from `position` on."""

    position: int
    frames: int
    rows: int
    columns: int


class RopePositions(NamedTuple):
    """Those of a prompt. A token at position p after it has p + `delta` on each axis."""

    prompt: Ints  # [3, tokens]: frame, row and column of each token
    delta: int

    def select(self, start: int, stop: int) -> Ints:
        """[3, stop - start] of the tokens at these positions of the sequence."""
        known = self.prompt.shape[1]
        after = np.arange(max(start, known), max(stop, known)) + self.delta
        return np.concatenate((self.prompt[:, start:stop], np.broadcast_to(after, (3, len(after)))), axis=1)


def rope_positions(tokens: int, images: Sequence[PlacedGrid]) -> RopePositions:
    """The positions of a prompt with these images, in the order of their positions. A text token is one after the
    largest position of all before it; the patches of an image are counted from there along their axes."""
    found = np.empty((3, tokens), np.int64)
    done = following = 0
    for position, frames, rows, columns in images:
        found[:, done:position] = following + np.arange(position - done)
        following += position - done
        done = position + frames * rows * columns
        found[:, position:done] = following + np.indices((frames, rows, columns)).reshape(3, -1)
        following += max(rows, columns)
    found[:, done:] = following + np.arange(tokens - done)
    return RopePositions(found, following - done)
