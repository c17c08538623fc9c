"""Grammars compiled in child processes: the same results as in this process, and limits that are enforced."""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tokenizer.test_repetition import REJECTED
from tgi.hub.model_config import read_model_config
from tgi.tokenizer.answers.formats import FALLBACK_FORMATS, FORMATS_BY_NAME, AnswerFormat, ReasoningTags
from tgi.tokenizer.chat import OfferedTool, RenderedChat
from tgi.tokenizer.structured_output import compile_process
from tgi.tokenizer.structured_output.answer_grammar import AnswerGrammarBuilder
from tgi.tokenizer.structured_output.compile_process import MAX_CHILDREN, GrammarCompiler
from tgi.tokenizer.structured_output.grammar import CheckedGrammar, GrammarError
from tgi.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Takes minutes: the library's limits count other steps than those that it needs.
ENDLESS = {"schema": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}}
TOWN = {"type": "object", "properties": {"town": {"type": "string", "format": "town"}}}
TOOLS = [OfferedTool("weather", TOWN), OfferedTool("none", None, True)]
CHATS = [
    None,
    RenderedChat("text"),
    *(
        RenderedChat("", AnswerFormat((FORMATS_BY_NAME[one],), channels=one == "harmony"), TOOLS, True, None)
        for one in ("hermes", "llama3", "qwen3_coder", "lfm2", "gemma4", "harmony")
    ),
    RenderedChat("", AnswerFormat(FALLBACK_FORMATS, ReasoningTags("<think>", "</think>"), True), TOOLS, False, True),
    RenderedChat("", AnswerFormat((), ReasoningTags("<think>", "</think>"))),
]


def as_json(grammar: dict[str, Any]) -> bytes:
    return json.dumps(grammar).encode()


@pytest.fixture(scope="module")
def others() -> set[psutil.Process]:
    """The children of this process that earlier tests have started, such as servers."""
    return {*psutil.Process().children()}


@pytest.fixture
def compiler(tiny_llama: Path, others: set[psutil.Process]) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tiny_llama, 20.0)
    yield compiler
    children = {*psutil.Process().children()} - others
    compiler.close()
    assert not [child for child in children if child.is_running()]


def outcome(build: Any, *arguments: Any) -> str:
    try:
        return str(build(*arguments))
    except GrammarError as error:
        return f"error: {error}"


def test_results_are_those_of_the_builder(compiler: GrammarCompiler, tiny_llama: Path) -> None:
    builder = AnswerGrammarBuilder(Vocabulary.load(read_model_config(tiny_llama)))
    grammars: list[bytes] = [as_json({"schema": SCHEMA}), as_json({"regex": "[ab"}), b""]
    grammars += [as_json(grammar) for grammar, _ in REJECTED]
    for chat in CHATS:
        for grammar in grammars:
            assert outcome(compiler.build, grammar, chat) == outcome(builder.build, grammar, chat)


def test_a_child_that_is_killed_is_replaced(compiler: GrammarCompiler, others: set[psutil.Process]) -> None:
    assert compiler.build(as_json({"schema": SCHEMA}), None).text
    for child in {*psutil.Process().children()} - others:
        child.kill()
    assert compiler.build(as_json({"schema": SCHEMA}), None).text


def test_a_compilation_beyond_the_limit_is_ended_and_the_next_one_served(tiny_llama: Path) -> None:
    compiler = GrammarCompiler(tiny_llama, 0.3)
    for _ in range(2):
        assert "takes more than 0.3 seconds of computation" in outcome(compiler.build, as_json(ENDLESS), None)
        assert compiler.build(as_json({"schema": SCHEMA}), None).text
    compiler.close()


def test_a_long_compilation_ends_when_its_client_has_left(compiler: GrammarCompiler) -> None:
    left, began = threading.Event(), threading.Event()

    def is_wanted() -> bool:
        began.set()
        return not left.is_set()

    build = threading.Thread(target=compiler.build, args=(as_json(ENDLESS), None, is_wanted))
    build.start()
    assert began.wait(60)
    left.set()
    build.join(60)
    assert not build.is_alive()
    assert compiler.build(as_json({"schema": SCHEMA}), None).text


def test_a_stopped_child_is_replaced_when_its_client_has_left(compiler: GrammarCompiler) -> None:
    """Also one that has read only a part of a large grammar."""
    large = as_json({"schema": {"type": "object", "properties": {"a" * 200_000: {"type": "integer"}}}})
    assert compiler.build(as_json({"schema": SCHEMA}), None).text
    stopped = compiler._idle[-1]._process
    stopped.send_signal(signal.SIGSTOP)
    asked = iter([True])
    assert compiler.build(large, None, lambda: next(asked, False)) == CheckedGrammar()
    assert stopped.poll() == -signal.SIGKILL
    assert compiler.build(large, None).text


def test_a_child_without_memory_fails_its_request_only(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies by itself is tried again once."""
    compiler = GrammarCompiler(tiny_llama, 20.0)
    starts: list[int] = []

    class DyingChild(compile_process._Child):
        def __init__(self, command: list[str]) -> None:
            super().__init__(["sh", "-c", "kill -ABRT $$"])
            starts.append(self._process.pid)

    with monkeypatch.context() as patch:
        patch.setattr(compile_process, "_Child", DyingChild)
        assert "the process that compiles it has died" in outcome(compiler.build, as_json({"schema": SCHEMA}), None)
    assert len(starts) > 1
    assert compiler.build(as_json({"schema": SCHEMA}), None).text
    compiler.close()


def test_children_end_with_their_parent(tiny_llama: Path) -> None:
    compiler = GrammarCompiler(tiny_llama, 20.0)
    assert compiler.build(as_json({"regex": "a"}), None).text
    child = compiler._idle[-1]
    child._stdin.close()  # as the kernel does when the parent dies
    assert child._process.wait(60) == 0
    compiler.close()


def test_the_number_of_children_is_bounded(tiny_llama: Path, others: set[psutil.Process]) -> None:
    compiler = GrammarCompiler(tiny_llama, 20.0)
    with ThreadPoolExecutor(MAX_CHILDREN) as pool:
        assert all(pool.map(lambda n: compiler.build(as_json({"regex": f"a{n}"}), None).text, range(20)))
    assert len({*psutil.Process().children()} - others) == MAX_CHILDREN
    compiler.close()
    assert not {*psutil.Process().children()} - others
