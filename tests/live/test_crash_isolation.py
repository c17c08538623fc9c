"""Requests that crash a process, among others: only they fail, and all other streams are the same as without them."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import commands
from tests.live.faults import sitecustomize as faults
from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, python_path
from tgi.microkernel.recovery.crash_isolation import QUARANTINE_STRIKES

pytestmark = pytest.mark.live

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
    with Server(run, *flags, env=python_path(FAULTS)) as server:
        yield server.start().wait_until_ready()


@pytest.fixture(scope="module")
def impatient(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that replaces a process after two seconds without progress."""
    flags = ("--model-id", str(tiny_llama), "--worker", "scripted", "--scripted-step-us", "20000")
    run = tmp_path_factory.mktemp("hangs") / "run"
    with Server(run, *flags, "--hang-timeout", "2", env=python_path(FAULTS)) as server:
        yield server.start().wait_until_ready()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    return contents(server.stream_all(SAMPLED))


def contents(streams: list[list[dict[str, Any]]]) -> list[Any]:
    """What each stream says: ids and the whole text."""
    return [([event["token"]["id"] for event in events], events[-1]["generated_text"]) for events in streams]


def crashes(server: Server, role: str) -> int:
    """How often a process of this role has crashed by itself."""
    return restarts(server, role, "was killed by SIGSEGV")


def hangs(server: Server, role: str) -> int:
    """How often a process of this role was killed because it made no progress."""
    return restarts(server, role, "made no progress and was killed")


def restarts(server: Server, role: str, cause: str) -> int:
    lines = server.output_text().splitlines()
    return sum(f" {role}-" in line and f"{cause}; restarting it" in line for line in lines)


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
    assert crashes(server, role) - before == QUARANTINE_STRIKES
    assert server.metric("tgi_quarantined_requests") == quarantined + 1

    again = server.client.post("/generate", json=body)
    assert again.status_code == 424
    assert "in quarantine" in again.json()["error"]
    assert crashes(server, role) - before == QUARANTINE_STRIKES
    listed = commands.run("ps", check=True, TGI_RUN=str(server.run_directory)).stdout
    assert f"the {role} was killed by SIGSEGV" in listed


@pytest.mark.parametrize(
    ("seeds", "most"),
    [
        ((faults.EVERY_FOURTH_TOKEN, faults.EVERY_FOURTH_TOKEN), 2 * QUARANTINE_STRIKES),
        ((faults.ENCODING, faults.DETOKENIZING), 2 * QUARANTINE_STRIKES),
        # A crash of the worker is no evidence if the scheduler crashes before it knows the cause.
        ((faults.ADDED, faults.EVERY_FOURTH_TOKEN), 3 * QUARANTINE_STRIKES),
    ],
)
def test_only_two_requests_that_crash_processes_at_the_same_time_fail(
    server: Server, undisturbed: list[Any], seeds: tuple[int, int], most: int
) -> None:
    before = sum(crashes(server, role) for role in ("tokenizer", "scheduler", "worker"))
    quarantined = server.metric("tgi_quarantined_requests")
    bodies = [
        {"inputs": f"poison {seeds} {n}", "parameters": {"seed": seed, "max_new_tokens": 60}}
        for n, seed in enumerate(seeds)
    ]

    def poison() -> None:
        with ThreadPoolExecutor(2) as senders:
            answers.extend(senders.map(lambda body: server.client.post("/generate", json=body), bodies))

    answers: list[httpx.Response] = []
    assert contents(server.stream_all(SAMPLED, act=poison, after=5)) == undisturbed
    assert [answer.status_code for answer in answers[-2:]] == [424, 424], [answer.text for answer in answers]
    assert server.metric("tgi_quarantined_requests") == quarantined + 2
    crashed = sum(crashes(server, role) for role in ("tokenizer", "scheduler", "worker")) - before
    assert QUARANTINE_STRIKES < crashed <= most


def test_a_quarantine_holds_for_all_clients_and_after_restarts_of_front_ends(server: Server) -> None:
    body = {"inputs": "lasting poison", "parameters": {"seed": faults.PLANNED, "max_new_tokens": 9}}
    assert server.client.post("/generate", json=body).status_code == 424
    deaths, quarantined = crashes(server, "scheduler"), server.metric("tgi_quarantined_requests")

    def refused(path: str = "/generate") -> None:
        failures = server.metric("tgi_request_failure")
        answer = httpx.post(f"{server.url}{path}", json=body, headers={"x-request-id": "innocent"}, **CLIENT_OPTIONS)
        assert answer.status_code == 424
        assert "this request is in quarantine for 60 more minutes: the scheduler was killed by SIGSEGV" in answer.text
        assert server.metric("tgi_request_failure") == failures + 1

    refused()
    refused("/generate_stream")
    server.kill("api-0")
    server.wait_until_ready()
    refused()
    commands.run("restart", "api", check=True, TGI_RUN=str(server.run_directory))
    refused()
    for name in ("scheduler-0", "tokenizer-0", "tokenizer-1", "worker-0"):
        server.kill(name)
    server.wait_until_ready()
    refused()
    assert crashes(server, "scheduler") == deaths
    assert server.metric("tgi_quarantined_requests") == quarantined
    body["inputs"] = "another text"
    body["parameters"] = {"max_new_tokens": 2}
    assert server.client.post("/generate", json=body).status_code == 200


def test_tgi_why_tells_the_trial_of_a_request(server: Server) -> None:
    """Of the one that crashes its worker, and of one that shared the worker with it."""
    body = {"inputs": "told poison", "parameters": {"seed": faults.EVERY_FOURTH_TOKEN, "max_new_tokens": 60}}

    def poison() -> None:
        answer = server.client.post("/generate", json=body, headers={"x-request-id": "poison"})
        assert answer.status_code == 424

    server.stream_all([("Innocent", {"max_new_tokens": 200})], act=poison, after=5)
    told = commands.run("why", "poison", check=True, TGI_RUN=str(server.run_directory)).stdout
    for phase in ("recovery of worker-0", "queue on trial", "decode on trial", "on trial with 2 strikes"):
        assert phase in told, told
    key = re.search(r"others are on trial.*?: (\w{16})", told, re.DOTALL)
    assert key is not None, told
    other = commands.run("why", key[1], check=True, TGI_RUN=str(server.run_directory)).stdout
    assert "others are on trial" in other
    assert "released from trial" in other
    assert "ended with 200 tokens" in other


@pytest.mark.parametrize(
    ("seed", "role", "padding"),
    [
        (faults.HANGS_ENCODING, "tokenizer", 1),
        (faults.HANGS_ENCODING, "tokenizer", 2000),  # is encoded in a thread
        (faults.HANGS_ADDED, "scheduler", 1),
        (faults.HANGS_WORKER, "worker", 1),
    ],
)
def test_only_the_request_that_hangs_a_process_fails(
    impatient: Server, undisturbed: list[Any], seed: int, role: str, padding: int
) -> None:
    before = hangs(impatient, role)
    text = "poison " * padding
    body = {"inputs": text, "parameters": {"seed": seed, "max_new_tokens": 60, "truncate": 100}}
    answers = []

    def poison() -> None:
        sender = threading.Thread(target=lambda: answers.append(impatient.client.post("/generate", json=body)))
        sender.start()
        sender.join(TIMEOUT_SECONDS)

    assert contents(impatient.stream_all(SAMPLED, act=poison, after=5)) == undisturbed
    answer = answers[-1]
    assert answer.status_code == 424, answer.text
    assert f"the {role} made no progress and was killed" in answer.json()["error"]
    assert impatient.client.post("/generate", json=body).status_code == 424
    assert hangs(impatient, role) - before == QUARANTINE_STRIKES


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
