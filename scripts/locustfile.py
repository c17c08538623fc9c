"""Load for a running server: users that each send one request after another, streamed and plain, on all routes.

scripts/load                    60 seconds of everything, without a web page
scripts/load --tags stream      only streams; the tags are native, openai, stream and plain
scripts/load --web              locust's web page, with a tab for tokens
"""

import json
import random
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import gevent
from load_figures import Table, show
from load_routes import CHAT, COMPLETIONS, DONE, GENERATE, GENERATE_STREAM, ROOT, Native, OpenAI
from locust import FastHttpUser, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.env import Environment
from locust.runners import WorkerRunner

DEFAULT_HOST = "http://127.0.0.1:3000"
PAUSE_SECONDS = 1.0  # after a failure, to spare a broken server
SOME_TEXT = """river mountain city answer question evening water people walk light number theory music history science
garden table window letter ocean bridge forest engine market doctor teacher winter summer morning story picture road"""
WORDS = SOME_TEXT.split()


class Client(FastHttpUser):
    """Sends requests of all kinds, three quarters of them streamed. Continues after failures."""

    connection_timeout = 10.0
    network_timeout = 300.0  # a whole response may take long; a stream sends something every 15 seconds

    def on_start(self) -> None:
        """Reads the options once per user."""
        options = self.environment.parsed_options
        self._lengths = options.prompt_words, options.output_tokens
        self._headers = {"Accept-Encoding": "identity"}
        if options.api_key:
            self._headers["Authorization"] = f"Bearer {options.api_key}"
        self._table: Table = self.environment.tokens

    @tag("native", "plain")
    @task
    def generate(self) -> None:
        """POST /generate."""
        self._ask(GENERATE, stream=False)

    @tag("native", "stream")
    @task(3)
    def generate_stream(self) -> None:
        """POST /generate_stream."""
        self._ask(GENERATE_STREAM, stream=True)

    @tag("native", "plain")
    @task
    def root(self) -> None:
        """POST /."""
        self._ask(ROOT, stream=False)

    @tag("native", "stream")
    @task(3)
    def root_stream(self) -> None:
        """POST /, streamed."""
        self._ask(ROOT, stream=True)

    @tag("openai", "plain")
    @task
    def chat(self) -> None:
        """POST /v1/chat/completions."""
        self._ask(CHAT, stream=False)

    @tag("openai", "stream")
    @task(3)
    def chat_stream(self) -> None:
        """POST /v1/chat/completions, streamed."""
        self._ask(CHAT, stream=True)

    @tag("openai", "plain")
    @task
    def completions(self) -> None:
        """POST /v1/completions."""
        self._ask(COMPLETIONS, stream=False)

    @tag("openai", "stream")
    @task(3)
    def completions_stream(self) -> None:
        """POST /v1/completions, streamed."""
        self._ask(COMPLETIONS, stream=True)

    def _ask(self, route: Native | OpenAI, stream: bool) -> None:
        """One request with a unique prompt, so that the prefix cache does not help."""
        name = f"{route.path} [stream]" if stream else route.path
        words, tokens = map(random.choice, self._lengths)
        prompt = " ".join([f"{random.getrandbits(64)}:", *random.choices(WORDS, k=words)])
        sent = time.perf_counter()
        with self.client.post(
            route.path,
            json=route.body(prompt, tokens, stream),
            name=name,
            headers=self._headers,
            stream=stream,
            catch_response=True,
        ) as response:
            pause = _pause(response, name)
            if not pause:
                try:
                    if stream:
                        self._read_stream(route, name, response, sent)
                    else:
                        self._read_whole(route, name, response)
                except FAILURE_EXCEPTIONS as error:
                    response.failure(f"broken off: {error}")
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    response.failure(f"not an answer of this route: {error!r}")
        if pause:
            gevent.sleep(pause)

    def _read_whole(self, route: Native | OpenAI, name: str, response: ResponseContextManager) -> None:
        """Counts the tokens of a whole response."""
        if broken := response.request_meta["exception"]:
            raise broken
        self._table.count(name, route.generated(response.json()))

    def _read_stream(self, route: Native | OpenAI, name: str, response: ResponseContextManager, sent: float) -> None:
        """Reads lines as they arrive (locust's iter_content waits for full blocks) and records times."""
        error, ended = "", False
        seen, generated = 0, None
        before = sent
        while line := response.stream.readline(b"\n"):
            response.request_meta["response_length"] += len(line)
            if not line.startswith(b"data:"):
                continue  # the empty line after an event, or a comment that keeps the connection alive
            now = time.perf_counter()
            data = line[5:].strip()
            if data == DONE:
                ended = True
                continue
            event = route.event(json.loads(data))
            error = error or event.error
            ended = ended or event.last
            generated = generated if event.generated is None else event.generated
            if event.token:
                (self._table.gap if seen else self._table.first)(name, now - before)
                self._table.count(name, 1)
                before = now
                seen += 1
        response.request_meta["response_time"] = (time.perf_counter() - sent) * 1000
        if error:
            response.failure(f"error in the stream: {error}")
        elif not ended or generated is None:
            response.failure("truncated: the stream ended without its last event")
        else:
            self._table.count(name, generated - seen)  # tokens without text


def _pause(response: ResponseContextManager, name: str) -> float:
    """Seconds to wait before the next request; 0 if there is a response to read. Reports every status but 200."""
    status = response.status_code
    if status == 200:
        return 0.0
    if status == 429:
        # A 429 is correct behaviour of a full server: it has its own row, no failure and no response time.
        response.request_meta.update(name=f"{name} [429]", response_time=None)
        response.success()
        return float(response.headers.get("retry-after", PAUSE_SECONDS))
    response.failure(f"{status}: {_reason(response.text or '')}" if status else f"no answer: {response.error}")
    return PAUSE_SECONDS


def _reason(body: str) -> str:
    """The text of an error body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:200] or "without a reason"


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    several: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "<int>"}
    words = "Lengths of prompts in words, about a token each; every request takes one of them"
    parser.add_argument("--prompt-words", **several, default=[16, 128, 512], help=words)
    tokens = "Tokens to generate at most; every request takes one of these"
    parser.add_argument("--output-tokens", **several, default=[16, 64, 256], help=tokens)
    parser.add_argument("--api-key", env_var="API_KEY", include_in_web_ui=False, help="Bearer key of the server")


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    environment.tokens = Table()
    show(environment, environment.tokens)
    host = environment.host or DEFAULT_HOST
    environment.host = host if "://" in host else f"http://{host}"
    options = environment.parsed_options
    if (options.headless or options.autostart) and not isinstance(environment.runner, WorkerRunner):
        _require_server(environment.host)


def _require_server(host: str) -> None:
    """Exits with a message if there is no server."""
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{host}/health", timeout=10).close()
    except urllib.error.HTTPError as error:
        stage = error.headers.get("x-startup-stage", "no reason given")
        sys.exit(f"The server at {host} is not ready (/health answers {error.code}: {stage}). Wait until it is 200.")
    except OSError as error:
        reason = getattr(error, "reason", error)
        sys.exit(f"No server answers at {host} ({reason}). Start one (scripts/up) or name another with --host.")
