"""Speculative decoding through a whole server: answers equal those without drafts, also when the worker dies, and take
fewer steps."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.server import Server, SharedServers
from tests.live.test_models import LLAMA, Answer, ask, chat, streams
from tests.models import model

pytestmark = pytest.mark.live

CASE = LLAMA._replace(tokens=40)
TEXT = "The old bridge at the end of the street was built by two brothers. Every stone came from the quarry."
COPY_PROMPTS = [chat(f"Repeat this text {n} times: {TEXT}") for n in (2, 3)] + [chat("Write a poem about a bridge.")]
# Drafting depends on measured step times, and on a busy machine these may say for a while that it does not pay.
MAX_SERVERS = 3
MAX_ROUNDS = 4


def ask_all(server: Server) -> list[Answer]:
    """Eight prompts, four at a time; every second one has a seed."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(server, CASE, number, number % 2 == 1), range(8)))


def draft_metrics(server: Server) -> tuple[float, float]:
    """How many tokens were drafted, and how many of these accepted."""
    return server.metric("tgi_draft_tokens"), server.metric("tgi_accepted_draft_tokens")


def test_drafts_do_not_change_greedy_seeded_and_resumed_answers(shared_server: SharedServers, tmp_path: Path) -> None:
    """With the n-gram proposer, and with a draft model that equals the served model."""
    directory = str(model("llama"))
    flags = ("--model-id", directory, "--dtype", "float32", "--validation-workers", "1")
    server = shared_server(*flags)
    expected, expected_streams = ask_all(server), streams(server)
    assert draft_metrics(server) == (0, 0)
    for name, more in {"ngram": ["--speculate", "4"], "model": ["--draft-model-id", directory]}.items():
        with Server(tmp_path / name, *flags) as server:
            server.start("up", *more).wait_until_ready()
            for _ in range(MAX_ROUNDS):
                assert ask_all(server) == expected
                drafted, accepted = draft_metrics(server)
                if accepted:
                    break
            assert 0 < accepted <= drafted
            assert server.metric("tgi_request_skipped_tokens_sum") == accepted
            assert streams(server, act=lambda server=server: server.kill("worker-0")) == expected_streams


def copy_answers(server: Server) -> tuple[list[Answer], float]:
    """The answers to COPY_PROMPTS, which are the same one by one and together, and how many steps they took."""

    def answer(prompt: str) -> Answer:
        details = server.generate(prompt, max_new_tokens=40)["details"]
        return [(token["id"], token["logprob"]) for token in details["tokens"]]

    before = server.metric("tgi_batch_inference_count")
    with ThreadPoolExecutor(3) as pool:
        alone = [answer(prompt) for prompt in COPY_PROMPTS]
        together = list(pool.map(answer, COPY_PROMPTS))
    assert together == alone
    return alone, server.metric("tgi_batch_inference_count") - before


@pytest.mark.timeout(600)
def test_the_demo_model_copies_text_in_fewer_steps(
    demo_model: Path, shared_server: SharedServers, tmp_path: Path
) -> None:
    expected, steps = copy_answers(shared_server("--model-id", str(demo_model)))
    tried: list[float] = []
    for number in range(MAX_SERVERS):
        with Server(tmp_path / str(number), "--model-id", str(demo_model), "--validation-workers", "1") as server:
            server.start("up", "--speculate", "4").wait_until_ready()
            for _ in range(MAX_ROUNDS):
                answers, fewer_steps = copy_answers(server)
                assert answers == expected
                tried.append(fewer_steps)
                if fewer_steps < 0.8 * steps:
                    drafted, accepted = draft_metrics(server)
                    assert 0 < accepted < drafted
                    return
    pytest.fail(f"{steps} steps without drafts, and with drafts {tried}")


@pytest.mark.parametrize("more", [["--speculate", "17"], ["--draft-model-id", "nowhere/at/all"]])
def test_invalid_draft_settings_end_the_start(more: list[str], tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(model("llama"))) as server:
        server.start("up", *more)
        assert server.commands["up"].wait(60) != 0
