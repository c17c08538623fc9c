"""How requests draw, as host columns: one entry for each slot, or for each row of a step that draws."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.kernel.messages import MOST_TOPS, Sampling
from tgi.kernel.pack import floats, ints
from tgi.worker.rows import Rows

if TYPE_CHECKING:
    from tgi.worker.masks import Masks
    from tgi.worker.watermark import Watermark

# No penalty makes a score larger, or float32 might overflow and a logprob be no number.
LARGEST_SCORE = 1e8

PLAIN = Sampling(0)
# Fields that leave the scores as the model made them.
NOT_ABOUT_SCORES: dict[str, Any] = {
    "seed": 0,
    "do_sample": False,
    "top_n": 0,
    "choice": 0,
    "adapter": "",
    "adapter_digest": b"",
}


class Bias(NamedTuple):
    """What one request adds to the scores of single tokens."""

    ids: NDArray[np.int64]  # [B], each once
    values: NDArray[np.float32]  # [B]

    @classmethod
    def of(cls, sampling: Sampling) -> "Bias | None":
        """None if nothing is added. Raises ProtocolError for columns that are none, ValueError if they do not fit."""
        ids, values = ints(sampling.bias_ids), floats(sampling.biases)
        if len(ids) != len(values):
            raise ValueError(f"{len(ids)} bias_ids and {len(values)} biases")
        if len(set(ids)) != len(ids):
            raise ValueError("a token has two biases")
        return cls(np.array(ids, np.int64), np.array(values, np.float32)) if ids else None


class BadWords(NamedTuple):
    """Token sequences that one request must not generate: the last token of each, and those before it."""

    lasts: NDArray[np.int64]  # [B]
    lengths: NDArray[np.int64]  # [B] how many tokens of a sequence stand before its last one
    prefixes: NDArray[np.int64]  # [sum(lengths)] these, sequence after sequence

    @classmethod
    def of(cls, sampling: Sampling) -> "BadWords | None":
        """None if there are none. Raises ProtocolError for columns that are none, ValueError if they do not fit."""
        if not sampling.bad_word_ids and not sampling.bad_word_lengths:
            return None
        ids = np.array(ints(sampling.bad_word_ids), np.int64)
        lengths = np.array(ints(sampling.bad_word_lengths), np.int64)
        if not len(lengths) or (lengths < 1).any() or lengths.sum() != len(ids):
            raise ValueError(f"{len(ids)} bad_word_ids and bad_word_lengths {lengths.tolist()}")
        ends = np.cumsum(lengths) - 1
        return cls(ids[ends], lengths - 1, np.delete(ids, ends))


class Params(NamedTuple):
    """Columns [N]; all but the last six hold the fields of Sampling that have their names."""

    samples: NDArray[np.bool_]  # at random; greedy otherwise
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    typical_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    repetition_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float64]
    count_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.uint64]
    top_n: NDArray[np.int64]
    watermark: NDArray[np.bool_]
    min_new_tokens: NDArray[np.int64]
    plain: NDArray[np.bool_]  # scores stay as the model made them,
    greedy: NDArray[np.bool_]  # and only the likeliest token is asked for
    prompt_tokens: NDArray[np.int64]  # ids from here on were generated
    bias: NDArray[np.object_]  # Bias | None
    end_ids: NDArray[np.object_]  # int64 [E] | None: not to be drawn before min_new_tokens are
    bad_words: NDArray[np.object_]  # BadWords | None

    @classmethod
    def empty(cls, count: int) -> "Params":
        """Room for `count` requests."""
        return cls(
            samples=np.zeros(count, np.bool_),
            temperature=np.ones(count, np.float32),
            top_k=np.zeros(count, np.int64),
            top_p=np.ones(count, np.float64),
            typical_p=np.ones(count, np.float64),
            min_p=np.zeros(count, np.float64),
            repetition_penalty=np.ones(count, np.float32),
            frequency_penalty=np.zeros(count, np.float64),
            count_penalty=np.zeros(count, np.float32),
            presence_penalty=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint64),
            choice=np.zeros(count, np.uint64),
            top_n=np.zeros(count, np.int64),
            watermark=np.zeros(count, np.bool_),
            min_new_tokens=np.zeros(count, np.int64),
            plain=np.ones(count, np.bool_),
            greedy=np.ones(count, np.bool_),
            prompt_tokens=np.zeros(count, np.int64),
            bias=np.full(count, None),
            end_ids=np.full(count, None),
            bad_words=np.full(count, None),
        )

    def put(self, at: int, sampling: Sampling, prompt_tokens: int) -> None:
        """A request comes to this place. Raises ValueError or ProtocolError for what no column can hold."""
        self.bias[at] = Bias.of(sampling)
        self.bad_words[at] = BadWords.of(sampling)
        ends = ints(sampling.end_ids)
        self.end_ids[at] = np.array(ends, np.int64) if len(ends) else None
        self.prompt_tokens[at] = prompt_tokens
        self.plain[at] = sampling._replace(**NOT_ABOUT_SCORES) == PLAIN
        self.greedy[at] = self.plain[at] and not sampling.samples and not sampling.top_n
        for name in self._fields[:-6]:
            getattr(self, name)[at] = getattr(sampling, name)
        self.top_n[at] = min(sampling.top_n, MOST_TOPS)

    def take(self, at: NDArray[np.int64]) -> "Params":
        """The columns of these places, in this order."""
        return Params._make(column[at] for column in self)


class Draws(NamedTuple):
    """How D rows draw, and where their ids so far can be read."""

    params: Params  # [D]
    position: NDArray[np.int64]  # [D] of the token that is drawn = how many are known
    history: Callable[[Rows, NDArray[np.int64]], Tensor]  # rows and where each begins -> int64 [n, L]: their ids from
    # there on; short ones are filled with their first
    masks: "Masks | None" = None  # None if no row has a grammar
    mark: "Watermark | None" = None  # None if the engine has none to give
