"""The sampling parameters of requests as host columns: an entry for each slot, or for each row that a step samples."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import MAX_TOP_TOKENS
from tgi.microkernel.messages.sampling_params import PARAMETERS, SamplingParams
from tgi.worker.sampling.noise import noise_keys
from tgi.worker.sampling.token_bitmask import GrammarBitmask
from tgi.worker.sampling.watermark import Watermark

Indices = NDArray[np.int64]


NEUTRAL_PARAMS = SamplingParams(0)
# Fields that do not change the logits, with their neutral values.
FIELDS_WITHOUT_EFFECT_ON_LOGITS: dict[str, Any] = {
    "seed": 0,
    "do_sample": False,
    "top_n": 0,
    "listed_ids": b"",
    "choice": 0,
    "adapter": "",
    "adapter_digest": b"",
}
# Lower bound of a temperature: logits divided by it stay finite in float32, so logprobs do not become NaN.
MIN_TEMPERATURE = 1e-30
# Fields that our GPU kernel applies to the model's logits, with the values that are off.
KERNEL_FIELDS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


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
    plain: NDArray[np.bool_]  # temperature, top-k, top-p and min-p at most apply, and no alternatives are listed
    prompt_tokens: NDArray[np.int64]  # the length of the prompt: later ids are generated
    history_from: NDArray[np.int64]  # the position from which on ids are penalized: 0 unless an encoder has the input
    bias: NDArray[np.object_]  # LogitBias | None
    end_ids: NDArray[np.object_]  # int64 [E] | None: forbidden until min_new_tokens are generated
    bad_words: NDArray[np.object_]  # BadWords | None
    listed_ids: NDArray[np.object_]  # int64 [top_n] | None: the tokens to list in place of the likeliest

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
                "plain": np.ones(count, np.bool_),
                "prompt_tokens": np.zeros(count, np.int64),
                "history_from": np.zeros(count, np.int64),
                "bias": np.full(count, None),
                "end_ids": np.full(count, None),
                "bad_words": np.full(count, None),
                "listed_ids": np.full(count, None),
            }
        )

    def assign(self, slot: int, params: SamplingParams, prompt_tokens: int, history_from: int = 0) -> None:
        """Writes the parameters of the request that now occupies this slot. Raises ValueError, OverflowError or
        ProtocolError for values that no column can hold."""
        self.bias[slot] = LogitBias.from_params(params)
        self.bad_words[slot] = BadWords.from_params(params)
        ends = unpack_int32(params.end_ids)
        self.end_ids[slot] = np.array(ends, np.int64) if len(ends) else None
        self.prompt_tokens[slot], self.history_from[slot] = prompt_tokens, history_from
        effective = params._replace(**FIELDS_WITHOUT_EFFECT_ON_LOGITS)
        self.unprocessed[slot] = effective == NEUTRAL_PARAMS
        self.plain[slot] = effective._replace(**KERNEL_FIELDS) == NEUTRAL_PARAMS and not params.top_n
        self.greedy[slot] = self.unprocessed[slot] and not params.samples and not params.top_n
        for name in NUMERIC_COLUMNS:
            getattr(self, name)[slot] = getattr(params, name)
        listed = unpack_int32(params.listed_ids)
        if len(listed) > MAX_TOP_TOKENS or (listed and not params.top_n):
            raise ValueError(
                f"{len(listed)} listed_ids with top_n {params.top_n}: at most {MAX_TOP_TOKENS} are possible"
            )
        self.listed_ids[slot] = np.array(listed, np.int64) if len(listed) else None
        self.top_n[slot] = len(listed) or min(params.top_n, MAX_TOP_TOKENS)

    def select(self, slots: Indices) -> "SamplingColumns":
        """The columns of these slots, in this order, as copies."""
        return SamplingColumns({name: column[slots] for name, column in vars(self).items()})


class SamplingBatch(NamedTuple):
    """What the sampler needs to know of D rows besides their logits. Every row with a grammar has one in its params."""

    params: SamplingColumns  # [D]
    positions: NDArray[np.int64]  # [D] of the token to sample = the number of known ids
    # (rows [n], first position of each [n], the one after its last [n]) -> int64 [n, L]: the known ids of each row at
    # these positions. A shorter row is padded with the id at its first one.
    token_history: Callable[[Indices, Indices, Indices], Tensor]
    grammar_bitmask: GrammarBitmask | None = None  # None if no row has a grammar
    watermark: Watermark | None = None  # required if a row asks for the watermark

    def select(self, rows: Indices) -> "SamplingBatch":
        """The same of these rows [n], ascending, which include all rows with a grammar."""
        bitmask = self.grammar_bitmask
        if bitmask is not None:
            bitmask = bitmask._replace(rows=np.searchsorted(rows, bitmask.rows))
        return self._replace(
            params=self.params.select(rows),
            positions=self.positions[rows],
            token_history=lambda chosen, begins, ends: self.token_history(rows[chosen], begins, ends),
            grammar_bitmask=bitmask,
        )


def has_limits(params: SamplingColumns, vocab_size: int) -> bool:
    """Whether some row has top-k, top-p or min-p."""
    return bool((_used_top_k(params, vocab_size) + (params.top_p < 1.0) + (params.min_p > 0)).any())


def pack_columns(batch: SamplingBatch, vocab_size: int) -> NDArray[np.int32]:
    """The parameters of D rows as gpu_kernels.sampling reads them, int32 [7, D]: temperature, top_k (0: off), top_p,
    log(min_p) (-inf: off), the two noise keys (0 where no row samples), and whether the row samples. Floats are stored
    as their bits."""
    params = batch.params
    columns = np.zeros((7, len(batch.positions)), np.int32)
    floats = columns.view(np.float32)
    floats[0] = np.maximum(params.temperature, np.float32(MIN_TEMPERATURE))
    columns[1] = _used_top_k(params, vocab_size)
    floats[2] = params.top_p
    floats[3] = -np.inf
    np.log(params.min_p, out=floats[3], where=params.min_p > 0)
    columns[6] = params.samples
    if np.count_nonzero(columns[6]):
        columns[4:6] = noise_keys(params.seed, batch.positions, params.choice).T
    return columns


def _used_top_k(params: SamplingColumns, vocab_size: int) -> NDArray[np.int64]:
    used: NDArray[np.int64] = np.where((params.top_k > 0) & (params.top_k < vocab_size), params.top_k, 0)
    return used
