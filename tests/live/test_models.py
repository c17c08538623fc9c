"""Real models through a whole server: answers equal those of transformers, and are bitwise the same under any load."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.live.server import MAX_ATTEMPTS, Server, scheduled_requests
from tests.live.test_grammars import PERSON
from tests.live.test_grammars import chat as chat_in_form
from tests.models import demo_model, model, t5_model
from tests.schemas import validate
from tgi.microkernel.host import rundir

pytestmark = pytest.mark.live

# Lengths up to twelve pages.
PROMPTS = [
    "The capital of France is" + " and the river runs through the city" * (n % 5) + f" number {n}" * (n * n // 20 + 1)
    for n in range(0, 20, 2)
]
# For the demo model: 35 tokens each, which is two pages and a few tokens (one page with our own kernels). All are
# running long before the first ones need the pages of the last.
EVEN = [f"This is story number {n}:" + " and the river runs through the city" * 4 for n in range(4)]
SEEDED = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "typical_p": 0.95}
SEEDED |= {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
# Drafting depends on measured step times, and on a busy machine these may say for a while that it does not pay.
MAX_DRAFT_SERVERS = 3
TIE = 1e-5  # if the two highest logits differ by less, either token is right


class Case(NamedTuple):
    """A served model, its prompts, and the size of its KV cache."""

    kind: str
    dtype: str
    kv_tokens: int  # size of the KV cache
    prompts: list[str]  # all fit into the KV cache, but not with their answers, so that requests are preempted
    few: int  # the first ones that fit with their answers
    tokens: int  # of each answer


# One model of our own implementation and one of transformers', in float32, where wrong results show; and the demo model
# in its own dtype. Other models and dtypes differ only in the worker: see tests/worker.
LLAMA = Case("llama", "float32", kv_tokens=480, prompts=PROMPTS, few=3, tokens=24)
TINY = [LLAMA._replace(kind=kind) for kind in ("llama", "persimmon")]
FLAN = LLAMA._replace(
    kind="flan-t5"
)  # an encoder has the prompt: greedy tokens are compared in tests/worker/test_t5.py
DEMO = Case("demo", "auto", kv_tokens=272, prompts=EVEN, few=2, tokens=40)
DEMO_32 = DEMO._replace(dtype="float32", tokens=20)


def served(*cases: Case) -> pytest.MarkDecorator:
    """Parametrizes a test with models. All tests of one model share its server."""
    return pytest.mark.parametrize("case", cases, indirect=True, ids=lambda case: f"{case.kind}-{case.dtype}")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def directory_of(case: Case) -> Path:
    if case is FLAN:
        return t5_model(case.kind)
    return demo_model() if case.kind == "demo" else model(case.kind)


@pytest.fixture(scope="module")
def server(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-id", str(directory_of(case)), "--dtype", case.dtype, "--validation-workers", "1")
    limits = ("--max-batch-total-tokens", str(case.kv_tokens), "--max-total-tokens", str(case.kv_tokens))
    run = tmp_path_factory.mktemp("models") / "run"
    with Server(run, *arguments, *limits, forked=case is not DEMO) as server:  # whose memory is measured
        yield server.start().wait_until_ready()


Answer = list[tuple[int, float]]  # id and logprob of each token


def ask(server: Server, case: Case, number: int, seeded: bool) -> Answer:
    """The answer to prompt `number`, greedy or with the number as seed. Answers have exactly `case.tokens` tokens."""
    chosen = {**SEEDED, "seed": number} if seeded else {}
    answer = server.generate(case.prompts[number], max_new_tokens=case.tokens, ignore_eos=True, **chosen)
    return [(token["id"], token["logprob"]) for token in answer["details"]["tokens"]]


@served(*TINY, FLAN, DEMO)
def test_same_answer_under_any_load(case: Case, server: Server) -> None:
    """Alone, with a cached prefix, concurrently, and concurrently with preemption. Every second request has a seed."""

    def together(count: int) -> list[Answer]:
        """The answers of concurrent requests. The worker is suspended until the scheduler has all of them."""
        with ThreadPoolExecutor(count) as pool:
            with server.suspended("worker-0"):
                answers = pool.map(lambda number: ask(server, case, number, number % 2 == 1), range(count))
                server.wait_until(lambda: scheduled_requests(server) == count, f"{count} requests have arrived")
            return list(answers)

    count = len(case.prompts)
    alone = [ask(server, case, number, number % 2 == 1) for number in range(count)]
    cached = server.metric("tgi_prefix_cache_hit_tokens")
    assert ask(server, case, count - 1, (count - 1) % 2 == 1) == alone[-1]
    assert server.metric("tgi_prefix_cache_hit_tokens") >= cached + 16
    preempted = server.metric("tgi_preemptions")
    assert together(case.few) == alone[: case.few]
    assert server.metric("tgi_preemptions") == preempted
    for _ in range(MAX_ATTEMPTS):  # on a busy machine the suspended worker may be replaced before all have arrived
        assert together(count) == alone
        if server.metric("tgi_preemptions") > preempted:
            break
    assert server.metric("tgi_preemptions") > preempted


@served(*TINY, DEMO_32)
def test_greedy_answers_equal_those_of_transformers(case: Case, server: Server) -> None:
    """In float32, token by token."""
    import torch

    from tests.dequantized import transformers_model

    reference = transformers_model(directory_of(case), torch.float32)
    with ThreadPoolExecutor(len(case.prompts)) as pool:
        answers = pool.map(lambda number: ask(server, case, number, seeded=False), range(len(case.prompts)))
    for prompt, answer in zip(case.prompts, answers, strict=True):
        items = server.client.post("/tokenize", json={"inputs": prompt}).json()
        prompt_ids = [item["id"] for item in items]
        ids = [token for token, _ in answer]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for position, (token, logprob) in enumerate(answer):
            assert logits[position].max() - logits[position, token] < TIE, (prompt, position)
            assert abs(float(logprobs[position, token]) - logprob) < 1e-4, (prompt, position)


STORIES = [f"Write a long story about {what}." for what in ("a river", "two friends", "a ship", "the moon")]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@served(LLAMA, DEMO)
def test_streams_continue_after_worker_kill(case: Case, server: Server) -> None:
    """Greedy and seeded streams; the worker is killed when each has shown 12 tokens."""
    undisturbed = streams(server)
    for _ in range(MAX_ATTEMPTS):  # on a busy machine streams may have been computed before the kill
        before = server.metric("tgi_recomputed_tokens")
        assert streams(server, act=lambda: server.kill("worker-0")) == undisturbed
        recomputed = server.metric("tgi_recomputed_tokens") - before
        if recomputed >= 4 * 12:
            break
    assert recomputed >= 4 * 12
    (worker,) = (one for one in rundir.read_states(server.run_directory) if one.role == "worker")
    if not worker.facts["kernels"].startswith("our own"):
        return
    server.wait_until(lambda: worker_starts(server), "the new worker has reported its start")
    assert not any("loading weights" in line for line in worker_starts(server)), "its predecessor has left them"
    (left,) = (one for one in psutil.Process(server.commands["up"].pid).children() if os.getpgid(one.pid) != one.pid)
    left.kill()
    assert streams(server, act=lambda: server.kill("worker-0")) == undisturbed
    server.wait_until(lambda: "loading weights" in worker_starts(server)[-1], "a worker has loaded them again")


def worker_starts(server: Server) -> list[str]:
    """The reports of workers that have replaced another one."""
    return [line for line in server.output_text().splitlines() if "worker-0 has started in" in line]


def streams(server: Server, act: Callable[[], object] | None = None) -> list[Answer]:
    """Four streams at once, the second half with seeds; `act` is called when each has shown 12 tokens."""
    requests = [
        (chat(story), {"max_new_tokens": 40, **(SEEDED | {"seed": number} if number >= 2 else {})})
        for number, story in enumerate(STORIES)
    ]
    streamed = server.stream_all(requests, act, after=12)
    return [[(event["token"]["id"], event["token"]["logprob"]) for event in events] for events in streamed]


@served(DEMO)
def test_demo_model_answers_and_ends_with_eos(server: Server) -> None:
    answer = server.generate(chat("What is the capital of France?"), max_new_tokens=60)
    assert "Paris" in answer["generated_text"]
    assert answer["details"]["finish_reason"] == "eos_token"


@served(DEMO)
def test_no_event_splits_a_utf8_character(server: Server) -> None:
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
def test_the_text_ends_with_the_stop_string(server: Server, stop: str) -> None:
    events = list(server.stream(chat("What is the capital of France?"), max_new_tokens=60, stop=[stop]))
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["generated_text"].endswith(stop)
    assert events[-1]["generated_text"].count(stop) == 1


COPIED = "The old bridge at the end of the street was built by two brothers. Every stone came from the quarry."
COPY_PROMPTS = [chat(f"Repeat this text {n} times: {COPIED}") for n in (2, 3)] + [chat("Write a poem about a bridge.")]


def copy_answers(server: Server, clients: int) -> list[Answer]:
    """The answers to COPY_PROMPTS, this number of them at once."""

    def answer(prompt: str) -> Answer:
        details = server.generate(prompt, max_new_tokens=40)["details"]
        return [(token["id"], token["logprob"]) for token in details["tokens"]]

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(answer, COPY_PROMPTS))


def draft_metrics(server: Server) -> tuple[float, float]:
    """How many tokens were drafted, and how many of these accepted."""
    return server.metric("tgi_draft_tokens"), server.metric("tgi_accepted_draft_tokens")


@pytest.mark.timeout(600)
@served(DEMO)
def test_drafts_copy_text_in_fewer_steps(case: Case, server: Server, tmp_path: Path) -> None:
    """The same answers as without drafts, one by one and together."""
    expected = copy_answers(server, 1)
    steps = sum(map(len, expected))  # one by one, without drafts
    tried: list[float] = []
    for number in range(MAX_DRAFT_SERVERS):
        flags = ("--model-id", str(directory_of(case)), "--speculate", "4", "--validation-workers", "1")
        with Server(tmp_path / str(number), *flags) as drafting:
            drafting.start().wait_until_ready()
            for _ in range(MAX_ATTEMPTS):
                before = drafting.metric("tgi_batch_inference_count")
                assert copy_answers(drafting, 1) == expected
                tried.append(drafting.metric("tgi_batch_inference_count") - before)
                assert copy_answers(drafting, 3) == expected
                if tried[-1] < 0.8 * steps:
                    drafted, accepted = draft_metrics(drafting)
                    assert 0 < accepted < drafted
                    return
    pytest.fail(f"{steps} tokens, and with drafts {tried} steps")


@served(DEMO)
def test_answers_to_grammars_are_valid(server: Server) -> None:
    """Greedy, and seeded with several grammars at once: answers that end with EOS are valid."""
    colour = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    # By itself the greedy answer never ends: its number has ever more digits.
    quotient = {"type": "object", "properties": {"quotient": {"type": "number"}}}
    body = {"messages": [{"role": "user", "content": "What is one divided by three? Answer in JSON."}]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": quotient}}
    answer = server.client.post(
        "/v1/chat/completions", json=body | {"response_format": form, "temperature": 0, "max_tokens": 80}
    ).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert set(json.loads(answer["message"]["content"])) <= {"quotient"}
    schemas = [PERSON, colour, {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}]

    def texts(schema: Any) -> list[str]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        choices = chat_in_form(server, form, n=2, seed=3, max_tokens=80)["choices"]
        return [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]

    with ThreadPoolExecutor(len(schemas)) as pool:
        for schema, ended in zip(schemas, pool.map(texts, schemas), strict=True):
            assert ended
            for text in ended:
                validate(text, schema)


@served(DEMO)
def test_api_and_tokenizer_use_less_than_150_mb(server: Server) -> None:
    sizes = {name: process.memory_info().rss / 2**20 for name, process in server.processes().items()}
    for name, size in sizes.items():
        if name.startswith(("api", "tokenizer")):
            assert size < 150, json.dumps(sizes)


@served(FLAN)
def test_what_an_encoder_decoder_model_tells_of_its_prompt(case: Case, server: Server) -> None:
    """The decoder's start alone, which no count includes."""
    answer = server.generate(case.prompts[0], max_new_tokens=2, decoder_input_details=True)
    assert answer["details"]["prefill"] == [{"id": 0, "text": "<pad>", "logprob": None}]
    body = {"model": "tgi", "prompt": [5, 6, 1], "max_tokens": 2, "ignore_eos": True}
    usage = server.client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
