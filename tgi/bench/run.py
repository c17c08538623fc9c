"""The levels of a benchmark, one after the other: closed loops of some clients, and Poisson arrivals at a rate."""

import asyncio
import itertools
import json
import random
import resource
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from tgi import __version__
from tgi.bench.apis import APIS, Answer, Api, Message
from tgi.bench.figures import Objectives, Request, level_figures
from tgi.bench.live import View
from tgi.bench.stream import BadStream, Meter, Origin, Stream, body_of, send
from tgi.bench.workload import WORDS, Conversation, Shape, conversations, read_file
from tgi.microkernel.errors import UserError

# Words of the two requests whose difference tells the words of a token.
FEW_WORDS, MANY_WORDS = 16, 272
WORDS_PER_TOKEN = 0.75  # of a server that does not tell the tokens of its prompts
TOKENS_PER_CHARACTER = 0.25
MAX_WARM_UP = 16
RATE_SECONDS = 30  # of a level with a rate, by default
VIEW_SECONDS = 0.25
FIRST_SECONDS = 30.0  # for the list of models
FAILURES_IN_A_ROW = 200  # of a closed loop: then the level ends


class Level(NamedTuple):
    """A closed loop of `concurrency` clients, each of which sends its next request when one is answered; or arrivals of
    a Poisson process with `rate` conversations per second."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g}/s"


class Plan(NamedTuple):
    """What is measured."""

    url: str
    api: str | None  # of APIS; None: chat if the server lists models, else tgi
    models: tuple[str, ...]  # in turn; empty: the first one that the server lists
    key: str | None
    shape: Shape
    file: Path | None
    levels: tuple[Level, ...]
    requests: int | None  # of a level; None: by its load
    warm_up: int | None
    seed: int
    timeout: float  # seconds of a request
    objectives: Objectives | None


class Target(NamedTuple):
    """A server and how it is asked."""

    origin: Origin
    api: Api
    models: tuple[str, ...]
    meter: Meter
    timeout: float
    extra: dict[str, Any]  # members of each body

    async def ask(self, model: str, messages: list[Message], tokens: int) -> Stream:
        """Sends one request. Raises OSError and TimeoutError."""
        body = self.api.body(model, messages, tokens) | self.extra
        return await send(self.origin, self.api.path, body, self.meter, self.timeout)


def run(plan: Plan, view: View) -> dict[str, Any]:
    """Measures all levels. Returns the result as it stands in a JSON file; after Ctrl-C, with the levels that ended.

    Raises UserError if the server cannot be asked at all.
    """
    result: dict[str, Any] = {"tgi bench": __version__, "url": plan.url, "levels": []}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_run(plan, view, result))
        except KeyboardInterrupt:
            result["interrupted"] = True
    return result


async def _run(plan: Plan, view: View, result: dict[str, Any]) -> None:
    target = await find_target(plan)
    target, words_per_token, notes = await calibrate(target)
    shape = plan.shape
    result |= {
        "api": target.api.path,
        "models": list(target.models),
        "workload": str(plan.file) if plan.file else shape._asdict(),
        "slo": plan.objectives._asdict() if plan.objectives else None,
        "notes": notes,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if plan.file is not None:
        asked = read_file(plan.file, shape.output_tokens, TOKENS_PER_CHARACTER)
        random.Random(plan.seed).shuffle(asked)
        source: Iterator[Conversation] = itertools.cycle(asked)
    for number, level in enumerate(plan.levels):
        if plan.file is None:
            source = conversations(shape, words_per_token, plan.seed + number)
        warm_up = min(level.concurrency or 8, MAX_WARM_UP) if plan.warm_up is None else plan.warm_up
        if warm_up:
            first = conversations(Shape(64, 16), words_per_token, (plan.seed + number) ^ 0x5EED)
            await Load(target, first, warm_up).closed_loop(warm_up)
        wanted = plan.requests or max(20, 10 * level.concurrency, round(RATE_SECONDS * level.rate))
        load = Load(target, source, wanted)
        view.begin(str(level), wanted)
        showing = asyncio.create_task(_show(view, load))
        before = _cpu_seconds()
        try:
            await (load.closed_loop(level.concurrency) if level.concurrency else load.poisson(level.rate, plan.seed))
        finally:
            showing.cancel()
        spent = _cpu_seconds() - before
        figures = level_figures(load.requests(), spent, plan.objectives)
        result["levels"].append({"concurrency": level.concurrency, "rate": level.rate} | figures)
        view.end(figures)
        if load.first_failure:
            notes.append(f"{level}: {load.first_failure}")


async def _show(view: View, load: "Load") -> None:
    while True:
        await asyncio.sleep(VIEW_SECONDS)
        view.update(load.ended, load.failed, load.target.meter.events)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Load:
    """The requests of one level."""

    def __init__(self, target: Target, source: Iterator[Conversation], wanted: int) -> None:
        self.target = target
        self.ended = self.failed = 0
        self.first_failure = ""
        self._source, self._wanted = source, wanted
        self._models = itertools.cycle(target.models)
        self._begun = 0
        self._failures_in_a_row = 0
        # Streams are parsed at the end of the level, but in conversations, whose next turn needs the answer.
        self._found: list[Request | Stream] = []
        target.meter.events = 0

    def requests(self) -> list[Request]:
        """All that were sent, parsed."""
        return [one if isinstance(one, Request) else self._parse(one) for one in self._found]

    async def closed_loop(self, clients: int) -> None:
        """Each client sends the turns of a conversation after each other, then those of the next one."""

        async def client() -> None:
            while self._begun < self._wanted and self._failures_in_a_row < FAILURES_IN_A_ROW:
                await self._converse(next(self._source))

        await asyncio.gather(*(client() for _ in range(clients)))

    async def poisson(self, rate: float, seed: int) -> None:
        """Conversations begin independently of the answers."""
        draw, tasks = random.Random(seed), []
        at = time.perf_counter()
        while self._begun < self._wanted:
            at += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(self._converse(next(self._source))))
            await asyncio.sleep(0)  # it counts its first request
        await asyncio.gather(*tasks)

    async def _converse(self, conversation: Conversation) -> None:
        model = next(self._models)
        messages = [Message("system", conversation.system)] if conversation.system else []
        for number, turn in enumerate(conversation.turns):
            if self._begun >= self._wanted and number:
                return
            self._begun += 1
            messages.append(Message("user", turn.text))
            sent = time.perf_counter()
            try:
                stream = await self.target.ask(model, messages, turn.output_tokens)
            except (OSError, TimeoutError) as error:
                self._record(Request(sent, time.perf_counter(), None, _kind(error)), str(error))
                return
            if number + 1 == len(conversation.turns):
                self._record(stream)
                return
            request = self._parse(stream)
            self._record(request)
            if request.answer is None:
                return
            messages.append(Message("assistant", request.answer.text))

    def _record(self, one: Request | Stream, reason: str = "") -> None:
        self.ended += 1
        self._found.append(one)
        bad = isinstance(one, Request) and one.failure
        if isinstance(one, Stream) and not one.reads:
            bad = "no answer"
        self._failures_in_a_row = self._failures_in_a_row + 1 if bad else 0
        if bad:
            self.failed += 1
            self.first_failure = self.first_failure or f"{bad} {reason}".strip()

    def _parse(self, stream: Stream) -> Request:
        try:
            answer = self.target.api.read(stream.events())
            if not answer.times:
                raise BadStream("a stream without a token", "no token")
        except (BadStream, ValueError, LookupError, AttributeError, TypeError) as error:
            kind = error.kind if isinstance(error, BadStream) else "bad event"
            self.first_failure = self.first_failure or f"{kind}: {error}"[:500]
            return Request(stream.sent, stream.ended, None, kind)
        return Request(stream.sent, stream.ended, answer)


def _kind(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "TLS error" if isinstance(error, ssl.SSLError) else "connection lost"


# --- what is asked before the measurement ---


async def find_target(plan: Plan) -> Target:
    """The server of a plan, with the API and models that the plan leaves open. Raises UserError."""
    headers = {"authorization": f"Bearer {plan.key}"} if plan.key else {}
    origin = Origin(plan.url, headers)
    meter = Meter()
    try:
        status, body = body_of(await send(origin, "/v1/models", None, meter, min(plan.timeout, FIRST_SECONDS)))
    except ssl.SSLError as error:
        raise UserError(f"No TLS connection to {plan.url}: {error}. Is it https?") from error
    except (OSError, TimeoutError, BadStream) as error:
        reason = str(error) or _kind(error)
        raise UserError(f"No server answers at {plan.url}: {reason}. Is it running there?") from error
    if status in (401, 403):
        raise UserError(f"{plan.url} answers {status}: it needs a key. Give --api-key, or OPENAI_API_KEY.")
    models = plan.models or (_listed(body)[:1] if status == 200 else ())
    name = plan.api or ("chat" if models else "tgi")
    return Target(origin, APIS[name], models or ("tgi",), meter, plan.timeout, {})


def _listed(body: bytes) -> tuple[str, ...]:
    try:
        return tuple(str(one["id"]) for one in json.loads(body)["data"])
    except (ValueError, LookupError, TypeError):
        return ()


async def calibrate(target: Target) -> tuple[Target, float, list[str]]:
    """Sends two short requests. Returns the target with the members that hold the length of answers, if the server
    knows them; the words that make a token; and notes for the result. Raises UserError if none is answered."""
    notes: list[str] = []
    held = target._replace(extra=target.api.held)
    try:
        try:
            few = await _answer(held, FEW_WORDS)
            target = held
        except BadStream:
            if not held.extra:
                raise
            few = await _answer(target, FEW_WORDS)
            notes.append("the server does not know ignore_eos: answers may end before --output-tokens")
        many = await _answer(target, MANY_WORDS)
    except BadStream as error:
        raise UserError(f"The first request to {target.api.path} was answered with {error}") from error
    if few.input_tokens is None or many.input_tokens is None or many.input_tokens <= few.input_tokens:
        notes.append(f"the server does not tell the tokens of prompts: {WORDS_PER_TOKEN:g} words are taken for one")
        return target, WORDS_PER_TOKEN, notes
    return target, (MANY_WORDS - FEW_WORDS) / (many.input_tokens - few.input_tokens), notes


async def _answer(target: Target, words: int) -> Answer:
    """Raises BadStream, and UserError if there is no answer."""
    text = " ".join(itertools.islice(itertools.cycle(WORDS), words))
    try:
        stream = await target.ask(target.models[0], [Message("user", text)], 4)
    except (OSError, TimeoutError) as error:
        raise UserError(f"The first request to {target.api.path} has failed: {_kind(error)} {error}".strip()) from error
    return target.api.read(stream.events())
