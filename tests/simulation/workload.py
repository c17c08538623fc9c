"""Clients: the requests that they send, and the answers that these must get."""

import json
import struct
from functools import cache, lru_cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.processes import (
    ADAPTERS,
    CHATS,
    INVALID_GRAMMAR,
    POISON,
    SETTINGS_ADAPTERS,
    CallbackEvent,
    FrontEnd,
)
from tests.tokenizer.vocabularies import byte_level
from tgi.api.clients import Client
from tgi.api.errors import ApiError
from tgi.api.requests import AdapterUpdateRequest, Generation, TokenizationRequest
from tgi.api.router import Router
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    DETACHED,
    End,
    FinishReason,
    Generate,
    RequestContext,
    Tokenize,
    UpdateAdapter,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.recovery.work_register import FINGERPRINT_BYTES
from tgi.worker.fake_worker.fake_tokens import (
    PROMPT_KEY,
    FakeToken,
    fake_prompt_logprob,
    fake_token,
    fake_vocabulary,
    noise_key,
)
from tgi.worker.lora.registry import adapter_digest

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation, SimulationConfig

WORDS = (
    *("the", "sea", "of", "stars", "is", "a", "far", "red", "line,", "and", "one", "bird:", "sings", "there;"),
    *("for", "no", "reason", "at", "all", "but", "its", "own"),
)
PREFIXES = ("", "", "Be short. ", "You are a friendly helper of all who ask. ")
VOCAB_SIZE = 512
IDS = fake_vocabulary(VOCAB_SIZE)
CLIENTS = (
    *(Client("a", 1), Client("b", 2), Client("c", 3, weight=4.0), Client("d", 4, priority=1)),
    Client("limited", 5, requests=4),
)
CLIENT_SHARES = (4, 4, 4, 4, 1)
LIGHT_CLIENT = Client("light", 6)  # has one request at a time
# Adapters that clients load: the first is also unloaded, the other one stays.
CHANGING_ADAPTER, ADDED_ADAPTER = CLIENT_ADAPTERS = ("green", "violet")
# After the answer to its load all tokenizers know an adapter within this time.
ADAPTER_KNOWN_SECONDS = 5.0
# The error of an adapter that cannot be read for a while.
UNREADABLE = "the files cannot be read now"
MAX_INPUT_WORDS = 9
MAX_NEW_TOKENS = 24
# Most requests are short: more happens in the same number of steps.
MAX_LENGTHS = (4, 8, MAX_NEW_TOKENS)
TOKENIZE_SHARE = 0.04
RESUME_WINDOW_MS = 5000
# Pauses of clients that come back, within the window and beyond it.
RESUME_SECONDS = (0.0, 0.3, 2.0, 8.0)
# Seconds until a client tries again after a 429.
NO_PERMIT_SECONDS = 1.0
GOOD_OUTCOMES = frozenset(
    ("exact", "invalid", "poisonous", "refused", "without adapter", "tokenized", "adapter updated", "adapter refused")
)
# Seconds until a client tries again after an error of its connection.
RETRY_SECONDS = 0.05


@lru_cache(maxsize=4096)
def encode(text: str) -> tuple[int, ...]:
    """The ids of a prompt."""
    return tuple(byte_level().tokenizer.encode(text).ids)


# --- requests ---------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A request that a client will send: as one or several generations, a Tokenize, or an update of an adapter."""

    number: int
    client: Client
    generates: list[Generate] = []  # one per choice; without rid
    tokenize: Tokenize | None = None
    update: UpdateAdapter | None = None
    stream: bool = False
    cancel_after: float | None = None  # seconds after which the client leaves
    resumes: bool = False  # it comes back if it has left, or if its front end is lost
    timeout: float | None = None  # seconds, as in X-Request-Timeout
    poison: str = ""  # the role whose process it kills, or ""

    @property
    def valid(self) -> bool:
        """Whether it is within the limits, and its grammar is valid."""
        generate = self.generates[0]
        too_long = generate.max_new_tokens is not None and generate.max_new_tokens > MAX_NEW_TOKENS
        return not too_long and generate.grammar != INVALID_GRAMMAR

    @property
    def adapter(self) -> str:
        """The name of the adapter that it asks for."""
        return self.generates[0].sampling.adapter


def draw_plan(random: Random, number: int, client: Client, config: "SimulationConfig") -> Plan:
    """A random request."""
    if random.random() < config.adapter_share:
        name = random.choice(CLIENT_ADAPTERS)
        loads = name == ADDED_ADAPTER or random.random() < 0.6
        return Plan(number, client, update=UpdateAdapter(0, name, str(ADAPTERS / name) if loads else ""))
    if random.random() < TOKENIZE_SHARE:
        return Plan(
            number, client, tokenize=Tokenize(0, draw_prompt(random), context=RequestContext(client=client.name))
        )
    kind = random.random()
    prompt = draw_prompt(random)
    ids: tuple[int, ...] = ()
    chat = b""
    poison = ""
    if random.random() < config.poison_share:
        poison = random.choice(config.poison_roles)
        ids = (POISON[poison], *encode(prompt))
    elif kind < 0.05:
        ids = encode(prompt)
    elif kind > 0.9:
        chat = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    truncate = random.randint(1, 8) if 0.05 < kind < 0.1 and not poison else None
    new = random.randint(1, random.choice(MAX_LENGTHS))
    sampling = SamplingParams(random.randrange(1 << 32), do_sample=random.random() < 0.6)
    if random.random() < 0.1:
        sampling = sampling._replace(top_n=random.randint(1, 4))
    if random.random() < 0.15 and not poison:
        sampling = sampling._replace(adapter=random.choice((*SETTINGS_ADAPTERS, *CLIENT_ADAPTERS)))
    grammar = b""
    if random.random() < 0.1 and not poison:
        grammar = INVALID_GRAMMAR if random.random() < 0.1 else b"grammar %d" % random.randrange(100)
    generate = Generate(
        0, "" if ids or chat else prompt, sampling, max_new_tokens=new, truncate=truncate, chat=chat, grammar=grammar,
        input_ids=pack_column(INT32, ids), hide_stop=random.random() < 0.3,
    )  # fmt: skip
    context = RequestContext(
        request_key=number, client=client.name, weight=client.weight, priority=client.priority
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
    if generate.stop_strings or poison:
        choices = 1
    resumes = random.random() < 0.1
    window_ms = RESUME_WINDOW_MS if resumes else 0
    generates = [
        generate._replace(
            sampling=sampling._replace(choice=choice),
            context=context._replace(
                fingerprint=(name := (8 * number + choice).to_bytes(FINGERPRINT_BYTES, "big")), request_index=choice
            ),
            resume_key=name if resumes else b"",
            resume_window_ms=window_ms,
        )
        for choice in range(choices)
    ]
    return Plan(
        number,
        client,
        generates,
        stream=random.random() < 0.7,
        cancel_after=random.expovariate(3.0) if random.random() < (0.5 if resumes else 0.1) else None,
        resumes=resumes,
        timeout=random.expovariate(0.5) if random.random() < 0.05 and not resumes else None,
        poison=poison,
    )


def draw_prompt(random: Random) -> str:
    """A random text."""
    return PREFIXES[int(random.random() * 4)] + " ".join(random.choices(WORDS, k=random.randint(1, MAX_INPUT_WORDS)))


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
    if generate.input_ids:
        ids = unpack_int32(generate.input_ids)
    else:
        ids = [*encode(CHATS.render_chat(generate.chat).text if generate.chat else generate.inputs)]
    return ids if generate.truncate is None else ids[-generate.truncate :]


def first_chain(generate: Generate) -> int:
    """The chain of the fake worker before the first token."""
    adapter = generate.sampling.adapter
    return int.from_bytes(digest_of(adapter)) if adapter else 0


@cache
def digest_of(adapter: str) -> bytes:
    """The digest of an adapter."""
    return adapter_digest(ADAPTERS / adapter)


def worker_sampling(generate: Generate) -> SamplingParams:
    """The sampling parameters as the worker gets them."""
    return generate.sampling._replace(grammar=f"compiled {generate.grammar.decode()}" if generate.grammar else "")


def expected_tokens(generate: Generate, count: int) -> list[FakeToken]:
    """The first tokens that the fake worker samples, if nothing stops it."""
    noise, top_n = noise_key(worker_sampling(generate)), generate.sampling.top_n
    chain = first_chain(generate)
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
    chain, found = first_chain(generate), []
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

    @property
    def permits(self) -> int:
        """The permits that it holds."""
        return 0

    def submit(self) -> None:
        """Sends it to the router. Raises ApiError."""
        raise NotImplementedError

    def leave(self) -> str:
        """The client leaves. Returns the outcome."""
        raise NotImplementedError

    def lose_front_end(self) -> None:
        """Checks what the client has got of the answer when its front end dies."""

    @property
    def _router(self) -> Router:
        assert self.front_end.router is not None
        return self.front_end.router

    def _end(self, outcome: str) -> None:
        if outcome not in GOOD_OUTCOMES:
            self._workload.simulation.fail(f"request {self.plan.number}: {outcome}", self)
        self._workload.request_done(self, outcome)


class TokenizationClient(ClientRequest):
    """A request of /tokenize."""

    def submit(self) -> None:
        asked = self.plan.tokenize
        assert asked is not None
        event = CallbackEvent(self.front_end.loop, self._continue)
        self._request = TokenizationRequest(event, asked.inputs, asked.add_special_tokens, context=asked.context)
        self._router.submit(self._request)

    def leave(self) -> str:
        self._router.cancel(self._request)
        return "cancelled"

    def _continue(self) -> None:
        if self.done or (result := self._request.result) is None:
            return
        assert self.plan.tokenize is not None
        expected = [*encode(self.plan.tokenize.inputs)]
        exact = not result.error and unpack_int32(result.token_ids) == expected
        self._end("tokenized" if exact else f"{result} instead of the ids {expected}")


class AdapterClient(ClientRequest):
    """A request that loads or unloads an adapter."""

    def submit(self) -> None:
        asked = self.plan.update
        assert asked is not None
        event = CallbackEvent(self.front_end.loop, self._continue)
        self._request = AdapterUpdateRequest(event, asked.name, asked.path)
        self._router.submit(self._request)

    def leave(self) -> str:
        self._router.cancel(self._request)
        return "cancelled"

    def _continue(self) -> None:
        if not self.done and (result := self._request.result) is not None:
            if result.error == UNREADABLE:
                self._end("adapter refused")
                return
            if self._request.name == ADDED_ADAPTER:
                self._workload.adapter_added()
            self._end("adapter updated" if not result.error else f"the adapter was not updated: {result.error}")


class GenerationClient(ClientRequest):
    """A request that generates."""

    def __init__(self, workload: "Workload", plan: Plan, front_end: FrontEnd) -> None:
        super().__init__(workload, plan, front_end)
        event = CallbackEvent(front_end.loop, self._continue)
        self.generations = [
            Generation(one, plan.stream, event, client=plan.client, timeout=plan.timeout) for one in plan.generates
        ]
        self._texts = ["" for _ in self.generations]
        self._logprobs = [b"" for _ in self.generations]
        self._tops: list[list[list[int]]] = [[] for _ in self.generations]

    @property
    def permits(self) -> int:
        return sum(generation.active for generation in self.generations)

    def submit(self) -> None:
        self._router.admission.acquire_permits(self.plan.client, len(self.generations))
        for generation in self.generations:
            self._router.submit(generation)

    def leave(self) -> str:
        for generation in self.generations:
            self._router.cancel(generation, client_lost=self.plan.resumes)
        self._check_beginning()
        return "left" if self.plan.resumes else "cancelled"

    def lose_front_end(self) -> None:
        self._check_beginning()

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

    def _check_beginning(self) -> None:
        """What a client gets before it is lost is the beginning of the exact answer."""
        for generation in self.generations:
            ids = generation.generated_ids.tolist()
            if ids and not self.plan.poison and ids != expected_answer(generation.message).ids[: len(ids)]:
                self._workload.simulation.fail(f"request {self.plan.number}: the answer began with {ids}", self)

    def _check_answer(self) -> None:
        plan = self.plan
        failures = [one.end for one in self.generations if one.failed and one.end is not None]
        if plan.poison:
            outcome = "poisonous" if failures else "a poisonous request has succeeded"
        elif not plan.valid:
            invalid = failures and all(end.reason == FinishReason.INVALID for end in failures)
            outcome = "invalid" if invalid else "a request over the limits was not rejected"
        elif failures and plan.timeout is not None and failures[0].reason == FinishReason.OVERLOADED:
            outcome = "refused"  # it would have waited for longer than its timeout
        elif failures and is_missing_adapter(failures[0]) and self._may_lack_adapter():
            outcome = "without adapter"
        elif failures and failures[0].message == DETACHED:
            # An earlier submission came late, from a front end that the client has left, and took the stream over.
            self._workload.connection_lost(self, self.leave())
            return
        elif failures:
            outcome = f"an innocent request failed: {failures[0].reason}: {failures[0].message}"
        else:
            outcome = "exact"
            for index, generation in enumerate(self.generations):
                if difference := self._difference(index, generation):
                    outcome = f"wrong answer: {difference}"
        self._end(outcome)

    def _may_lack_adapter(self) -> bool:
        adapter, added_at = self.plan.adapter, self._workload.adapter_added_at
        if adapter == ADDED_ADAPTER:
            if added_at is None:
                return True
            return self.began < max(added_at, self._workload.adapter_absent_at) + ADAPTER_KNOWN_SECONDS
        return adapter == CHANGING_ADAPTER

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


def is_missing_adapter(end: End) -> bool:
    """Whether a request has failed because its adapter is not loaded, or not any more."""
    return "not found" in end.message or "not loaded any more" in end.message


class Workload:
    """All clients. Each sends one request after another, at any front end that accepts it."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.random = Random(f"workload {simulation.config.seed}")
        self.outcomes: dict[str, int] = {}
        self.longest_seconds = 0.0
        self.latest_end = 0.0
        self.finished = False  # whether all requests have ended
        self.active: dict[ClientRequest, None] = {}
        self.sent: dict[int, ClientRequest] = {}  # by number
        self.adapter_added_at: float | None = None  # when a client knew that ADDED_ADAPTER is loaded
        self.adapter_absent_at = 0.0  # when no scheduler or worker was last seen with it: tokenizers have to tell them
        self._planned = 0
        self.ended = 0

    def start(self) -> None:
        for _ in range(self.simulation.config.clients):
            self._send_later()
        self._send_later(LIGHT_CLIENT)

    def _send_later(self, client: Client | None = None) -> None:
        if self._planned < self.simulation.config.requests:
            self._planned += 1
            config = self.simulation.config
            client = self.random.choices(CLIENTS, CLIENT_SHARES)[0] if client is not LIGHT_CLIENT else client
            plan = draw_plan(self.random, self._planned, client, config)
            self.simulation.clock.after(self.random.expovariate(1 / config.think_seconds), self._send, plan)

    def _send(self, plan: Plan) -> None:
        accepting = [one for one in self.simulation.front_ends if one.accepting and not one.stopped]
        if not accepting:
            self.simulation.clock.after(RETRY_SECONDS, self._send, plan)
            return
        front_end = self.random.choice(accepting)
        kind = GenerationClient if plan.generates else TokenizationClient if plan.tokenize else AdapterClient
        request = kind(self, plan, front_end)
        self.active[request] = None
        self.sent[plan.number] = request
        asked = plan.generates[0] if plan.generates else plan.tokenize or plan.update
        self.simulation.trace(front_end.name, "request", plan.number, plan.poison, asked)
        front_end.run_code(lambda: self._submit(request))
        for seconds in (plan.cancel_after, plan.timeout):
            if seconds is not None:
                self.simulation.clock.after(seconds, self._leave, request)

    def _submit(self, request: ClientRequest) -> None:
        plan, config = request.plan, self.simulation.config
        try:
            request.submit()
        except ApiError as error:
            held, own = self._permits(plan.client)
            if held > config.max_concurrent_requests or (
                plan.client.requests is not None and own > plan.client.requests
            ):
                self.simulation.trace(request.front_end.name, "refuses", plan.number, error.message)
                self.outcomes["no permit"] = self.outcomes.get("no permit", 0) + 1
                self._forget(request)
                self.simulation.clock.after(NO_PERMIT_SECONDS, self._send, plan._replace(cancel_after=None))
                return
            self.simulation.fail(
                f"request {plan.number} was refused with {held} permits held: {error.message}", request
            )
        held, own = self._permits(plan.client)
        if held > config.max_concurrent_requests:
            self.simulation.fail(f"{held} generations at once, of {config.max_concurrent_requests}", request)
        if plan.client.requests is not None and own > plan.client.requests:
            self.simulation.fail(f"{own} generations of a client at once that may have {plan.client.requests}", request)

    def _permits(self, client: Client) -> tuple[int, int]:
        """How many generations of all clients, and of this one, are active."""
        held = [(one.plan.client, one.permits) for one in self.active]
        return sum(count for _, count in held), sum(count for owner, count in held if owner is client)

    def _leave(self, request: ClientRequest) -> None:
        if not request.done and not request.front_end.stopped:
            request.front_end.run_code(lambda: self._leave_now(request))

    def _leave_now(self, request: ClientRequest) -> None:
        self.simulation.trace(request.front_end.name, "client leaves", request.plan.number)
        self.connection_lost(request, request.leave())

    def adapter_added(self) -> None:
        """A client knows that ADDED_ADAPTER is loaded."""
        if self.adapter_added_at is None:
            self.adapter_added_at = self.simulation.clock.now

    def look_for_adapter(self) -> None:
        """To be called four times a second."""
        processes = [*self.simulation.schedulers, *self.simulation.workers]
        having = [any(adapter.name == ADDED_ADAPTER for adapter in one.loaded_adapters) for one in processes]
        # Where it could not be loaded again, requests may come that know no other replica.
        if not (all if self.simulation.config.adapter_failures else any)(having):
            self.adapter_absent_at = self.simulation.clock.now

    def front_end_lost(self, front_end: FrontEnd) -> None:
        """The connections of its clients break."""
        for request in [one for one in self.active if one.front_end is front_end]:
            request.lose_front_end()
            self.connection_lost(request, "connection lost")

    def connection_lost(self, request: ClientRequest, outcome: str) -> None:
        """The connection of a client is lost. It comes back, or ends its request."""
        if not request.plan.resumes:
            self.request_done(request, outcome)
            return
        self.outcomes["resumed"] = self.outcomes.get("resumed", 0) + 1
        self._forget(request)
        pause = self.random.choice(RESUME_SECONDS)
        self.simulation.clock.after(pause, self._send, request.plan._replace(cancel_after=None))

    def request_done(self, request: ClientRequest, outcome: str) -> None:
        self._forget(request)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.longest_seconds = max(self.longest_seconds, self.simulation.clock.now - request.began)
        self.latest_end = self.simulation.clock.now
        self.ended += 1
        self.finished = self.ended >= self.simulation.config.requests
        self._send_later(request.plan.client)

    def _forget(self, request: ClientRequest) -> None:
        request.done = True
        del self.active[request]
        if self.sent.get(request.plan.number) is request:
            del self.sent[request.plan.number]
