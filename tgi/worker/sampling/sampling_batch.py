"""The sampling parameters of requests as host columns: an entry for each slot, or for each row that a step samples."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.microkernel.codec import unpack_float32, unpack_int32
from tgi.microkernel.protocol import MAX_TOP_TOKENS
from tgi.microkernel.sampling_params import PARAMETERS, SamplingParams
from tgi.worker.sampling.token_bitmask import GrammarBitmask
from tgi.worker.sampling.watermark import Watermark

Indices = NDArray[np.int64]


NEUTRAL_PARAMS = SamplingParams(0)
# Fields that do not change the logits, with their neutral values.
FIELDS_WITHOUT_EFFECT_ON_LOGITS: dict[str, Any] = {
    "seed": 0,
    "do_sample": False,
    "top_n": 0,
    "choice": 0,
    "adapter": "",
    "adapter_digest": b"",
}


class LogitBias(NamedTuple):
    """The biases of one request."""

    ids: NDArray[np.int64]  # [B], each once
    values: NDArray[np.float32]  # [B]

    @classmethod
    def from_params(cls, params: SamplingParams) -> "LogitBias | None":
        """None without biases. Raises ProtocolError for a column of broken length, ValueError if columns differ."""
        ids, values = unpack_int32(params.bias_ids), unpack_float32(params.biases)
        if len(ids) != len(values):
            raise ValueError(f"{len(ids)} bias_ids and {len(values)} biases")
        if len(set(ids)) != len(ids):
            raise ValueError("a token has two biases")
        return cls(np.array(ids, np.int64), np.array(values, np.float32)) if ids else None


class BadWords(NamedTuple):
    """The token sequences that one request must not generate, each as its last token and the prefix before it."""

    last_ids: NDArray[np.int64]  # [B]
    lengths: NDArray[np.int64]  # [B] the length of each prefix
    prefixes: NDArray[np.int64]  # [sum(lengths)] the prefixes, one after another

    @classmethod
    def from_params(cls, params: SamplingParams) -> "BadWords | None":
        """None without bad words. Raises ProtocolError for a column of broken length, ValueError if columns differ."""
        if not params.bad_word_ids and not params.bad_word_lengths:
            return None
        ids = np.array(unpack_int32(params.bad_word_ids), np.int64)
        lengths = np.array(unpack_int32(params.bad_word_lengths), np.int64)
        if not len(lengths) or (lengths < 1).any() or lengths.sum() != len(ids):
            raise ValueError(f"{len(ids)} bad_word_ids and bad_word_lengths {lengths.tolist()}")
        ends = np.cumsum(lengths) - 1
        return cls(ids[ends], lengths - 1, np.delete(ids, ends))


_DTYPES = {"bool": "bool", "f32": "float32", "i32": "int64", "u32": "int64"}
# Columns that hold the SamplingParams attribute of the same name, with their numpy dtypes: the parameters of the table,
# with `samples` in place of do_sample.
NUMERIC_COLUMNS = {"samples": "bool", "seed": "uint64", "choice": "uint64"} | {
    name: parameter.column or _DTYPES[parameter.json_type]
    for name, parameter in PARAMETERS.items()
    if name != "do_sample"
}


class SamplingColumns:
    """The sampling parameters of N requests as arrays [N].

    Each of NUMERIC_COLUMNS is an attribute; `samples` False is greedy, and `top_n` is at most MAX_TOP_TOKENS.
    """

    # Derived from the parameters of a request
    unprocessed: NDArray[np.bool_]  # no logits processor applies
    greedy: NDArray[np.bool_]  # unprocessed, and only the greedy token and its logprob are needed
    prompt_tokens: NDArray[np.int64]  # the length of the prompt: later ids are generated
    bias: NDArray[np.object_]  # LogitBias | None
    end_ids: NDArray[np.object_]  # int64 [E] | None: forbidden until min_new_tokens are generated
    bad_words: NDArray[np.object_]  # BadWords | None

    def __init__(self, columns: dict[str, NDArray]) -> None:
        self.__dict__ = columns

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> NDArray: ...

    @classmethod
    def allocate(cls, count: int) -> "SamplingColumns":
        """Columns for `count` requests, all with neutral values."""
        columns = {
            name: np.full(count, getattr(NEUTRAL_PARAMS, name), dtype) for name, dtype in NUMERIC_COLUMNS.items()
        }
        return cls(
            columns
            | {
                "unprocessed": np.ones(count, np.bool_),
                "greedy": np.ones(count, np.bool_),
                "prompt_tokens": np.zeros(count, np.int64),
                "bias": np.full(count, None),
                "end_ids": np.full(count, None),
                "bad_words": np.full(count, None),
            }
        )

    def assign(self, slot: int, params: SamplingParams, prompt_tokens: int) -> None:
        """Writes the parameters of the request that now occupies this slot. Raises ValueError, OverflowError or
        ProtocolError for values that no column can hold."""
        self.bias[slot] = LogitBias.from_params(params)
        self.bad_words[slot] = BadWords.from_params(params)
        ends = unpack_int32(params.end_ids)
        self.end_ids[slot] = np.array(ends, np.int64) if len(ends) else None
        self.prompt_tokens[slot] = prompt_tokens
        self.unprocessed[slot] = params._replace(**FIELDS_WITHOUT_EFFECT_ON_LOGITS) == NEUTRAL_PARAMS
        self.greedy[slot] = self.unprocessed[slot] and not params.samples and not params.top_n
        for name in NUMERIC_COLUMNS:
            getattr(self, name)[slot] = getattr(params, name)
        self.top_n[slot] = min(params.top_n, MAX_TOP_TOKENS)

    def select(self, slots: Indices) -> "SamplingColumns":
        """The columns of these slots, in this order, as copies."""
        return SamplingColumns({name: column[slots] for name, column in vars(self).items()})


class SamplingBatch(NamedTuple):
    """What the sampler needs to know of D rows besides their logits."""

    params: SamplingColumns  # [D]
    positions: NDArray[np.int64]  # [D] of the token to sample = the number of known ids
    # (rows [n], first position of each [n]) -> int64 [n, L]: the known ids of each row from its first position on. A
    # short row is padded with its first id.
    token_history: Callable[[Indices, Indices], Tensor]
    grammar_bitmask: GrammarBitmask | None = None  # None if no row has a grammar
    watermark: Watermark | None = None  # required if a row asks for the watermark
