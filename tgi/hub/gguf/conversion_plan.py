"""What an import makes of a file: metadata with checked types, the tensors of the result, and where they come from."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tgi.hub.gguf.reader import GGUFFile
from tgi.microkernel.errors import UserError

MAX_LAYERS = 1024

# Prefixes of keys that change the computation: an unknown key with one of them is refused.
HEEDED = (
    *("attention.", "rope.", "expert_", "embedding_scale", "residual_scale", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
KNOWN = {
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    *(f"rope.{key}" for key in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
    *(f"rope.scaling.{key}" for key in ("original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")),
}

# Norms, routers of experts, gates of shared ones and of the delta rule, positions, and what latent attention absorbs.
UNQUANTIZED = (
    *("norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight"),
    *("attn_k_b.weight", "attn_kv_b.weight", "ssm_ba.weight", "ssm_alpha.weight", "ssm_beta.weight"),
)


class Metadata:
    """Typed access to metadata. Raises UserError for a missing or invalid value."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def string(self, key: str) -> str:
        """A required string."""
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if value == 0:
            raise self.wrong(key, value, "a positive number")
        return value

    def of_some_layers(self, key: str, layers: int) -> tuple[int, list[int]]:
        """A positive integer that some layers have, and a list that has it for these, for others 0."""
        value = self.file.metadata.get(key)
        if not isinstance(value, list) or len(value) != layers or not all(type(one) is int for one in value):
            raise self.wrong(key, value, f"a list of {layers} whole numbers")
        if len(found := {*value} - {0}) != 1 or min(found) < 0:
            raise self.wrong(key, value, "one positive number, or 0, for each layer")
        return found.pop(), value

    def largest(self, key: str, layers: int, default: int | None = None) -> int:
        """A positive integer, or the largest one of a list of one for each layer."""
        value = self.file.metadata.get(key)
        if not isinstance(value, list):
            return self.positive(key, default)
        if len(value) != layers or not all(type(one) is int and one > 0 for one in value):
            raise self.wrong(key, value, f"a list of {layers} positive numbers")
        return int(max(value))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(f"{value:.7g}")  # 1e-5 stored as float32 reads 9.999999747378752e-06

    def vocabulary_size(self) -> int:
        """The rows of the embedding, of which the vocabulary has some or all."""
        found, tokens = self.file.tensors.get("token_embd.weight"), self.file.metadata.get("tokenizer.ggml.tokens")
        if found is None:
            raise UserError(f"{self.file.path} lacks the tensor 'token_embd.weight'. Fetch or convert it again.")
        rows = found.shape[0]
        if not isinstance(tokens, list) or not 0 < len(tokens) <= rows:
            raise UserError(
                f"{self.file.path}: the vocabulary does not fit an embedding of {rows} rows. Fetch or convert it again."
            )
        return rows

    def wrong(self, key: str, value: Any, expected: str) -> UserError:
        """The error for a missing or invalid value."""
        found = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return UserError(f"{self.file.path}: the metadata key {key!r} {found}; {expected} was expected.")


class TiledHeads(NamedTuple):
    """Value heads of the delta rule in the order of llama.cpp."""

    key_heads: int
    each: int  # value heads of a key head
    size: int  # rows, or columns, of a value head
    columns: bool = False

    @property
    def total(self) -> int:
        """The rows, or columns, of all value heads."""
        return self.key_heads * self.each * self.size


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor of the resulting model: its name in the file, its name and shape in the result.

    weights.py undoes what llama.cpp's converter has done: where `heads` is set, it has reordered the rows of each head;
    where `shift` is set, it has added that to all numbers; where `part` is set, (n, count), it has put `count` of these
    into one tensor, of which this is the nth; `reshaped` is the shape in the file, if it has changed it; where
    `exponent` is set, it has stored -exp of the numbers; where `then` is set, it has split the rows, and `then` has the
    further parts. With `expanded`, (heads, rows of K, rows of V), `source` has all K, transposed, and `then` all V,
    where the result has K and V of one head after another. With `half`, (n, parts), the file has two such tensors, of
    each part the rows of the first, then those of the second; this is the nth. With `tiled`, it has sorted value heads
    by their number within a key head, then by the key head, in the last rows, or in the columns. With `pairs`, (rows of
    a head, rows that rotate), it has put the first rows of the pairs that rotate before the second ones. With `axes`,
    the tensor, or all of its sources stacked, in the shape `view` has its axes in another order. With `rows`, (first,
    total), it has put the rows from the first one on into a tensor of that total. With `apart`, the file has two rows,
    and the result the first one less the second. With `number` there is no source: all elements are that.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0
    part: tuple[int, int] | None = None
    reshaped: tuple[int, ...] = ()
    exponent: bool = False
    then: tuple[str, ...] = ()
    expanded: tuple[int, int, int] | None = None
    half: tuple[int, int] | None = None
    tiled: TiledHeads | None = None
    pairs: tuple[int, int] | None = None
    view: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    apart: bool = False
    number: float | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the file, the first one of several."""
        rows, *columns = self.shape
        if self.expanded is not None:
            return (self.expanded[0], *columns, self.expanded[1])
        if self.half is not None or self.apart:
            return (2 * rows, *columns)
        if self.rows is not None:
            return (self.rows[1], *columns)
        whole = (rows // len(self.sources), *columns)
        return self.reshaped or (whole if self.part is None else (self.part[1], *whole))

    @property
    def stored_then(self) -> tuple[int, ...]:
        """The shape of `then` in the file."""
        return self.stored if self.expanded is None else (self.expanded[0], self.expanded[2], self.shape[1])

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors of the file."""
        return (self.source, *self.then) if self.number is None else ()

    @property
    def matrix(self) -> bool:
        """Whether this is the weight of a linear layer, the embedding or the head, except UNQUANTIZED."""
        return len(self.shape) == 2 and not self.source.endswith(UNQUANTIZED) and not self.apart


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The configuration and tensors of the resulting model directory. If `plain`, no weights keep their bits. `files`
    are further JSON files by name, `parts` further directories with weights, none of which keep their bits. `notes` are
    sentences to log: in what the model differs from its safetensors version."""

    config: dict[str, Any]
    tensors: list[TargetTensor]
    plain: bool = False
    files: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[TargetTensor]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        """The longest sequence."""
        return int(self.config.get("max_position_embeddings") or self.config["n_positions"])


def refuse_unknown_keys(file: GGUFFile, architecture: str, known: set[str]) -> None:
    """Raises UserError for a key that changes the computation and is not among these."""
    for key in file.metadata:
        name = key.removeprefix(f"{architecture}.")
        if name != key and name.startswith(HEEDED) and name not in known:
            raise UserError(
                f"{file.path} has {key!r} set, which import does not know. Use the model's safetensors version instead."
            )


def require_tensors(file: GGUFFile, architecture: str, wanted: list[TargetTensor], unused: set[str]) -> None:
    """Raises UserError unless the file has all sources, in their shapes, and besides these at most `unused` tensors."""
    for tensor in wanted:
        for source in tensor.sources:
            found = file.tensors.get(source)
            if found is None:
                raise UserError(f"{file.path} lacks the tensor {source!r}. Fetch or convert it again.")
            expected = tensor.stored if source == tensor.source else tensor.stored_then
            # Some releases of the converter leave out dimensions of 1.
            if [size for size in found.shape if size != 1] != [size for size in expected if size != 1]:
                raise UserError(
                    f"{file.path}: the tensor {source!r} has shape {list(found.shape)}, "
                    f"expected {list(expected)}. Fetch or convert it again."
                )
            if tensor.expanded is None and found.type != file.tensors[tensor.source].type:
                raise UserError(
                    f"{file.path}: the tensors {' and '.join(tensor.sources)}, which become one, are of different "
                    "types. Use another quantization of the model, or its safetensors version."
                )
    unknown = set(file.tensors) - unused - {source for tensor in wanted for source in tensor.sources}
    if unknown:
        raise UserError(
            f"{file.path} has tensors that a {architecture} model does not use, such as {min(unknown)!r}. "
            "Use the model's safetensors version instead."
        )
