"""Requests and responses of the routes of models that end in a vector: embeddings, scores and classes."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tgi.api.shapes.types import Int32, ResponseBody, ShapeError, UInt32, doc

# msgspec allows only one list type in a union; `items_of` checks that the items of a list have one type.
TextsOrIds = Annotated[
    str | Annotated[list[str | Int32 | list[Int32]], doc(minItems=1)],
    Meta(title="TextsOrIds", extra={"untagged": "Input"}),
]
Texts = Annotated[str | list[str], Meta(title="Texts")]
Direction = Annotated[
    Literal["left", "right", "Left", "Right"], doc("The end of a text at which tokens are dropped; right if absent")
]
Truncate = Annotated[bool | None, doc("Whether a text that is too long is truncated; else it is refused")]
TruncatePromptTokens = Annotated[
    Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
    doc("Truncate longer texts to this many tokens; -1: to as many as the model takes. Without it they are refused."),
]
Model = Annotated[str | None, doc("Ignored: one model is served", example="all-MiniLM-L6-v2")]


def items_of(given: Any, field: str) -> list[Any]:
    """The texts, or lists of token ids, of a TextsOrIds. Raises ShapeError for an empty or mixed list."""
    if isinstance(given, list):
        if not given:
            raise ShapeError("Empty array detected. At least one input was expected.", field)
        if len({*map(type, given)}) > 1:
            raise ShapeError("data did not match any variant of untagged enum Input", field)
        if not isinstance(given[0], int):
            return given
    return [given]


# --- requests ---------------------------------------------------------------------------------------------------------


class EmbeddingRequest(Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: TextsOrIds
    model: Model = None
    encoding_format: Annotated[Literal["float", "base64"] | None, doc("base64: the bytes of float32 numbers")] = None
    dimensions: Annotated[
        UInt32 | None, doc("Keep this number of values of each vector, and give it the length 1 again", example=256)
    ] = None
    user: Annotated[str | None, doc("Ignored")] = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: Direction | None = None
    add_special_tokens: Annotated[bool | None, doc("Whether the tokenizer adds special tokens; true if absent")] = None
    prompt_name: Annotated[str | None, doc("One of the model's prompts, which precedes each text")] = None
    normalize: Annotated[bool | None, doc("Whether vectors get the length 1; as the model says if absent")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        items_of(self.input, "input")


class EmbedRequest(Struct, kw_only=True):
    """Body of POST /embed, as Text Embeddings Inference has it."""

    inputs: TextsOrIds
    normalize: Annotated[bool | None, doc("Whether vectors get the length 1; true if absent")] = None
    truncate: Truncate = None
    truncation_direction: Direction | None = None
    prompt_name: Annotated[str | None, doc("One of the model's prompts, which precedes each text")] = None
    dimensions: Annotated[UInt32 | None, doc("Keep this number of values of each vector")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        items_of(self.inputs, "inputs")


class RerankDocument(Struct):
    """A document as an object."""

    text: str


class RerankRequest(Struct, kw_only=True):
    """Body of POST /rerank, /v1/rerank and /v2/rerank: with `documents` as Cohere and Jina have it, with `texts` as
    Text Embeddings Inference has it."""

    query: str
    documents: list[str | RerankDocument] | None = None
    texts: list[str] | None = None
    model: Model = None
    top_n: Annotated[UInt32 | None, doc("Return this number of the best documents; all if absent or 0")] = None
    return_documents: Annotated[bool | None, doc("Whether results have the documents' texts; true if absent")] = None
    return_text: Annotated[bool | None, doc("With `texts`: whether results have them")] = None
    raw_scores: Annotated[bool | None, doc("Whether scores are the model's logits")] = None
    truncate: Truncate = None
    truncation_direction: Direction | None = None
    truncate_prompt_tokens: TruncatePromptTokens = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        if (self.documents is None) == (self.texts is None):
            raise ShapeError("either `documents` or `texts` was expected", "documents")
        if not self.candidates:
            raise ShapeError("Empty array detected. At least one document was expected.", "documents")

    @property
    def candidates(self) -> list[str]:
        """The texts to rank."""
        if self.texts is not None:
            return self.texts
        return [one if isinstance(one, str) else one.text for one in self.documents or ()]


class ScoreRequest(Struct, kw_only=True):
    """Body of POST /score and /v1/score: one text against several, or several in pairs."""

    text_1: Texts
    text_2: Texts
    model: Model = None
    truncate_prompt_tokens: TruncatePromptTokens = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        if self.text_1 == [] or self.text_2 == []:
            raise ShapeError("Empty input detected. At least one text was expected.", "text_1")

    @property
    def pairs(self) -> list[tuple[str, str]] | None:
        """The pairs to score; None: the numbers of texts do not match."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True)) if len(first) == len(second) else None


class SimilarityInputs(Struct):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class SimilarityRequest(Struct, kw_only=True):
    """Body of POST /similarity."""

    inputs: SimilarityInputs
    truncate: Truncate = None
    truncation_direction: Direction | None = None


class ClassifyRequest(Struct, kw_only=True):
    """Body of POST /classify and /v1/classify."""

    input: TextsOrIds
    model: Model = None
    truncate_prompt_tokens: TruncatePromptTokens = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        items_of(self.input, "input")


class PredictRequest(Struct, kw_only=True):
    """Body of POST /predict, as Text Embeddings Inference has it: a text, a pair of texts, or a list of lists of one or
    two texts."""

    inputs: Annotated[str | list[str | list[str]], Meta(title="PredictInput")]
    raw_scores: Annotated[bool | None, doc("Whether scores are the model's logits")] = None
    truncate: Truncate = None
    truncation_direction: Direction | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        if not self.items or not all(1 <= len(item) <= 2 for item in self.items):
            raise ShapeError("a text, a pair of texts or a list of lists of these was expected", "inputs")
        if isinstance(self.inputs, list) and len({*map(type, self.inputs)}) > 1:
            raise ShapeError("data did not match any variant of untagged enum PredictInput", "inputs")

    @property
    def single(self) -> bool:
        """Whether the answer is that of one input instead of a list."""
        return isinstance(self.inputs, str) or (bool(self.inputs) and isinstance(self.inputs[0], str))

    @property
    def items(self) -> list[list[str]]:
        """The texts of each input: one or two."""
        given: Any = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return [given] if self.single else given


# --- responses --------------------------------------------------------------------------------------------------------


class InputUsage(ResponseBody):
    """What was counted: only the input has tokens."""

    prompt_tokens: UInt32
    total_tokens: UInt32


class Embedding(ResponseBody):
    """The vector of an input."""

    object: Literal["embedding"]
    index: UInt32
    embedding: Annotated[list[float] | str, doc("Numbers, or with base64 the bytes of float32 numbers")]


class EmbeddingList(ResponseBody):
    """The vectors of the inputs, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class RankedDocument(ResponseBody):
    """A document of a RerankResponse."""

    text: str


class RankedResult(ResponseBody, omit_defaults=True):
    """The score of a document; the best first."""

    index: UInt32
    relevance_score: float
    document: RankedDocument | None = None


class RerankResponse(ResponseBody):
    """The documents by their scores."""

    id: str
    model: str
    usage: InputUsage
    results: list[RankedResult]


class Rank(ResponseBody, omit_defaults=True):
    """The score of a text, as Text Embeddings Inference has it; the best first."""

    index: UInt32
    score: float
    text: str | None = None


class Score(ResponseBody):
    """The score of a pair."""

    index: UInt32
    object: Literal["score"]
    score: float


class ScoreList(ResponseBody):
    """The scores of the pairs, in order."""

    id: str
    object: Literal["list"]
    created: UInt32
    model: str
    data: list[Score]
    usage: InputUsage


class Classification(ResponseBody):
    """The classes of an input."""

    index: UInt32
    label: Annotated[str, doc("The likeliest class")]
    probs: Annotated[list[float], doc("The probability of each class, in the order of the model's labels")]
    num_classes: UInt32


class ClassificationList(ResponseBody):
    """The classes of the inputs, in order."""

    id: str
    object: Literal["list"]
    created: UInt32
    model: str
    data: list[Classification]
    usage: InputUsage


class Prediction(ResponseBody):
    """A class with its score, as Text Embeddings Inference has it; the likeliest first."""

    score: float
    label: str
