"""Answers batches (/v1/batches): checks the input file, sends each line as a request to the routes of this front end,
and keeps the results.

A batch is answered by the front end that holds its lease (batch_store.py). Its requests are those of its client with a
priority below all others, hold no permits and have no timeout, so they take what the others leave. A request whose
result is not kept when the front end ends is answered again by the next one; one with which front ends end again and
again gets an error (TRIAL_LOSSES in batch_store.py).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from tgi.api.asgi import CLIENT_KEY, AsgiApp, InnerResponse, send_request
from tgi.api.batch_store import (
    BEAT_SECONDS,
    BLAMING_LOSSES,
    ERROR,
    LIVE,
    OUTPUT,
    TRIAL_LOSSES,
    BatchStore,
    Claim,
    Lease,
    Result,
)
from tgi.api.clients import Client
from tgi.api.service import Service
from tgi.api.shapes.batches import (
    BatchError,
    BatchErrors,
    BatchLine,
    BatchLineError,
    BatchLineResponse,
    BatchResult,
    BatchStatus,
)
from tgi.api.sqlite_store import StoreUnavailable
from tgi.microkernel.messages.protocol import ModelTask

log = logging.getLogger(__name__)

T = TypeVar("T")

# The routes that a batch may be for, with what the model must do.
ENDPOINTS = {
    "/v1/chat/completions": ModelTask.GENERATE,
    "/v1/completions": ModelTask.GENERATE,
    "/v1/responses": ModelTask.GENERATE,
    "/v1/embeddings": ModelTask.EMBED,
}
# Fields of a line's body with values that a result in a file cannot have.
REFUSED = {"stream": True, "background": True}
# Of one front end. Those of one client run one after the other.
MAX_RUNNING = 4
# Requests of a batch at once: as many as the worker has rows, within these limits.
MAX_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 256, 32 << 20
PAGE_BYTES = 256 << 10
MAX_ERRORS = 100  # that are told of a file
# Between two looks for batches that another front end has left.
LOOK_SECONDS = 1.0
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
LOG_SECONDS = 10.0
RETRIED = (429, 499, 503)  # 499: the request was given up
UNANSWERED = {
    "cancelled": BatchLineError("batch_cancelled", "The batch was cancelled before this request was answered"),
    "expired": BatchLineError(
        "batch_expired", "This request could not be executed before the completion window expired."
    ),
    "failed": BatchLineError("batch_failed", "The batch has failed before this request was answered"),
}

_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Details(Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(Struct):
    """That of any of the ENDPOINTS: each has one name of two for the same."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(Struct):
    """What an answer says of itself."""

    model: str
    usage: _Usage | None = field(default_factory=_Usage)  # null in a response that has failed


_decode_answer = msgspec.json.Decoder(_Answer).decode


class BatchRunner:
    """Answers batches in this front end."""

    def __init__(self, application: AsgiApp, service: Service, name: str) -> None:
        """`name`: of this life of this front end, which no other one has."""
        self._application = application
        self._service = service
        self._name = name
        self._runs: set[_BatchRun] = set()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Begins no more requests. Those in flight are background work of the service."""
        self._stopped.set()
        self._service.batches.changed.set()

    async def run(self) -> None:
        """Looks for batches until `stop`."""
        store = self._service.batches
        while not self._stopped.is_set():
            store.changed.clear()
            try:
                while self._is_free and (claimed := await store.claim(self._name, not self._runs)) is not None:
                    run = _BatchRun(self._application, self._service, self._name, claimed, self._stopped)
                    self._runs.add(run)
                    self._service.run_in_background(self._answer(run))
            except StoreUnavailable as error:
                log.error("No batch can be begun: %s", error)
            await _wait(store.changed, LOOK_SECONDS)

    @property
    def _is_free(self) -> bool:
        computes = self._service.has_started and not self._stopped.is_set()
        free = len(self._runs) < MAX_RUNNING and not any(run.on_trial for run in self._runs)
        return computes and free and self._service.batches.exists

    async def _answer(self, run: "_BatchRun") -> None:
        try:
            await run.run()
        finally:
            self._runs.remove(run)
            self._service.batches.changed.set()


class _BatchRun:
    """One batch, as long as this front end has its lease."""

    def __init__(self, app: AsgiApp, service: Service, runner: str, claim: Claim, stopped: asyncio.Event) -> None:
        self._app = app
        self._service = service
        self._store: BatchStore = service.batches
        self._runner = runner
        self._owner, self._batch, self._losses = claim
        self._tried = MAX_IN_FLIGHT if self._losses >= TRIAL_LOSSES else 0  # requests that are yet to be sent alone
        self._stopped = stopped  # the front end ends: no more requests, those in flight go on
        self._given_up = asyncio.Event()  # no more requests, and those in flight end
        self._ending: BatchStatus = "completed"
        self._lost = False  # another front end has the batch
        self._in_flight = self._bytes_in_flight = 0  # requests, and the bytes of their lines
        self._next_log = 0.0  # that the store is not available
        self._room = asyncio.Event()  # something in flight has ended

    @property
    def on_trial(self) -> bool:
        """Whether the front end may have no other batch."""
        return self._tried > 0

    async def run(self) -> None:
        """Answers what is not answered, then ends the batch."""
        batch = self._batch
        beats = asyncio.create_task(self._beat())
        try:
            if batch.status == "validating":
                await self._validate()
            if batch.status == "in_progress":
                if self._losses >= BLAMING_LOSSES:
                    await self._blame()
                await self._send_all()
            if self._stopped.is_set() and not self._given_up.is_set():
                await self._kept(self._store.release, batch.id, self._runner)
            elif not self._lost and batch.status != "failed":
                await self._end()
        except Exception:  # a defect, which would come again
            log.exception("The batch %s has failed", batch.id)
            problem = BatchError("server_error", "The server has failed on this batch")
            members = {"errors": BatchErrors([problem])}
            await self._kept(self._store.move, batch.id, LIVE, "failed", **members)
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        """Keeps the lease, and learns what ends the batch early."""
        while True:
            lease = await self._kept(self._store.beat, self._batch.id, self._runner)
            if lease is None:
                self._lost = True
                self._given_up.set()
                return
            if (ending := self._early_end(lease)) is not None and lease.status != "finalizing":
                self._give_up(ending)
            await asyncio.sleep(BEAT_SECONDS)

    def _give_up(self, ending: BatchStatus) -> None:
        """Ends the requests in flight, and then the batch."""
        self._ending = ending
        self._given_up.set()

    def _early_end(self, lease: Lease) -> BatchStatus | None:
        if lease.status == "cancelling" or self._client is None:
            return "cancelled"
        if lease.overdue:
            return "expired"
        return "failed" if lease.full else None

    @property
    def _client(self) -> Client | None:
        """The client with its present limits, or None if its key is not valid any more."""
        found = self._service.clients.named(self._owner)
        return None if found is None else found.for_batches

    # --- validating ---

    async def _validate(self) -> None:
        """Checks all lines. The batch is in progress then, or has failed."""
        batch, total = self._batch, 0
        problems: list[BatchError] = []
        names: set[str] = set()
        async for number, line in self._lines():
            if self._given_up.is_set() or self._stopped.is_set():
                return
            total += 1
            problem = line_problem(line, batch.endpoint)
            if isinstance(problem, str):
                if problem not in names:
                    names.add(problem)
                    continue
                problem = BatchError("duplicate_custom_id", f"The custom_id {problem[:64]} is not unique", "custom_id")
            problem.line = number + 1
            problems.append(problem)
            if len(problems) == MAX_ERRORS:
                break
        if not total:
            problems = [BatchError("empty_file", "The input file has no requests")]
        batch.request_counts.total = total
        await self._kept(self._store.set_total, batch.id, total)
        batch.status = "failed" if problems else "in_progress"
        members = {"errors": BatchErrors(problems)} if problems else {}
        if not await self._kept(self._store.move, batch.id, ("validating",), batch.status, **members):
            found = await self._kept(self._store.batch, self._owner, batch.id)
            batch.status = (
                "failed" if found is None else found.status
            )  # another front end was first, or it was cancelled

    async def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """The lines that have no result, with their numbers from 0 on."""
        number = -1
        while page := await self._kept(self._store.requests, self._batch, number, PAGE_BYTES):
            for number, line in page:
                if line.strip():
                    yield number, line

    # --- in progress ---

    async def _blame(self) -> None:
        """The first request without a result gets an error: front ends have ended with it alone."""
        async for number, line in self._lines():
            name, given = self._request_id(number), _decode_line(line).custom_id
            log.error("The request %s is not sent again: %d front ends have ended with it", name, self._losses)
            text = f"{self._losses} processes of the server have ended while they worked on this request"
            await self._record(number, ERROR, BatchResult(name, given, None, BatchLineError("server_error", text)))
            self._tried = 0
            return

    async def _send_all(self) -> None:
        """Sends the lines as requests, in order, and waits for all that were sent."""
        async with asyncio.TaskGroup() as group:
            async for number, line in self._lines():
                while self._in_flight and (
                    self._in_flight >= self._window or self._bytes_in_flight > MAX_BYTES_IN_FLIGHT
                ):
                    self._room.clear()
                    await self._room.wait()
                if self._given_up.is_set() or self._stopped.is_set():
                    break
                self._in_flight += 1
                self._bytes_in_flight += len(line)
                group.create_task(self._send(number, line))

    @property
    def _window(self) -> int:
        if self.on_trial:
            return 1
        limits, client = self._service.router.limits, self._client
        rows = MAX_IN_FLIGHT if limits is None else min(limits.max_batch_size, MAX_IN_FLIGHT)
        return rows if client is None or client.requests is None else min(rows, client.requests)

    async def _send(self, number: int, line: bytes) -> None:
        """Sends one line until there is an answer, and keeps the result."""
        try:
            request, name = _decode_line(line), self._request_id(number)
            seconds = RETRY_SECONDS
            while not self._given_up.is_set():
                if (client := self._client) is None:
                    self._give_up("cancelled")
                    return
                keys = {CLIENT_KEY: client}
                headers = {"x-request-id": name}
                response = await send_request(
                    self._app, "POST", self._batch.endpoint, bytes(request.body), headers, keys, self._given_up
                )
                if response.status not in RETRIED:
                    result = _result(name, request.custom_id, response)
                    if response.status == 200:
                        await self._record(number, OUTPUT, result, *_counted(response.body))
                    else:
                        await self._record(number, ERROR, result)
                    return
                if self._stopped.is_set():
                    return
                pause = float(response.headers.get("retry-after", seconds))
                await _wait(self._given_up, min(pause, MAX_RETRY_SECONDS))
                seconds = min(2 * seconds, MAX_RETRY_SECONDS)
        finally:
            self._in_flight -= 1
            self._bytes_in_flight -= len(line)
            self._tried = max(0, self._tried - 1)
            self._room.set()

    async def _record(self, number: int, kind: int, result: BatchResult, *counted: Any) -> None:
        line = msgspec.json.encode(result) + b"\n"
        await self._kept(self._store.record, self._batch.id, [Result(number, kind, line, *counted)])

    def _request_id(self, number: int) -> str:
        """The id of a request, the same if it is sent again."""
        return f"batch_req_{self._batch.id.removeprefix('batch_')}_{number + 1}"

    # --- finalizing ---

    async def _end(self) -> None:
        """Ends the batch. What has no result gets an error that says why."""
        batch, ending = self._batch, self._ending
        before: BatchStatus = "cancelling" if ending == "cancelled" else "finalizing"
        members: dict[str, Any] = {}
        if ending == "failed":
            problem = BatchError("storage_exceeded", "The results take more than --batch-store-bytes allows")
            members = {"errors": BatchErrors([problem])}
        elif ending == "expired":
            members = {"expired_at": int(time.time())}
        running: tuple[BatchStatus, ...] = ("validating", "in_progress")
        if not await self._kept(self._store.move, batch.id, running, before, **members):
            # It was cancelled, or another front end has begun to end it.
            found = await self._kept(self._store.batch, self._owner, batch.id)
            if found is None or found.status not in ("cancelling", "finalizing"):
                return
            before, ending = found.status, "failed" if found.errors else "expired" if found.expired_at else "completed"
            ending = "cancelled" if before == "cancelling" else ending
        error = UNANSWERED.get(ending)
        if error is not None and batch.request_counts.total:  # its lines were checked
            async for number, line in self._lines():
                result = BatchResult(self._request_id(number), _decode_line(line).custom_id, None, error)
                await self._record(number, ERROR, result)
        await self._kept(self._store.end, batch.id, before, ending)

    async def _kept(self, call: Callable[..., Awaitable[T]], *args: Any, **members: Any) -> T:
        """Calls the store, again and again while it is not available: a full disk costs no answer."""
        while True:
            try:
                return await call(*args, **members)
            except StoreUnavailable as error:
                if (now := time.monotonic()) > self._next_log:
                    self._next_log = now + LOG_SECONDS
                    log.error("The batch %s waits: %s", self._batch.id, error)
                await asyncio.sleep(RETRY_SECONDS)


def line_problem(line: bytes, endpoint: str) -> BatchError | str:
    """What is wrong with a line of an input file, or its custom_id."""
    try:
        request = _decode_line(line)
        body = _decode_object(request.body)
    except msgspec.ValidationError as error:
        return BatchError("invalid_request", f"The line is not a request of a batch: {error}")
    except _UNREADABLE as error:
        return BatchError("invalid_json_line", f"The line is not JSON: {error}")
    if request.url != endpoint:
        return BatchError("invalid_url", f"The url {request.url[:64]} is not the batch's endpoint {endpoint}", "url")
    for name, value in REFUSED.items():
        if name in body and msgspec.json.decode(body[name]) is value:
            return BatchError("invalid_request", f"`{name}` is not supported in a batch", f"body.{name}")
    return request.custom_id


def _result(request_id: str, custom_id: str, response: InnerResponse) -> BatchResult:
    return BatchResult(request_id, custom_id, BatchLineResponse(response.status, request_id, Raw(response.body)), None)


def _counted(body: bytes) -> tuple[str, int, int, int, int]:
    """What an answer counts in its batch, as the last members of Result."""
    answer = _decode_answer(body)
    usage = answer.usage or _Usage()
    prompt = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    completion = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return (
        answer.model,
        usage.prompt_tokens + usage.input_tokens,
        prompt.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
        completion.reasoning_tokens,
    )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Waits for an event for at most this long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
