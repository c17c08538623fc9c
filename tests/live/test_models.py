"""Real models behind a real server: transformers' answers, and the same answer under any load, to the bit."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.live.server import Server
from tests.models import demo_model, model

# All lengths up to twelve pages.
PROMPTS = [
    "The capital of France is" + " and the river runs through the city" * (n % 5) + f" number {n}" * (n * n // 20 + 1)
    for n in range(0, 20, 2)
]
# For the demo model: 35 tokens each, which is two pages and a few tokens (one page of our own kernels). All have begun
# long before the pages of the first ones leave no room for the last.
EVEN = [f"This is story number {n}:" + " and the river runs through the city" * 4 for n in range(4)]
SEEDED = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "typical_p": 0.95}
SEEDED |= {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
NEAR = 1e-5  # where the two best logits lie closer than this, either is right


class Case(NamedTuple):
    """A served model, what it is asked, and the room that it has for it."""

    kind: str
    dtype: str
    room: int  # tokens of all requests together
    prompts: list[str]  # all fit into the room at once, but not what they grow to, so rows are preempted
    few: int  # so many of them, from the first, do fit
    tokens: int  # of each answer


# Who computes itself and who asks transformers, in the numbers that show whether it is right; the real one in its own,
# or in those that the processor computes.
# What else there is of kinds and numbers differs in the worker alone: tests/worker has them all.
LLAMA = Case("llama", "float32", room=480, prompts=PROMPTS, few=3, tokens=24)
TINY = [LLAMA._replace(kind=kind) for kind in ("llama", "gpt2")]
DEMO = Case("demo", "auto", room=272, prompts=EVEN, few=2, tokens=40)
DEMO_32 = DEMO._replace(dtype="float32", tokens=20)


def served(*cases: Case) -> pytest.MarkDecorator:
    """Runs a test with these models. All tests of one model share its server."""
    return pytest.mark.parametrize("case", cases, indirect=True, ids=lambda case: f"{case.kind}-{case.dtype}")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def directory_of(case: Case) -> Path:
    return demo_model() if case.kind == "demo" else model(case.kind)


@pytest.fixture(scope="module")
def server(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-id", str(directory_of(case)), "--dtype", case.dtype, "--validation-workers", "1")
    room = ("--max-batch-total-tokens", str(case.room), "--max-total-tokens", str(case.room))
    with Server(tmp_path_factory.mktemp("models") / "run", *arguments, *room) as server:
        yield server.start().ready()


Answer = list[tuple[int, float]]  # id and logprob of each token


def ask(server: Server, case: Case, number: int, seeded: bool) -> Answer:
    """A prompt by its number, greedy or with its own seed. No answer is shorter than the case says."""
    chosen = {**SEEDED, "seed": number} if seeded else {}
    answer = server.generate(case.prompts[number], max_new_tokens=case.tokens, ignore_eos=True, **chosen)
    return [(token["id"], token["logprob"]) for token in answer["details"]["tokens"]]


def at_scheduler(server: Server) -> float:
    """Requests that run or wait."""
    return server.metric("tgi_batch_current_size") + server.metric("tgi_queue_size")


@served(*TINY, DEMO)
def test_same_answer_under_any_load(case: Case, server: Server) -> None:
    """Alone, from the cache, together, and together where rows are preempted. Every second one has a seed."""

    def together(count: int) -> list[Answer]:
        """Requests that the scheduler has before the first of them is computed, on machines of any speed."""
        with ThreadPoolExecutor(count) as pool:
            with server.paused("worker-0"):
                answers = pool.map(lambda number: ask(server, case, number, number % 2 == 1), range(count))
                server.until(lambda: at_scheduler(server) == count, f"{count} requests have arrived")
            return list(answers)

    count = len(case.prompts)
    alone = [ask(server, case, number, number % 2 == 1) for number in range(count)]
    cached = server.metric("tgi_prefix_cache_hit_tokens")
    assert ask(server, case, count - 1, (count - 1) % 2 == 1) == alone[-1]
    assert server.metric("tgi_prefix_cache_hit_tokens") >= cached + 16
    preempted = server.metric("tgi_preemptions")
    assert together(case.few) == alone[: case.few]
    assert server.metric("tgi_preemptions") == preempted
    assert together(count) == alone
    assert server.metric("tgi_preemptions") > preempted


@served(*TINY, DEMO_32)
def test_greedy_answers_are_those_of_transformers(case: Case, server: Server) -> None:
    """In float32, token by token."""
    import torch

    from tests.dequantized import transformers_model

    judge = transformers_model(directory_of(case), torch.float32)
    with ThreadPoolExecutor(len(case.prompts)) as pool:
        answers = pool.map(lambda number: ask(server, case, number, seeded=False), range(len(case.prompts)))
    for prompt, answer in zip(case.prompts, answers, strict=True):
        items = server.client.post("/tokenize", json={"inputs": prompt}).json()
        prompt_ids = [item["id"] for item in items]
        ids = [token for token, _ in answer]
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for place, (token, logprob) in enumerate(answer):
            assert logits[place].max() - logits[place, token] < NEAR, (prompt, place)
            assert abs(float(logprobs[place, token]) - logprob) < 1e-4, (prompt, place)


STORIES = [f"Write a long story about {what}." for what in ("a river", "two friends", "a ship", "the moon")]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@served(LLAMA, DEMO)
def test_kill_9_of_the_worker_changes_nothing(case: Case, server: Server) -> None:
    """Streams, greedy and seeded; the worker dies when each has shown 12 tokens. Nothing is decoded again."""
    undisturbed = streams(server)
    before = server.metric("tgi_resumed_tokens")
    assert streams(server, act=lambda: server.kill("worker-0")) == undisturbed
    assert server.metric("tgi_resumed_tokens") - before >= 4 * 12


def streams(server: Server, act: Any = None) -> list[Answer]:
    """Four streams at once, the second half with seeds; `act` is called when each has shown 12 tokens."""
    shown = [0] * 4

    def one(number: int) -> Answer:
        seeded = {**SEEDED, "seed": number} if number >= 2 else {}
        answer: Answer = []
        for event in server.stream(chat(STORIES[number]), max_new_tokens=40, **seeded):
            answer.append((event["token"]["id"], event["token"]["logprob"]))
            shown[number] += 1
        return answer

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(one, number) for number in range(4)]
        if act:
            server.until(lambda: min(shown) >= 12 or all(stream.done() for stream in running), "12 tokens of each")
            assert not any(stream.done() for stream in running), "too late to act"
            act()
        return [stream.result() for stream in running]


@served(DEMO)
def test_it_knows_the_capital_of_france_and_stops(server: Server) -> None:
    answer = server.generate(chat("What is the capital of France?"), max_new_tokens=60)
    assert "Paris" in answer["generated_text"]
    assert answer["details"]["finish_reason"] == "eos_token"


@served(DEMO)
def test_utf8_is_never_split(server: Server) -> None:
    prompt = chat("Repeat exactly: 😀 naïve 東京 🏳️‍🌈")
    with ThreadPoolExecutor(3) as pool:
        drawn = pool.map(
            lambda seed: list(server.stream(prompt, max_new_tokens=40, seed=seed, do_sample=True)), range(3)
        )
    for events in drawn:
        texts = [event["token"]["text"] for event in events if not event["token"]["special"]]
        assert "\ufffd" not in "".join(texts)
        assert events[-1]["generated_text"] == "".join(texts)


@served(DEMO)
@pytest.mark.parametrize("stop", ["Paris", "ris", "capital of"])
def test_stop_strings_cut_right_behind_themselves(server: Server, stop: str) -> None:
    events = list(server.stream(chat("What is the capital of France?"), max_new_tokens=60, stop=[stop]))
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["generated_text"].endswith(stop)
    assert events[-1]["generated_text"].count(stop) == 1


@served(DEMO)
def test_it_is_small(server: Server) -> None:
    sizes = {name: process.memory_info().rss / 2**20 for name, process in server.processes().items()}
    for name, size in sizes.items():
        if name.startswith(("api", "tokenizer")):
            assert size < 150, json.dumps(sizes)
