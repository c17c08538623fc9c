"""Requests and responses of POST /v1/decisions (OpenAI's) and /v1/systemone (System One): typed answers to questions
about an input, with probabilities."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tgi.api.shapes.types import ResponseBody, ShapeError, UInt32, doc

MAX_QUESTIONS = 200
MAX_LEVELS = 10

# --- requests ---------------------------------------------------------------------------------------------------------


class DecisionText(Struct, tag_field="type", tag="input_text"):
    """A part of a message."""

    text: str


class DecisionMessage(Struct):
    """A message."""

    role: Literal["user"]
    content: Annotated[str | list[DecisionText], Meta(title="DecisionContent")]
    type: Literal["message"] = "message"


class DecisionQuestionBase(Struct, kw_only=True):
    """What all questions have."""

    instructions: str
    name: str | None = None


class PredicateQuestion(DecisionQuestionBase, tag_field="type", tag="predicate"):
    """Whether something is true."""


class DecisionChoice(Struct):
    """An option of a choice."""

    value: str | bool
    description: str = ""


class ChoiceQuestion(DecisionQuestionBase, tag_field="type", tag="choice", kw_only=True):
    """Which one of several."""

    choices: Annotated[list[DecisionChoice], doc("2 to 52 with different values", minItems=2)]

    def __post_init__(self) -> None:
        """Raises ShapeError for less than two choices."""
        if len(self.choices) < 2:
            raise ShapeError(f"invalid length {len(self.choices)}, expected at least two choices", "choices")


class DecisionLevel(Struct):
    """A level of a score."""

    label: str
    description: str = ""


class ScoreQuestion(DecisionQuestionBase, tag_field="type", tag="score", kw_only=True):
    """How much, on a scale."""

    levels: Annotated[list[DecisionLevel], doc("2 to 10, in order", minItems=2, maxItems=MAX_LEVELS)]

    def __post_init__(self) -> None:
        """Raises ShapeError for another number of levels."""
        if not 2 <= len(self.levels) <= MAX_LEVELS:
            raise ShapeError(f"invalid length {len(self.levels)}, expected 2 to {MAX_LEVELS} levels", "levels")


class DecisionRequest(Struct, kw_only=True):
    """Body of POST /v1/decisions."""

    input: Annotated[str | list[DecisionMessage], Meta(title="DecisionInput"), doc("What the questions are about")]
    questions: Annotated[
        list[PredicateQuestion | ChoiceQuestion | ScoreQuestion], doc("1 to 200", minItems=1, maxItems=MAX_QUESTIONS)
    ]
    model: Annotated[str | None, doc("The served model answers whatever the name, unless it names a LoRA adapter")] = (
        None
    )

    def __post_init__(self) -> None:
        """Raises ShapeError for no or too many questions."""
        check_count(len(self.questions))


class NoulCriteria(Struct):
    """What yes and no mean."""

    true: Any = None
    false: Any = None


class SystemOneQuestionBase(Struct, kw_only=True):
    """What all questions have."""

    instructions: Any = None


class NoulQuestion(SystemOneQuestionBase, tag_field="type", tag="noul", kw_only=True):
    """Yes or no."""

    criteria: NoulCriteria | None = None


class SystemOneChoiceQuestion(SystemOneQuestionBase, tag_field="type", tag="choice", kw_only=True):
    """Which one of several."""

    criteria: Annotated[dict[str, Any], doc("Each option with its description, or null; 1 to 52", minProperties=1)]

    def __post_init__(self) -> None:
        """Raises ShapeError for no option."""
        if not self.criteria:
            raise ShapeError("invalid length 0, expected at least one option", "criteria")


class SystemOneScoreQuestion(SystemOneQuestionBase, tag_field="type", tag="score", kw_only=True):
    """How much, on a scale."""

    criteria: Annotated[list[Any], doc("The levels in order, 1 to 10", minItems=1, maxItems=MAX_LEVELS)]

    def __post_init__(self) -> None:
        """Raises ShapeError for another number of levels."""
        if not 1 <= len(self.criteria) <= MAX_LEVELS:
            raise ShapeError(f"invalid length {len(self.criteria)}, expected 1 to {MAX_LEVELS} levels", "criteria")


class SystemOneRequest(Struct, kw_only=True):
    """Body of POST /v1/systemone."""

    state: Annotated[Any, doc("What the questions are about: text or JSON")]
    questions: Annotated[
        dict[str, NoulQuestion | SystemOneChoiceQuestion | SystemOneScoreQuestion],
        doc("1 to 200, by names", minProperties=1, maxProperties=MAX_QUESTIONS),
    ]
    model: Annotated[str | None, doc("The served model answers whatever the name, unless it names a LoRA adapter")] = (
        None
    )
    instructions: Annotated[str | None, doc("Comes before the state")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Variables for the model's chat template")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError for no or too many questions."""
        check_count(len(self.questions))


def check_count(questions: int) -> None:
    """Raises ShapeError."""
    if not 1 <= questions <= MAX_QUESTIONS:
        raise ShapeError(f"invalid length {questions}, expected 1 to {MAX_QUESTIONS} questions", "questions")


# --- responses --------------------------------------------------------------------------------------------------------


class PredicateAnswer(ResponseBody, tag_field="type", tag="predicate"):
    """How likely it is true."""

    name: str | None
    probability: float


class ChoiceProbability(ResponseBody):
    """Of one choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(ResponseBody, tag_field="type", tag="choice"):
    """The likeliest choice. `confidence`: its probability among all tokens."""

    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class LevelProbability(ResponseBody):
    """Of one level."""

    value: UInt32
    label: str
    probability: float


class ScoreAnswer(ResponseBody, tag_field="type", tag="score"):
    """The expected level, of which the first is 0."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class DecisionInputDetails(ResponseBody):
    """Of the prompts."""

    cached_tokens: UInt32
    cache_write_tokens: UInt32 = 0


class DecisionOutputDetails(ResponseBody):
    """Of the answers."""

    reasoning_tokens: UInt32 = 0


class DecisionUsage(ResponseBody):
    """What was counted. No text is generated."""

    input_tokens: UInt32
    input_tokens_details: DecisionInputDetails
    output_tokens: UInt32
    output_tokens_details: DecisionOutputDetails
    total_tokens: UInt32


class DecisionResponse(ResponseBody):
    """The answers, in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class NoulAnswer(ResponseBody, tag_field="type", tag="noul"):
    """How likely it is yes. `x_label_mass`: the probability of all answers among all tokens."""

    noul: float
    confidence: float
    x_label_mass: float


class SystemOneChoiceAnswer(ResponseBody, tag_field="type", tag="choice"):
    """The likeliest option. `confidence`: its probability among all tokens."""

    choice: str
    confidence: float
    probabilities: dict[str, float]
    x_label_mass: float


class SystemOneScoreAnswer(ResponseBody, tag_field="type", tag="score"):
    """The expected level, of which the first is 0. `legend`: what the levels are."""

    score: float
    confidence: float
    legend: dict[str, Any]
    probabilities: dict[str, float]
    x_label_mass: float


class SystemOneUsage(ResponseBody):
    """What was counted."""

    input_tokens: UInt32
    output_tokens: UInt32 = 0


class SystemOneResponse(ResponseBody):
    """The answers, by the names of the questions."""

    model: str
    answers: dict[str, NoulAnswer | SystemOneChoiceAnswer | SystemOneScoreAnswer]
    usage: SystemOneUsage
