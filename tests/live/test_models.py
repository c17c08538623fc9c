"""Real models behind a real server: transformers' answers, and the same answer under any load, to the bit."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server
from tests.models import model

PROMPTS = [
    "The capital of France is" + " and the river runs through the city" * (n % 5) + f" number {n}" * (n * n // 20 + 1)
    for n in range(20)
]
SEEDED = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "typical_p": 0.95}
SEEDED |= {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
AT_ONCE = 16
NEAR = 1e-5  # where the two best logits lie closer than this, either is right


Answer = list[tuple[int, float]]  # id and logprob of each token


def ask(server: Server, number: int, tokens: int, **parameters: Any) -> Answer:
    answer = server.generate(PROMPTS[number], max_new_tokens=tokens, **parameters)
    return [(token["id"], token["logprob"]) for token in answer["details"]["tokens"]]


def ask_all(server: Server, numbers: range, tokens: int, at_once: int, seeded: bool) -> list[Answer]:
    """Prompts by their numbers, greedy or each with its own seed, `at_once` at a time."""

    def one(number: int) -> Answer:
        return ask(server, number, tokens, **({**SEEDED, "seed": number} if seeded else {}))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, numbers))


def reference(directory: Path, prompts: list[str], answers: list[Answer], server: Server) -> None:
    """Holds greedy answers against transformers in float32, token by token."""
    import torch
    import transformers

    judge = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    judge.eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        items = server.client.post("/tokenize", json={"inputs": prompt}).json()
        prompt_ids = [item["id"] for item in items]
        ids = [token for token, _ in answer]
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for place, (token, logprob) in enumerate(answer):
            assert logits[place].max() - logits[place, token] < NEAR, (prompt, place)
            assert abs(float(logprobs[place, token]) - logprob) < 1e-4, (prompt, place)


def check(directory: Path, dtype: str, tmp_path: Path, numbers: range, tokens: int, few_pages: int) -> None:
    """Every way to load the server gives the same bits; in float32 they are transformers'."""
    arguments = ("--model-id", str(directory), "--dtype", dtype, "--validation-workers", "1")
    answers: dict[tuple[str, bool], list[Answer]] = {}  # how the server was loaded, and whether with seeds
    with Server(tmp_path / "roomy", *arguments) as server:
        server.start().ready()
        for seeded in (False, True):
            answers["alone, cold", seeded] = ask_all(server, numbers, tokens, 1, seeded)
            answers["together, warm", seeded] = ask_all(server, numbers, tokens, AT_ONCE, seeded)
        answers["alone, warm", False] = ask_all(server, numbers, tokens, 1, False)
        assert server.metric("tgi_prefix_cache_hit_tokens") > 0
        if dtype == "float32":
            reference(directory, [PROMPTS[n] for n in numbers], answers["alone, cold", False], server)
    with Server(tmp_path / "tight", *arguments) as server:
        # Prompts and answers of 16 requests are several times what fits, so rows are preempted.
        server.start("up", "--max-batch-total-tokens", str(few_pages), "--max-total-tokens", str(few_pages)).ready()
        for seeded in (False, True):
            answers["together, preempted", seeded] = ask_all(server, numbers, tokens, AT_ONCE, seeded)
        assert server.metric("tgi_preemptions") > 0
    for (how, seeded), got in answers.items():
        for number, a, b in zip(numbers, got, answers["alone, cold", seeded], strict=True):
            assert a == b, f"{how}, {'seeded' if seeded else 'greedy'}: {PROMPTS[number]!r}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_same_answer_under_any_load(kind: str, dtype: str, tmp_path: Path) -> None:
    check(model(kind), dtype, tmp_path, range(20), tokens=16, few_pages=384)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_gives_the_same_answer_under_any_load(demo_model: Path, dtype: str, tmp_path: Path) -> None:
    check(demo_model, dtype, tmp_path, range(1, 20, 3), tokens=8, few_pages=272)


STORIES = [f"Write a long story about {what}." for what in ("a river", "two friends", "a ship", "the moon")] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "demo"])
def test_kill_9_of_the_worker_changes_nothing(name: str, dtype: str, tmp_path: Path, demo_model: Path) -> None:
    """Eight streams, greedy and seeded; the worker dies when each has shown 20 tokens. Nothing is decoded again."""
    directory, prompts = (
        (demo_model, [chat(story) for story in STORIES]) if name == "demo" else (model("llama"), PROMPTS)
    )
    with Server(
        tmp_path / "run", "--model-id", str(directory), "--dtype", dtype, "--validation-workers", "1"
    ) as server:
        server.start().ready()
        undisturbed = streams(server, prompts)
        before = server.metric("tgi_resumed_tokens")
        assert streams(server, prompts, act=lambda: server.kill("worker-0")) == undisturbed
        assert server.metric("tgi_resumed_tokens") - before >= 8 * 20


def streams(server: Server, prompts: list[str], act: Any = None) -> list[Answer]:
    """Eight streams at once, the second half with seeds; `act` is called when each has shown 20 tokens."""
    shown = [0] * 8

    def one(number: int) -> Answer:
        seeded = {**SEEDED, "seed": number} if number >= 4 else {}
        answer: Answer = []
        for event in server.stream(prompts[number], max_new_tokens=60, **seeded):
            answer.append((event["token"]["id"], event["token"]["logprob"]))
            shown[number] += 1
        return answer

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(one, number) for number in range(8)]
        if act:
            server.until(lambda: min(shown) >= 20 or all(stream.done() for stream in running), "20 tokens of each")
            assert not any(stream.done() for stream in running), "too late to act"
            act()
        return [stream.result() for stream in running]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def demo(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("demo") / "run") as server:
        yield server.start().ready()


def test_it_knows_the_capital_of_france_and_stops(demo: Server) -> None:
    answer = demo.generate(chat("What is the capital of France?"), max_new_tokens=60)
    assert "Paris" in answer["generated_text"]
    assert answer["details"]["finish_reason"] == "eos_token"


def test_utf8_is_never_split(demo: Server) -> None:
    prompt = chat("Repeat exactly: 😀 naïve 東京 🏳️‍🌈")
    for seed in range(3):
        events = list(demo.stream(prompt, max_new_tokens=40, seed=seed, do_sample=True))
        texts = [event["token"]["text"] for event in events if not event["token"]["special"]]
        assert "\ufffd" not in "".join(texts)
        assert events[-1]["generated_text"] == "".join(texts)


@pytest.mark.parametrize("stop", ["Paris", "ris", "capital of"])
def test_stop_strings_cut_right_behind_themselves(demo: Server, stop: str) -> None:
    events = list(demo.stream(chat("What is the capital of France?"), max_new_tokens=60, stop=[stop]))
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["generated_text"].endswith(stop)
    assert events[-1]["generated_text"].count(stop) == 1


def test_it_is_small(demo: Server) -> None:
    sizes = {name: process.memory_info().rss / 2**20 for name, process in demo.processes().items()}
    for name, size in sizes.items():
        if name.startswith(("api", "tokenizer")):
            assert size < 150, json.dumps(sizes)
