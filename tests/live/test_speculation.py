"""Drafts behind a real server: the tokens are those without, whoever drafts and whatever dies, and they come sooner."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.server import Server
from tests.live.test_models import LLAMA, Answer, ask, chat, streams
from tests.models import model

CASE = LLAMA._replace(tokens=40)
COPY = "The old bridge at the end of the street was built by two brothers. Every stone came from the quarry."
COPIES = [chat(f"Repeat this text {n} times: {COPY}") for n in (2, 3)] + [chat("Write a poem about a bridge.")]


def ask_all(server: Server) -> list[Answer]:
    """Eight prompts, four at a time; every second one has a seed."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(server, CASE, number, number % 2 == 1), range(8)))


def accepted(server: Server) -> tuple[float, float]:
    """How many tokens were drafted, and how many of these drawn."""
    return server.metric("tgi_drafted_tokens"), server.metric("tgi_accepted_tokens")


def test_greedy_seeded_and_replayed_answers_are_those_without(tmp_path: Path) -> None:
    """By looking up, and by a draft model that is the model itself."""
    directory = str(model("llama"))
    arguments = ("--model-id", directory, "--dtype", "float32", "--validation-workers", "1")
    with Server(tmp_path / "plain", *arguments) as server:
        server.start().ready()
        want, shown = ask_all(server), streams(server)
        assert accepted(server) == (0, 0)
    for name, more in {"lookup": ["--speculate", "4"], "model": ["--draft-model-id", directory]}.items():
        with Server(tmp_path / name, *arguments) as server:
            server.start("up", *more).ready()
            assert ask_all(server) == want
            drafted, drawn = accepted(server)
            assert 0 < drawn <= drafted
            assert server.metric("tgi_request_skipped_tokens_sum") == drawn
            assert streams(server, act=lambda: server.kill("worker-0")) == shown


def test_the_demo_model_copies_in_fewer_steps(demo_model: Path, tmp_path: Path) -> None:
    def answers(server: Server) -> tuple[list[Answer], float]:
        def one(prompt: str) -> Answer:
            details = server.generate(prompt, max_new_tokens=40)["details"]
            return [(token["id"], token["logprob"]) for token in details["tokens"]]

        with ThreadPoolExecutor(3) as pool:
            alone = [one(prompt) for prompt in COPIES]
            together = list(pool.map(one, COPIES))
        assert together == alone
        return alone, server.metric("tgi_batch_inference_count")

    arguments = ("--model-id", str(demo_model), "--validation-workers", "1")
    with Server(tmp_path / "plain", *arguments) as server:
        want, steps = answers(server.start().ready())
    with Server(tmp_path / "run", *arguments) as server:
        got, fewer = answers(server.start("up", "--speculate", "4").ready())
        drafted, drawn = accepted(server)
    assert got == want
    assert 0 < drawn < drafted
    assert fewer < 0.8 * steps


@pytest.mark.parametrize("more", [["--speculate", "17"], ["--draft-model-id", "nowhere/at/all"]])
def test_what_cannot_be_is_refused_at_once(more: list[str], tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(model("llama"))) as server:
        server.start("up", *more)
        assert server.commands["up"].wait(60) != 0
