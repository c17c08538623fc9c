"""Prompt logprobs through a whole server: exact, also if batched, cached, or interrupted by a kill; and the requests of
lm-eval and `vllm bench serve`."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.live.server import CLIENT_OPTIONS, Server
from tests.models import model

pytestmark = pytest.mark.live

MAX_TOTAL_TOKENS = 300
TEXT = "The capital of France is Paris. 👍🏽 Le garçon naïf. "


def prefill(server: Server, inputs: str, **parameters: Any) -> list[dict[str, Any]]:
    answer = server.generate(inputs, max_new_tokens=2, details=False, decoder_input_details=True, **parameters)
    return answer["details"]["prefill"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-id", str(model("llama")), "--dtype", "float32", "--validation-workers", "1")
    limits = ("--max-total-tokens", str(MAX_TOTAL_TOKENS), "--max-batch-prefill-tokens", "48")
    with Server(tmp_path_factory.mktemp("server") / "run", *arguments, *limits) as server:
        yield server.start().wait_until_ready()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model("llama") / "tokenizer.json"))


class Reference:
    """The logprobs of a prompt according to transformers."""

    def __init__(self) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        self._network = transformers.AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32)

    def rows(self, ids: list[int]) -> Any:
        """The logprobs of the whole vocabulary after each token but the last: [tokens - 1, vocabulary]."""
        with self._torch.inference_mode():
            return self._network(self._torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    def logprobs(self, ids: list[int]) -> list[float]:
        """The logprob of each token but the first."""
        return self.rows(ids).gather(1, self._torch.tensor(ids[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_prompt_logprobs_are_exact_batched_cached_and_after_kills(
    server: Server, tokenizer: Tokenizer, reference: Reference
) -> None:
    inputs = TEXT * 6
    expected = prefill(server, inputs)
    ids = tokenizer.encode(inputs).ids
    assert [token["id"] for token in expected] == ids
    assert expected[0]["logprob"] is None
    assert [token["logprob"] for token in expected[1:]] == pytest.approx(reference.logprobs(ids), abs=1e-4)

    server.generate(inputs, max_new_tokens=1)  # now its pages are cached
    assert prefill(server, inputs) == expected
    assert prefill(server, inputs, temperature=0.5, top_k=2, seed=4, repetition_penalty=1.3) == expected
    assert prefill(server, inputs, truncate=40)[1:] != expected[-39:]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(prefill, server, TEXT * n) for n in (1, 2, 6, 3, 6)]
        assert [other.result() for other in others][2] == others[4].result() == expected

    for target in ("worker-0", "scheduler-0", "tokenizer-0"):
        killing = threading.Thread(target=server.kill, args=(target,))
        with ThreadPoolExecutor(4) as pool:
            pending = [pool.submit(prefill, server, inputs) for _ in range(4)]
            killing.start()
            assert [one.result() for one in pending] == [expected] * 4, target
        killing.join()

    (choice,) = ask(server, inputs, logprobs=2, max_tokens=3, temperature=0)["choices"]
    columns = choice["logprobs"]
    assert columns["token_logprobs"][: len(ids)] == [token["logprob"] for token in expected]
    for name, token in zip(columns["tokens"], expected, strict=False):
        assert name.startswith("bytes:\\x") if "\ufffd" in token["text"] else name == token["text"]
    assert {len(column) for column in columns.values()} == {len(ids) + 3}
    assert columns["top_logprobs"][0] is None
    assert columns["text_offset"][len(ids)] == len(inputs)
    for token, begin in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert token.startswith(("bytes:", "<|")) or choice["text"][begin:].startswith(token)


def ask(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    """Completions of one or several prompts, with the prompt echoed and its logprobs."""
    answer = server.client.post("/v1/completions", json={"prompt": prompt, "echo": True, "logprobs": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_prompts_are_scored_without_generating(server: Server, tokenizer: Tokenizer, reference: Reference) -> None:
    """Texts and token ids up to the context length with max_tokens 0: exact, also after kills."""
    ids = tokenizer.encode(TEXT * 13).ids
    assert len(ids) > MAX_TOTAL_TOKENS
    prompts = [ids[:MAX_TOTAL_TOKENS], ids[:1], ids[5:40], ids[7:MAX_TOTAL_TOKENS]]
    scored = ask(server, prompts, max_tokens=0)
    total = sum(map(len, prompts))
    assert scored["usage"].pop("prompt_tokens_details")["cached_tokens"] <= total
    assert scored["usage"] == {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}
    for prompt, choice in zip(prompts, scored["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] in TEXT * 13
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(prompt)}
        assert columns["token_logprobs"][0] is None
        assert columns["token_logprobs"][1:] == pytest.approx(reference.logprobs(prompt), abs=1e-4)

    # A prompt has the same logprobs as text, as token ids, and if a token is generated.
    whole = tokenizer.encode(TEXT).ids
    by_ids, by_text = (ask(server, prompt, max_tokens=0)["choices"] for prompt in (whole, TEXT))
    assert by_ids == by_text
    assert by_ids[0]["text"] == TEXT
    (longer,) = ask(server, whole, max_tokens=1, temperature=0)["choices"]
    assert {name: column[:-1] for name, column in longer["logprobs"].items()} == by_ids[0]["logprobs"]
    (cut,) = ask(server, whole, max_tokens=0, truncate_prompt_tokens=5)["choices"]
    assert cut["logprobs"]["tokens"] == by_ids[0]["logprobs"]["tokens"][-5:]

    # The continuation is the same for token ids and for their text.
    texts = [ask(server, prompt, max_tokens=8, temperature=0, echo=False)["choices"][0] for prompt in (TEXT, whole)]
    assert texts[0] == texts[1]

    rejected = [
        {"prompt": ids[: MAX_TOTAL_TOKENS + 1], "echo": True, "max_tokens": 0},
        {"prompt": ids[:MAX_TOTAL_TOKENS], "echo": True, "max_tokens": 1},
        {"prompt": ids[:MAX_TOTAL_TOKENS], "max_tokens": 0},
    ]
    assert [server.client.post("/v1/completions", json=body).status_code for body in rejected] == [422] * 3

    for target in ("worker-0", "scheduler-0", "tokenizer-0"):
        killing = threading.Thread(target=server.kill, args=(target,))
        with ThreadPoolExecutor(4) as pool:
            pending = [pool.submit(ask, server, prompts, max_tokens=0) for _ in range(4)]
            killing.start()
            assert [one.result()["choices"] for one in pending] == [scored["choices"]] * 4, target
        killing.join()


@pytest.mark.parametrize("tokenized", [True, False])
def test_requests_of_lm_eval(server: Server, tokenizer: Tokenizer, reference: Reference, tokenized: bool) -> None:
    """lm-eval 0.4.13, model local-completions: the sum of the logprobs after a context, and whether each token is the
    most likely one. It ignores one generated token."""
    texts = [
        (context, context + rest) for context in ("The capital is", "Le garçon. 👍🏽") for rest in (" Paris.", " 今")
    ]
    pairs = [(tokenizer.encode(context).ids, tokenizer.encode(whole).ids) for context, whole in texts]
    if tokenized:  # the most likely token need not be the one that the tokenizer makes of the text
        context = pairs[0][0]
        pairs[1] = context, [*context, int(reference.rows([*context, 0])[-1].argmax())]
    prompts = [whole if tokenized else tokenizer.decode(whole, skip_special_tokens=False) for _, whole in pairs]
    body = {
        "model": "tgi",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = server.client.post("/v1/completions", json=body).json()
    found = []
    for choice, (context, whole) in zip(sorted(answer["choices"], key=lambda one: one["index"]), pairs, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        rows = reference.rows(whole)[len(context) - 1 :]
        assert sum(logprobs) == pytest.approx(sum(reference.logprobs(whole)[len(context) - 1 :]), abs=1e-4)
        assert greedy == (rows.argmax(-1).tolist() == whole[len(context) :])
        found.append(greedy)
    assert any(found) or not tokenized
    until = {
        "prompt": prompts,
        "model": "tgi",
        "max_tokens": 6,
        "temperature": 0.0,
        "stop": ["\n", "<|im_end|>"],
        "seed": 1234,
    }
    choices = server.client.post("/v1/completions", json=until).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(pairs)))


def test_requests_of_vllm_bench_serve(server: Server) -> None:
    """Concurrent streams, parsed as vLLM does: an event with choices is a token, one without is the usage. Chunks may
    have any size, and the white space around each is removed."""
    body = {
        "model": "tgi", "prompt": TEXT, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 24,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip

    async def one(client: httpx.AsyncClient) -> tuple[str, int, dict[str, int]]:
        text, tokens, usage, done, waiting = "", 0, {}, False, ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for chunk in answer.aiter_text():
                waiting += chunk.strip()
                *messages, waiting = waiting.split("\n\n")
                if waiting == "data: [DONE]" or _is_json(waiting.removeprefix("data: ")):
                    messages, waiting = [*messages, waiting], ""
                for message in filter(None, messages):
                    assert not done
                    data = message.removeprefix("data: ")
                    done = data == "[DONE]"
                    event = {} if done else json.loads(data)
                    if event.get("choices"):
                        tokens += 1
                        text += event["choices"][0]["text"]
                    elif event:
                        usage = event["usage"]
                        usage.pop("prompt_tokens_details")  # what the cache has depends on the others
        assert done
        assert not waiting
        return text, tokens, usage

    async def concurrently() -> list[tuple[str, int, dict[str, int]]]:
        async with httpx.AsyncClient(base_url=server.url, **CLIENT_OPTIONS) as client:
            return await asyncio.gather(*(one(client) for _ in range(12)))

    found = asyncio.run(concurrently())
    text, tokens, usage = found[0]
    assert found == [found[0]] * 12
    assert tokens == usage["completion_tokens"] == 24
    whole = server.client.post("/v1/completions", json=body | {"stream": False, "stream_options": None}).json()
    assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] <= usage["prompt_tokens"]
    assert (whole["choices"][0]["text"], whole["usage"]) == (text, usage)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_decisions_have_the_probabilities_of_the_labels(server: Server, reference: Reference) -> None:
    """Each question is one request, so the usage is that of its prompts."""
    lines = {"predicate": "A: false\nB: true", "choice": 'A: "x" - first\nB: "y"\nC: true', "score": "0: low\n1: high"}
    questions = [
        {"type": "predicate", "instructions": "Is it?"},
        {"type": "choice", "instructions": "Is it?", "choices": [
            {"value": "x", "description": "first"}, {"value": "y"}, {"value": True},
        ]},
        {"type": "score", "instructions": "Is it?", "levels": [{"label": "low"}, {"label": "high"}]},
    ]  # fmt: skip
    with httpx.Client(base_url=server.url, **CLIENT_OPTIONS) as client:
        whole = client.post("/v1/decisions", json={"input": TEXT, "questions": questions}).raise_for_status().json()
        tokenizer, prompt_tokens = Tokenizer.from_file(str(model("llama") / "tokenizer.json")), 0
        for answer in whole["answers"]:
            kind = "number of one level" if answer["type"] == "score" else "letter of one option"
            content = f"{TEXT}\n\nQuestion: Is it?\n{lines[answer['type']]}\nAnswer with the {kind} only."
            chat = {"messages": [{"role": "user", "content": content}]}
            ids = [
                one["id"]
                for one in client.post("/chat_tokenize", json=chat).raise_for_status().json()["tokenize_response"]
            ]
            prompt_tokens += len(ids)
            labels = [tokenizer.token_to_id(line[0]) for line in lines[answer["type"]].splitlines()]
            among_all = reference.rows([*ids, 0])[-1][labels].exp()
            wanted = (among_all / among_all.sum()).tolist()
            if answer["type"] == "predicate":
                assert answer["probability"] == pytest.approx(wanted[1], abs=1e-5)
                continue
            assert [one["probability"] for one in answer["probabilities"]] == pytest.approx(wanted, abs=1e-5)
            assert answer["confidence"] == pytest.approx(float(among_all.max()), rel=1e-3)
            if answer["type"] == "score":
                assert answer["score"] == pytest.approx(wanted[1], abs=1e-5)
        assert whole["usage"]["input_tokens"] == prompt_tokens
