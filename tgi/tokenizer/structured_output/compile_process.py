"""Compiles grammars in child processes, so that a compilation has limits on time and memory and can be ended.

GrammarCompiler is the tokenizer's side, `main` the child's. They exchange messages over the child's stdin and stdout.
"""

import contextlib
import json
import logging
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from tgi.hub.model_config import read_model_config
from tgi.microkernel.messages.codec import Codec
from tgi.tokenizer.answers.formats import FORMATS_BY_NAME, AnswerFormat, ReasoningTags, ToolCallFormat
from tgi.tokenizer.answers.response_template import described_formats
from tgi.tokenizer.chat import OfferedTool, RenderedChat
from tgi.tokenizer.structured_output.answer_grammar import AnswerGrammarBuilder
from tgi.tokenizer.structured_output.grammar import CheckedGrammar, GrammarError
from tgi.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

# Of one child, beyond which the library's allocations fail.
MAX_MEMORY_BYTES = 1 << 30
# A compilation that is not wanted any more ends after this time. Most end by themselves sooner, and a new child takes
# half a second of computation to start.
UNWANTED_SECONDS = 0.5
# A child that has not answered after this time does not run at all (stopped, or swapped out).
MAX_WAIT_SECONDS = 60.0
POLL_SECONDS = 0.1
MAX_CHILDREN = 2
# A child may be killed from outside, which says nothing about the grammar.
MAX_ATTEMPTS = 2
TOO_DEEP = "grammar is not valid: it is nested too deeply"


class GrammarRequest(NamedTuple):
    """Asks for the grammar of an answer. `grammar` is the client's, as JSON; `tools` are OfferedTools, as JSON."""

    grammar: bytes
    has_chat: bool
    tools: bytes = b"[]"
    call_required: bool = False
    parallel_calls: bool | None = None
    has_format: bool = False
    call_formats: list[str] = []  # names
    reasoning_tags: list[str] = []  # open, close
    starts_in_reasoning: bool = False
    channels: bool = False


class GrammarAnswer(NamedTuple):
    """A CheckedGrammar, or why it is rejected."""

    grammar: str
    error: str = ""
    not_enforced: list[str] = []
    call_formats: list[str] = []


_codec = Codec([GrammarRequest, GrammarAnswer])
_LENGTH = struct.Struct("<I")


class GrammarCompiler:
    """Builds grammars as AnswerGrammarBuilder does, in MAX_CHILDREN children. The first grammar starts them; one that
    dies is replaced. Thread-safe for as many threads."""

    def __init__(self, model_dir: Path, max_seconds: float) -> None:
        """`max_seconds`: of computation, per grammar."""
        self._command = [sys.executable, "-P", "-m", __name__, str(model_dir), str(max_seconds)]
        self._max_seconds = max_seconds
        self._idle: list[_Child] = []  # the latest used one last
        self._count = 0  # of all children
        self._lock = threading.Lock()

    def build(
        self, grammar: bytes, chat: RenderedChat | None, is_wanted: Callable[[], bool] = lambda: True
    ) -> CheckedGrammar:
        """The grammar of an answer for the worker. Raises GrammarError.

        When `is_wanted` turns false, a long compilation is ended, and what is returned means nothing.
        """
        try:
            request = _codec.encode(_request(grammar, chat))
        except RecursionError:
            raise GrammarError(TOO_DEEP) from None
        for _ in range(MAX_ATTEMPTS):
            if not is_wanted():
                return CheckedGrammar()
            child = self._take()
            answer = child.exchange(request, is_wanted)
            if answer is not None:
                with self._lock:
                    self._idle.append(child)
                if answer.error:
                    raise GrammarError(answer.error)
                return CheckedGrammar(answer.grammar, answer.not_enforced, answer.call_formats)
            with self._lock:
                self._count -= 1
            if child.end() == -signal.SIGPROF:
                log.info("a grammar was refused: its compilation took more than %g seconds", self._max_seconds)
                raise GrammarError(
                    f"grammar is not valid: its compilation takes more than {self._max_seconds:g} seconds of "
                    "computation (`grammar_compile_limit`); use a simpler grammar"
                )
        if not is_wanted():
            log.info("the compilation of a grammar was ended: its client has left")
            return CheckedGrammar()
        raise GrammarError("grammar is not valid: the process that compiles it has died; use a simpler grammar")

    def close(self) -> None:
        """Ends the idle children."""
        with self._lock:
            while self._idle:
                self._idle.pop().end()
                self._count -= 1

    def _take(self) -> "_Child":
        """An idle child, or a new one. Also starts one for the next thread, which should not wait for it to load."""
        with self._lock:
            dead = [child for child in self._idle if not child.alive]
            self._idle = [child for child in self._idle if child not in dead]
            self._count -= len(dead)
            for child in dead:
                child.end()
            while self._count < MAX_CHILDREN or not self._idle:
                self._idle.append(_Child(self._command))
                self._count += 1
            return self._idle.pop()


class _Child:
    """A child process, as its parent sees it."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)  # a child that is stopped reads nothing

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, request: bytes, is_wanted: Callable[[], bool]) -> GrammarAnswer | None:
        """Sends a request and waits for the answer. None if the child dies, takes too long or is not needed."""
        began = time.monotonic()
        unsent = memoryview(_frame(request))
        try:
            while True:
                readable, writable, _ = select.select([self._stdout], [self._stdin] if unsent else [], [], POLL_SECONDS)
                if readable:
                    break
                if writable:
                    unsent = unsent[os.write(self._stdin.fileno(), unsent) :]
                waited = time.monotonic() - began
                if waited > MAX_WAIT_SECONDS or (waited > UNWANTED_SECONDS and not is_wanted()):
                    return None
            frame = _read_frame(self._stdout)
        except OSError:
            return None
        return None if frame is None else _codec.decode(frame)

    def end(self) -> int:
        """Kills the child, unless it is dead, and returns its exit code."""
        try:
            return self._process.wait(timeout=1.0 if self._at_eof() else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            for pipe in (self._stdin, self._stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _at_eof(self) -> bool:
        """Whether the child has closed its side, which it does only when it ends."""
        return bool(select.select([self._stdout], [], [], 0)[0])


def _request(grammar: bytes, chat: RenderedChat | None) -> GrammarRequest:
    if chat is None:
        return GrammarRequest(grammar, has_chat=False)
    answer_format = chat.answer_format or AnswerFormat()
    return GrammarRequest(
        grammar=grammar,
        has_chat=True,
        tools=json.dumps(chat.tools).encode(),
        call_required=chat.call_required,
        parallel_calls=chat.parallel_calls,
        has_format=chat.answer_format is not None,
        call_formats=[call_format.name for call_format in answer_format.call_formats],
        reasoning_tags=list(answer_format.reasoning_tags or ()),
        starts_in_reasoning=answer_format.starts_in_reasoning,
        channels=answer_format.channels,
    )


def _rendered_chat(request: GrammarRequest, formats: Mapping[str, ToolCallFormat]) -> RenderedChat | None:
    """The chat of a request, without its text. `formats` by name."""
    if not request.has_chat:
        return None
    answer_format = AnswerFormat(
        call_formats=tuple(formats[name] for name in request.call_formats),
        reasoning_tags=ReasoningTags(*request.reasoning_tags) if request.reasoning_tags else None,
        starts_in_reasoning=request.starts_in_reasoning,
        channels=request.channels,
    )
    return RenderedChat(
        text="",
        answer_format=answer_format if request.has_format else None,
        tools=[OfferedTool(*tool) for tool in json.loads(request.tools)],
        call_required=request.call_required,
        parallel_calls=request.parallel_calls,
    )


def _frame(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _read_frame(file: IO[bytes]) -> bytes | None:
    """The content of the next frame; None at the end of the file."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = file.read(length)
    return content if len(content) == length else None


# --- the child ---


def main() -> None:
    """Answers each GrammarRequest with a GrammarAnswer, until stdin is closed."""
    model_dir, max_seconds = Path(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the supervisor handles it
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    requests: queue.SimpleQueue[GrammarRequest] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    config = read_model_config(model_dir, weights=False)
    described, _ = described_formats(config.directory)
    formats = FORMATS_BY_NAME | {known.name: known for known in (described.call_formats if described else ())}
    builder = AnswerGrammarBuilder(Vocabulary.load(config), described)
    while True:
        request = requests.get()
        signal.setitimer(signal.ITIMER_PROF, max_seconds)  # SIGPROF ends the process, whatever it computes
        answer = _answer(builder, request, formats)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_frame(_codec.encode(answer)))
        answers.flush()


def _receive(requests: "queue.SimpleQueue[GrammarRequest]") -> None:
    """Queues the parent's requests. Ends the process with the parent, also amid a compilation."""
    while (frame := _read_frame(sys.stdin.buffer)) is not None:
        requests.put(_codec.decode(frame))
    os._exit(0)


def _answer(
    builder: AnswerGrammarBuilder, request: GrammarRequest, formats: Mapping[str, ToolCallFormat]
) -> GrammarAnswer:
    try:
        built = builder.build(request.grammar, _rendered_chat(request, formats))
        return GrammarAnswer(built.text, "", built.not_enforced, built.call_formats)
    except GrammarError as error:
        return GrammarAnswer("", str(error))
    except RecursionError:
        return GrammarAnswer("", TOO_DEEP)


if __name__ == "__main__":
    main()
