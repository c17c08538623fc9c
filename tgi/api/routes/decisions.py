"""POST /v1/decisions and /v1/systemone: typed answers with probabilities, from the scores of one token.

Each question is a chat that lists its options with a label each, a letter or a digit, and one request for the logprobs
of these labels as the next token. All questions of an HTTP request begin with the same text, which the prefix cache
finds. No text is generated.
"""

import json
import string
from collections.abc import Sequence
from math import exp
from typing import Any, NamedTuple

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.chat_prompt import ToolSelection, chat_prompt_json
from tgi.api.generation import (
    FinishedGeneration,
    PromptInput,
    complete_generations,
    create_generations,
    record_finished,
)
from tgi.api.json_body import JsonBody
from tgi.api.rejected_fields import DECISIONS_FIELDS, SYSTEMONE_FIELDS, FieldChecker
from tgi.api.request_parameters import RequestedSampling
from tgi.api.requests import Generation
from tgi.api.service import Resource, answer_json
from tgi.api.shapes import decisions as shapes
from tgi.api.shapes.chat import ChatRequest, Message
from tgi.api.shapes.native import GenerateParameters

LETTERS = string.ascii_uppercase + string.ascii_lowercase
# Questions that are asked at once: each is a text of its own in a message.
MAX_AT_ONCE = 8


class LabelledQuestion(NamedTuple):
    """A question with a label for each option, as the model reads it."""

    instructions: str
    options: Sequence[tuple[str, str]]  # what it is, and its description
    labels: str

    @property
    def text(self) -> str:
        """The question, its options, and how to answer."""
        head = [f"Question: {self.instructions}"] if self.instructions else []
        lines = [
            f"{label}: {what} - {description}" if description else f"{label}: {what}"
            for label, (what, description) in zip(self.labels, self.options, strict=True)
        ]
        kind = "number of one level" if self.labels[0].isdigit() else "letter of one option"
        return "\n".join([*head, *lines, f"Answer with the {kind} only."])


class LabelProbabilities(NamedTuple):
    """What the model would answer."""

    values: list[float]  # of each option among the options
    mass: float  # of all labels among all tokens
    prompt_tokens: int
    cached_tokens: int

    @property
    def best(self) -> int:
        """The likeliest option."""
        return max(range(len(self.values)), key=self.values.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the likeliest option among all tokens."""
        return self.values[self.best] * self.mass

    @property
    def expected(self) -> float:
        """The mean of the options' numbers."""
        return sum(number * value for number, value in enumerate(self.values))


class LabelResource(Resource):
    """What both routes share."""

    async def _answers(
        self,
        req: Request,
        subject: str,
        questions: Sequence[LabelledQuestion],
        model: str | None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[LabelProbabilities]:
        """Asks the model. Raises ApiError as create_generations and complete_generations, and 422 where no answer can
        begin with a label."""
        request_metrics.count_request(req)
        service, generations = self._service, list[Generation]()
        adapter = model if model in service.router.adapters else None
        parameters = GenerateParameters(max_new_tokens=1, adapter_id=adapter)
        sampling = RequestedSampling({"do_sample": False, "top_n": 1}, least_top_n_limit=1)
        for begin in range(0, len(questions), MAX_AT_ONCE):
            asked = questions[begin : begin + MAX_AT_ONCE]
            prompts = []
            for question in asked:
                chat = ChatRequest(
                    messages=[Message("user", f"{subject}\n\n{question.text}")], reasoning_effort="none",
                    add_generation_prompt=True, chat_template_kwargs=kwargs,
                )  # fmt: skip
                prompts.append(PromptInput("", chat_prompt_json(chat, ToolSelection())))
            made = create_generations(
                service, req, prompts, parameters, stream=False, sampling=sampling, hide_stop=True
            )
            for question, generation in zip(asked, made, strict=True):
                generation.message = generation.message._replace(listed_texts=[*question.labels])
            await complete_generations(service, req, made)
            generations += made
        return [_probabilities(*one) for one in zip(questions, record_finished(generations), strict=True)]

    def _model(self, model: str | None) -> str:
        service = self._service
        return model if model is not None and model in service.router.adapters else service.model_id


def _probabilities(question: LabelledQuestion, finished: FinishedGeneration) -> LabelProbabilities:
    """From the logprobs of the labels, of each of which several tokens may have the text."""
    (listed,) = finished.generation.take_tokens().tops
    highest = max(token.logprob for token in listed)
    weights = dict.fromkeys(question.labels, 0.0)
    for token in listed:
        weights[token.text] += exp(token.logprob - highest)
    total = sum(weights.values())
    values = [weight / total for weight in weights.values()]
    mass = min(1.0, total * exp(highest))
    return LabelProbabilities(values, mass, finished.end.prompt_tokens, finished.end.cached_tokens)


def _labels(count: int, field: str) -> str:
    """This number of labels of options. Raises ApiError: 422."""
    if count > len(LETTERS):
        raise errors.validation_error(f"a choice has at most {len(LETTERS)} options. Given: {count}", param=field)
    return LETTERS[:count]


class DecisionsResource(LabelResource):
    """POST /v1/decisions."""

    body = JsonBody(shapes.DecisionRequest, FieldChecker(shapes.DecisionRequest, DECISIONS_FIELDS).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        questions = [_labelled(index, question) for index, question in enumerate(request.questions)]
        found = await self._answers(req, _input_text(request.input), questions, request.model)
        answers = [_decision(*one) for one in zip(request.questions, found, strict=True)]
        tokens = sum(one.prompt_tokens for one in found)
        details = shapes.DecisionInputDetails(sum(one.cached_tokens for one in found))
        usage = shapes.DecisionUsage(tokens, details, 0, shapes.DecisionOutputDetails(), tokens)
        answer_json(resp, shapes.DecisionResponse(self._model(request.model), answers, usage))


def _input_text(given: str | list[shapes.DecisionMessage]) -> str:
    if isinstance(given, str):
        return given
    contents = (one.content for one in given)
    return "\n\n".join(one if isinstance(one, str) else "\n".join(part.text for part in one) for one in contents)


def _labelled(
    index: int, question: shapes.PredicateQuestion | shapes.ChoiceQuestion | shapes.ScoreQuestion
) -> LabelledQuestion:
    match question:
        case shapes.PredicateQuestion():
            return LabelledQuestion(question.instructions, [("false", ""), ("true", "")], LETTERS[:2])
        case shapes.ChoiceQuestion():
            options = [(json.dumps(one.value, ensure_ascii=False), one.description) for one in question.choices]
            field = f"questions[{index}].choices"
            if len({value for value, _ in options}) < len(options):
                raise errors.validation_error("the values of the choices must differ", param=field)
            labels = _labels(len(options), field)
            return LabelledQuestion(question.instructions, options, labels)
        case shapes.ScoreQuestion():
            levels = [(one.label, one.description) for one in question.levels]
            return LabelledQuestion(question.instructions, levels, string.digits[: len(levels)])


def _decision(
    question: shapes.PredicateQuestion | shapes.ChoiceQuestion | shapes.ScoreQuestion, found: LabelProbabilities
) -> shapes.PredicateAnswer | shapes.ChoiceAnswer | shapes.ScoreAnswer:
    match question:
        case shapes.PredicateQuestion():
            return shapes.PredicateAnswer(question.name, found.values[1])
        case shapes.ChoiceQuestion():
            choices = [
                shapes.ChoiceProbability(one.value, value)
                for one, value in zip(question.choices, found.values, strict=True)
            ]
            best = question.choices[found.best].value
            return shapes.ChoiceAnswer(question.name, best, choices, found.confidence)
        case shapes.ScoreQuestion():
            levels = [
                shapes.LevelProbability(number, level.label, found.values[number])
                for number, level in enumerate(question.levels)
            ]
            return shapes.ScoreAnswer(question.name, found.expected, levels, found.confidence)


class SystemOneResource(LabelResource):
    """POST /v1/systemone."""

    body = JsonBody(shapes.SystemOneRequest, FieldChecker(shapes.SystemOneRequest, SYSTEMONE_FIELDS).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        questions = [_system_one_labelled(name, question) for name, question in request.questions.items()]
        subject = "\n\n".join(filter(None, [request.instructions, _said(request.state)]))
        found = await self._answers(req, subject, questions, request.model, request.chat_template_kwargs)
        answers = {
            name: _system_one_answer(question, one)
            for (name, question), one in zip(request.questions.items(), found, strict=True)
        }
        usage = shapes.SystemOneUsage(sum(one.prompt_tokens for one in found))
        answer_json(resp, shapes.SystemOneResponse(self._model(request.model), answers, usage))


SystemOneQuestion = shapes.NoulQuestion | shapes.SystemOneChoiceQuestion | shapes.SystemOneScoreQuestion


def _system_one_labelled(name: str, question: SystemOneQuestion) -> LabelledQuestion:
    instructions = _said(question.instructions)
    match question:
        case shapes.NoulQuestion():
            criteria = question.criteria or shapes.NoulCriteria()
            options = [("yes", _said(criteria.true)), ("no", _said(criteria.false))]
            return LabelledQuestion(instructions, options, LETTERS[:2])
        case shapes.SystemOneChoiceQuestion():
            options = [(option, _said(description)) for option, description in question.criteria.items()]
            return LabelledQuestion(instructions, options, _labels(len(options), f"questions.{name[:64]}.criteria"))
        case shapes.SystemOneScoreQuestion():
            levels = [(_said(level), "") for level in question.criteria]
            return LabelledQuestion(instructions, levels, string.digits[: len(levels)])


def _system_one_answer(
    question: SystemOneQuestion, found: LabelProbabilities
) -> shapes.NoulAnswer | shapes.SystemOneChoiceAnswer | shapes.SystemOneScoreAnswer:
    match question:
        case shapes.NoulQuestion():
            return shapes.NoulAnswer(found.values[0], found.confidence, found.mass)
        case shapes.SystemOneChoiceQuestion():
            options = [*question.criteria]
            probabilities = dict(zip(options, found.values, strict=True))
            return shapes.SystemOneChoiceAnswer(options[found.best], found.confidence, probabilities, found.mass)
        case shapes.SystemOneScoreQuestion():
            legend = {str(number): level for number, level in enumerate(question.criteria)}
            probabilities = dict(zip(legend, found.values, strict=True))
            return shapes.SystemOneScoreAnswer(found.expected, found.confidence, legend, probabilities, found.mass)


def _said(value: Any) -> str:
    """A text, or JSON, as the model reads it."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
