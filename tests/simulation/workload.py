"""Clients: the requests that they send, and the answers that these must get."""

import struct
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.processes import POISON, CallbackEvent, FrontEnd
from tests.tokenizer.vocabularies import byte_level
from tgi.api.clients import Client
from tgi.api.errors import ApiError
from tgi.api.requests import Generation
from tgi.microkernel.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.protocol import FinishReason, Generate
from tgi.microkernel.sampling_params import SamplingParams
from tgi.microkernel.work_register import FINGERPRINT_BYTES
from tgi.worker.fake_worker.fake_tokens import (
    PROMPT_KEY,
    FakeToken,
    fake_prompt_logprob,
    fake_token,
    fake_vocabulary,
    noise_key,
)

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

WORDS = (
    *("the", "sea", "of", "stars", "is", "a", "far", "red", "line,", "and", "one", "bird:", "sings", "there;"),
    *("for", "no", "reason", "at", "all", "but", "its", "own"),
)
PREFIXES = ("", "", "Be short. ", "You are a friendly helper of all who ask. ")
VOCAB_SIZE = 512
IDS = fake_vocabulary(VOCAB_SIZE)
CLIENTS = (Client("a", 1), Client("b", 2), Client("c", 3, weight=4.0), Client("d", 4, priority=1))
MAX_INPUT_WORDS = 9
MAX_NEW_TOKENS = 24
# Seconds until a client tries again after an error of its connection.
RETRY_SECONDS = 0.05


@lru_cache(maxsize=4096)
def encode(text: str) -> tuple[int, ...]:
    """The ids of a prompt."""
    return tuple(byte_level().tokenizer.encode(text).ids)


# --- requests ---------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A request that a client will send, as one or several generations."""

    number: int
    generates: list[Generate]  # one per choice; without rid
    stream: bool
    cancel_after: float | None  # seconds after which the client leaves
    client: Client
    timeout: float | None  # seconds, as in X-Request-Timeout
    poison: str  # the role whose process it kills, or ""

    @property
    def valid(self) -> bool:
        """Whether it is within the limits."""
        return self.generates[0].max_new_tokens is None or self.generates[0].max_new_tokens <= MAX_NEW_TOKENS


def draw_plan(random: Random, number: int, poison_share: float, poison_roles: tuple[str, ...]) -> Plan:
    """A random request."""
    kind = random.random()
    prompt = PREFIXES[int(random.random() * 4)] + " ".join(random.choices(WORDS, k=random.randint(1, MAX_INPUT_WORDS)))
    ids: tuple[int, ...] = ()
    poison = ""
    if random.random() < poison_share:
        poison = random.choice(poison_roles)
        ids = (POISON[poison], *encode(prompt))
    elif kind < 0.05:
        ids = encode(prompt)
    truncate = random.randint(1, 8) if 0.05 < kind < 0.1 and not poison else None
    new = random.randint(1, MAX_NEW_TOKENS) if random.random() < 0.9 else 1
    sampling = SamplingParams(random.randrange(1 << 32), do_sample=random.random() < 0.6)
    if random.random() < 0.1:
        sampling = sampling._replace(top_n=random.randint(1, 4))
    generate = Generate(
        0, "" if ids else prompt, sampling, max_new_tokens=new, truncate=truncate, input_ids=pack_column(INT32, ids),
        hide_stop=random.random() < 0.3,
    )  # fmt: skip
    extra = random.random()
    if extra < 0.08:
        generate = generate._replace(prompt_logprobs_from=0, prompt_top_n=random.choice((0, 1, 2)))
        if extra < 0.02 and not poison:
            generate = generate._replace(max_new_tokens=0)
    elif extra < 0.10:
        generate = generate._replace(max_new_tokens=MAX_NEW_TOKENS * 1000)  # over the limits
    elif extra < 0.2:
        generate = generate._replace(stop_token_ids=pack_column(INT32, random.sample(IDS, 2)))
    elif extra < 0.4:
        text = "".join(byte_level().pieces[one[0]] for one in expected_tokens(generate, new))  # type: ignore[misc]
        begin = random.randrange(len(text))
        stops = [text[begin : begin + random.randint(1, 3)], *random.choices(("zz", "q", "XY", "a"), k=1)]
        generate = generate._replace(stop_strings=stops)
    choices = random.choice((1, 1, 1, 1, 1, 1, 1, 1, 2, 3))
    client = random.choice(CLIENTS)
    generate = generate._replace(client=client.name, weight=client.weight, priority=client.priority)
    generates = [
        generate._replace(
            sampling=sampling._replace(choice=choice),
            fingerprint=(8 * number + choice).to_bytes(FINGERPRINT_BYTES, "big"),
        )
        for choice in range(choices)
    ]
    if generate.stop_strings or poison:
        generates = generates[:1]
    cancel_after = random.expovariate(3.0) if random.random() < 0.1 else None
    timeout = random.expovariate(0.5) if random.random() < 0.05 else None
    return Plan(number, generates, random.random() < 0.7, cancel_after, client, timeout, poison)


# --- expected answers -------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The answer that a generation gets from an undisturbed server."""

    ids: list[int]
    logprobs: bytes  # float32
    tops: list[list[int]]  # ids of the alternatives at each position
    text: str
    reason: FinishReason


def prompt_ids(generate: Generate) -> list[int]:
    """The ids of the prompt of a request."""
    ids = unpack_int32(generate.input_ids) if generate.input_ids else list(encode(generate.inputs))
    return ids if generate.truncate is None else ids[-generate.truncate :]


def expected_tokens(generate: Generate, count: int) -> list[FakeToken]:
    """The first tokens that the fake worker samples, if nothing stops it."""
    noise, top_n = noise_key(generate.sampling), generate.sampling.top_n
    chain = 0
    for token in prompt_ids(generate):
        chain = hash((chain, token))
    tokens = []
    for _ in range(count):
        tokens.append(fake_token(hash((chain, noise)) % (1 << 32), top_n, IDS))
        chain = hash((chain, tokens[-1][0]))
    return tokens


def expected_answer(generate: Generate) -> Expected:
    """The answer of an undisturbed server."""
    assert generate.max_new_tokens is not None
    pieces, stop_ids = byte_level().pieces, frozenset(unpack_int32(generate.stop_token_ids))
    taken: list[FakeToken] = []
    text, reason = "", FinishReason.LENGTH
    for token in expected_tokens(generate, generate.max_new_tokens):
        taken.append(token)
        before = len(text)
        text += pieces[token[0]]  # type: ignore[operator]
        last = len(taken) == generate.max_new_tokens
        found = [(text.find(stop, max(0, before + 1 - len(stop))), stop) for stop in generate.stop_strings]
        begins = [begin for begin, _ in found if begin >= 0]
        if begins and (generate.hide_stop or not last):
            reason = FinishReason.STOP
            text = text[: min(begins)] if generate.hide_stop else text
            break
        if token[0] in stop_ids:
            reason = FinishReason.EOS
            text = text[:before] if generate.hide_stop else text
            break
    ids, logprobs = [token[0] for token in taken], [token[1] for token in taken]
    tops = [[top for top, _ in token[2]] for token in taken]
    return Expected(ids, struct.pack(f"<{len(logprobs)}f", *logprobs), tops, text, reason)


def expected_prompt_logprobs(generate: Generate) -> list[FakeToken]:
    """The logprobs of the prompt from its second token on."""
    ids = prompt_ids(generate)
    chain, found = 0, []
    for token, following in pairwise(ids):
        chain = hash((chain, token))
        number = hash((chain, PROMPT_KEY)) % (1 << 32)
        found.append(fake_prompt_logprob(number, following, generate.prompt_top_n, IDS))
    return found


# --- clients ----------------------------------------------------------------------------------------------------------


class ClientRequest:
    """One request at one front end, from its submission until it has ended or its connection is lost."""

    def __init__(self, workload: "Workload", plan: Plan, front_end: FrontEnd) -> None:
        self.plan = plan
        self.front_end = front_end
        self.began = workload.simulation.clock.now
        self.done = False
        self._workload = workload
        event = CallbackEvent(front_end.loop, self._continue)
        self.generations = [
            Generation(one, plan.stream, event, client=plan.client, timeout=plan.timeout) for one in plan.generates
        ]
        for generation in self.generations:
            workload.simulation.number_generation(generation)
        self._texts = ["" for _ in self.generations]
        self._logprobs = [b"" for _ in self.generations]
        self._tops: list[list[list[int]]] = [[] for _ in self.generations]

    def submit(self) -> None:
        router = self.front_end.router
        assert router is not None
        router.admission.acquire_permits(self.plan.client, len(self.generations))
        for generation in self.generations:
            router.submit(generation)

    def cancel(self) -> None:
        """The client leaves."""
        if not self.done and self.front_end.router is not None:
            self._workload.simulation.trace(self.front_end.name, "client leaves", self.plan.number)
            for generation in self.generations:
                self.front_end.router.cancel(generation)
            self._workload.request_done(self, "cancelled")

    def _continue(self) -> None:
        """The route wakes: tokens or the end have come."""
        if self.done:
            return
        for index, generation in enumerate(self.generations):
            tokens = generation.take_tokens()
            self._texts[index] += "".join(tokens.texts)
            self._logprobs[index] += tokens.logprobs.tobytes()
            self._tops[index] += ([top.id for top in tops] for tops in tokens.tops)
        if all(generation.ended for generation in self.generations):
            self._check_answer()

    def _check_answer(self) -> None:
        simulation, plan = self._workload.simulation, self.plan
        failures = [one.end for one in self.generations if one.failed and one.end is not None]
        if plan.poison:
            outcome = "poisonous" if failures else "a poisonous request has succeeded"
        elif not plan.valid:
            invalid = failures and all(end.reason == FinishReason.INVALID for end in failures)
            outcome = "invalid" if invalid else "a request over the limits was not rejected"
        elif failures and plan.timeout is not None and failures[0].reason == FinishReason.OVERLOADED:
            outcome = "refused"  # it would have waited for longer than its timeout
        elif failures:
            outcome = f"an innocent request failed: {failures[0].reason}: {failures[0].message}"
        else:
            outcome = "exact"
            for index, generation in enumerate(self.generations):
                if difference := self._difference(index, generation):
                    outcome = f"wrong answer: {difference}"
        if outcome not in ("exact", "invalid", "poisonous", "refused"):
            simulation.fail(f"request {plan.number}: {outcome}", self)
        self._workload.request_done(self, outcome)

    def _difference(self, index: int, generation: Generation) -> str:
        """In what the answer differs from that of an undisturbed server, or ""."""
        assert generation.end is not None
        expected, end = expected_answer(generation.message), generation.end
        ids = generation.generated_ids.tolist()
        if ids != expected.ids:
            return f"ids {ids} instead of {expected.ids}"
        if end.reason != expected.reason:
            return f"ended with {end.reason} instead of {expected.reason}"
        if end.text != expected.text or not self._texts[index].startswith(expected.text):
            return f"text {end.text!r}, streamed {self._texts[index]!r}, instead of {expected.text!r}"
        if self._logprobs[index] != expected.logprobs:
            return "logprobs"
        if generation.message.sampling.top_n and self._tops[index] != expected.tops:
            return f"alternatives {self._tops[index]} instead of {expected.tops}"
        if end.generated_tokens != len(ids) or end.prompt_tokens != len(prompt_ids(generation.message)):
            return f"counts of tokens: {end}"
        if generation.message.prompt_logprobs_from is not None:
            prompt = generation.prompt_columns
            wanted = expected_prompt_logprobs(generation.message)
            if prompt.ids.tolist() != prompt_ids(generation.message):
                return f"prompt ids {prompt.ids.tolist()}"
            if prompt.logprobs.tolist()[1:] != [logprob for _, logprob, _ in wanted]:
                return "prompt logprobs"
            if [len(tops) for tops in prompt.tops[1:]] != [len({top for top, _ in tops}) for _, _, tops in wanted]:
                return "alternatives of the prompt"
        return ""


class Workload:
    """All clients. Each sends one request after another, at any front end that accepts it."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.random = Random(f"workload {simulation.config.seed}")
        self.outcomes: dict[str, int] = {}
        self.longest_seconds = 0.0
        self.latest_end = 0.0
        self.active: dict[ClientRequest, None] = {}
        self._planned = 0
        self._finished = 0

    @property
    def finished(self) -> bool:
        """Whether all requests have ended."""
        return self._finished >= self.simulation.config.requests

    def start(self) -> None:
        for _ in range(self.simulation.config.clients):
            self._send_later()

    def _send_later(self) -> None:
        if self._planned < self.simulation.config.requests:
            self._planned += 1
            config = self.simulation.config
            plan = draw_plan(self.random, self._planned, config.poison_share, config.poison_roles)
            self.simulation.clock.after(self.random.expovariate(1 / config.think_seconds), self._send, plan)

    def _send(self, plan: Plan) -> None:
        accepting = [one for one in self.simulation.front_ends if one.accepting and not one.stopped]
        if not accepting:
            self.simulation.clock.after(RETRY_SECONDS, self._send, plan)
            return
        front_end = self.random.choice(accepting)
        request = ClientRequest(self, plan, front_end)
        self.active[request] = None
        self.simulation.trace(front_end.name, "request", plan.number, plan.poison, plan.generates[0])
        front_end.run_code(lambda: self._submit(request))
        for seconds in (plan.cancel_after, plan.timeout):
            if seconds is not None:
                self.simulation.clock.after(seconds, self._cancel, request)

    def _submit(self, request: ClientRequest) -> None:
        try:
            request.submit()
        except ApiError as error:
            self.simulation.fail(f"request {request.plan.number} was refused: {error.message}", request)

    def _cancel(self, request: ClientRequest) -> None:
        if not request.done and not request.front_end.stopped:
            request.front_end.run_code(request.cancel)

    def front_end_lost(self, front_end: FrontEnd) -> None:
        """The connections of its clients break."""
        for request in [one for one in self.active if one.front_end is front_end]:
            self.request_done(request, "connection lost")

    def request_done(self, request: ClientRequest, outcome: str) -> None:
        request.done = True
        del self.active[request]
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.longest_seconds = max(self.longest_seconds, self.simulation.clock.now - request.began)
        self.latest_end = self.simulation.clock.now
        self._finished += 1
        self._send_later()
