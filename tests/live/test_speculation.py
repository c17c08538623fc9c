"""Speculative decoding through a whole server: answers equal those without drafts, also when the worker dies. That they
take fewer steps: see test_models.py."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.server import Server, SharedServers
from tests.live.test_models import LLAMA, Answer, ask, draft_metrics, streams
from tests.models import model

pytestmark = pytest.mark.live

CASE = LLAMA._replace(tokens=40)
# Drafting depends on measured step times, and on a busy machine these may say for a while that it does not pay.
MAX_ROUNDS = 4


def ask_all(server: Server) -> list[Answer]:
    """Eight prompts, four at a time; every second one has a seed."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(server, CASE, number, number % 2 == 1), range(8)))


def test_drafts_do_not_change_greedy_seeded_and_resumed_answers(shared_server: SharedServers, tmp_path: Path) -> None:
    """With the n-gram proposer, with a draft model that equals the served model, and with a head that knows nothing."""
    directory = str(model("llama"))
    flags = ("--model-id", directory, "--dtype", "float32", "--validation-workers", "1")
    server = shared_server(*flags)
    expected, expected_streams = ask_all(server), streams(server)
    assert draft_metrics(server) == (0, 0)
    from tests.worker.test_draft_heads import small_head

    head = str(small_head(tmp_path / "head", Path(directory)))
    ways = {"ngram": ["--speculate", "4"], "model": ["--draft-model-id", directory], "head": ["--draft-model-id", head]}
    for name, more in ways.items():
        with Server(tmp_path / name, *flags) as server:
            server.start("up", *more).wait_until_ready()
            for _ in range(MAX_ROUNDS):
                assert ask_all(server) == expected
                drafted, accepted = draft_metrics(server)
                if accepted or (name == "head" and drafted):
                    break
            assert (name != "head") <= accepted <= drafted
            assert drafted > 0
            assert server.metric("tgi_request_skipped_tokens_sum") == accepted
            assert streams(server, act=lambda server=server: server.kill("worker-0")) == expected_streams


@pytest.mark.parametrize("more", [["--speculate", "17"], ["--draft-model-id", "nowhere/at/all"]])
def test_invalid_draft_settings_end_the_start(more: list[str], tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(model("llama"))) as server:
        server.start("up", *more)
        assert server.commands["up"].wait(60) != 0
