"""Requests that crash a process, among others: only they fail, and all other streams are the same as without them."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.faults import sitecustomize as faults
from tests.live.server import Server
from tgi.microkernel.crash_isolation import CONVICTING_STRIKES

FAULTS = Path(__file__).parent / "faults"
INNOCENT = [(f"Prompt number {n}, " + "and some more of it " * n, {"max_new_tokens": 80}) for n in range(20)]
SAMPLED: list[tuple[str, dict[str, Any]]] = [
    (prompt, {**parameters, **({"do_sample": True, "seed": n} if n % 2 else {})})
    for n, (prompt, parameters) in enumerate(INNOCENT)
]


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model-id", str(tiny_llama), "--worker", "scripted", "--scripted-step-us", "20000")
    run = tmp_path_factory.mktemp("faults") / "run"
    with Server(run, *flags, env={"PYTHONPATH": str(FAULTS)}) as server:
        yield server.start().wait_until_ready()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    return contents(server.stream_all(SAMPLED))


def contents(streams: list[list[dict[str, Any]]]) -> list[Any]:
    """What each stream says: ids and the whole text."""
    return [([event["token"]["id"] for event in events], events[-1]["generated_text"]) for events in streams]


def crashes(server: Server, role: str) -> int:
    """How often a process of this role has crashed by itself."""
    lines = server.output_text().splitlines()
    return sum(f" {role}-" in line and "was killed by SIGSEGV; restarting it" in line for line in lines)


@pytest.mark.parametrize(
    ("seed", "role"),
    [
        (faults.ENCODING, "tokenizer"),
        (faults.DETOKENIZING, "tokenizer"),
        (faults.EVERY_FOURTH_TOKEN, "worker"),
        (faults.ADDED, "scheduler"),
        (faults.PLANNED, "scheduler"),
    ],
)
def test_only_the_request_that_crashes_a_process_fails(
    server: Server, undisturbed: list[Any], seed: int, role: str
) -> None:
    before, quarantined = crashes(server, role), server.metric("tgi_quarantined_requests")
    body = {"inputs": f"poison {seed}", "parameters": {"seed": seed, "max_new_tokens": 60, "details": True}}
    answers = []

    def poison() -> None:
        sender = threading.Thread(target=lambda: answers.append(server.client.post("/generate", json=body)))
        sender.start()
        sender.join(60)

    disturbed = server.stream_all(SAMPLED, act=poison, after=5)
    assert contents(disturbed) == undisturbed
    (answer,) = answers
    assert answer.status_code == 424, answer.text
    assert f"the {role} was killed by SIGSEGV" in answer.json()["error"]
    assert crashes(server, role) - before == CONVICTING_STRIKES
    assert server.metric("tgi_quarantined_requests") == quarantined + 1

    again = server.client.post("/generate", json=body)
    assert again.status_code == 424
    assert "in quarantine" in again.json()["error"]
    assert crashes(server, role) - before == CONVICTING_STRIKES
    listed = subprocess.run(
        [sys.executable, "-m", "tgi", "ps"], env=server.environment, capture_output=True, text=True, check=True
    ).stdout
    assert f"the {role} was killed by SIGSEGV" in listed


def test_a_stopped_worker_and_killed_tokenizers_fail_no_request(server: Server, undisturbed: list[Any]) -> None:
    def disturb() -> None:
        with server.suspended("worker-0"):
            for _ in range(3):
                for name in ("tokenizer-0", "tokenizer-1"):
                    server.kill(name)
                time.sleep(0.5)

    assert contents(server.stream_all(SAMPLED, act=disturb, after=5)) == undisturbed


def test_a_request_that_ends_its_worker_with_the_code_of_a_fatal_error_does_not_end_the_server(server: Server) -> None:
    body = {"inputs": "poison", "parameters": {"seed": faults.FATAL_EXIT, "max_new_tokens": 10}}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 424
    assert "the worker ended with code 3" in answer.json()["error"]
    server.wait_until_ready()
    assert server.generate("Any other request", max_new_tokens=3)["details"]["generated_tokens"] == 3
