"""Logprobs of prompts through a whole tree: exact, in any company, cached or not, and once however much dies."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.live.server import Server
from tests.models import model

LONGEST = 300  # tokens of a request
TEXT = "The capital of France is Paris. 👍🏽 Le garçon naïf. "


def prefill(server: Server, inputs: str, **parameters: Any) -> list[dict[str, Any]]:
    answer = server.generate(inputs, max_new_tokens=2, details=False, decoder_input_details=True, **parameters)
    return answer["details"]["prefill"]  # type: ignore[no-any-return]


def test_they_are_exact_whatever_happens(tmp_path: Path) -> None:
    directory = model("llama")
    arguments = ("--model-id", str(directory), "--dtype", "float32", "--validation-workers", "1")
    with Server(tmp_path / "run", *arguments, "--max-batch-prefill-tokens", "48") as server:
        server.start().ready()
        inputs = TEXT * 6
        want = prefill(server, inputs)
        ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(inputs).ids
        assert [token["id"] for token in want] == ids
        assert want[0]["logprob"] is None
        network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.inference_mode():
            rows = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        theirs = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert [token["logprob"] for token in want[1:]] == pytest.approx(theirs, abs=1e-4)

        server.generate(inputs, max_new_tokens=1)  # now its pages are in the cache
        assert prefill(server, inputs) == want
        assert prefill(server, inputs, temperature=0.5, top_k=2, seed=4, repetition_penalty=1.3) == want
        assert prefill(server, inputs, truncate=40)[1:] != want[-39:]
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(prefill, server, TEXT * n) for n in (1, 2, 6, 3, 6)]
            assert [other.result() for other in others][2] == others[4].result() == want

        for victim in ("worker-0", "scheduler-0", "tokenizer-0"):
            killing = threading.Thread(target=server.kill, args=(victim,))
            with ThreadPoolExecutor(4) as pool:
                under_way = [pool.submit(prefill, server, inputs) for _ in range(4)]
                killing.start()
                assert [one.result() for one in under_way] == [want] * 4, victim
            killing.join()

        body = {"prompt": inputs, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
        (choice,) = server.client.post("/v1/completions", json=body).json()["choices"]
        columns = choice["logprobs"]
        assert columns["token_logprobs"][: len(ids)] == [token["logprob"] for token in want]
        assert columns["tokens"][: len(ids)] == [token["text"] for token in want]
        assert {len(column) for column in columns.values()} == {len(ids) + 3}
        assert columns["top_logprobs"][0] is None
        assert columns["text_offset"][len(ids)] == len(inputs)
        for token, begin in zip(columns["tokens"], columns["text_offset"], strict=True):
            assert "\ufffd" in token or choice["text"][begin:].startswith(token) or token.startswith("<|")


def test_prompts_are_scored(tmp_path: Path) -> None:
    """Texts and token ids, up to the whole context, without a token: exact, and once whatever dies."""
    directory = model("llama")
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT * 13).ids
    assert len(ids) > LONGEST
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def theirs(prompt: list[int]) -> list[float]:
        with torch.inference_mode():
            rows = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    arguments = ("--model-id", str(directory), "--dtype", "float32", "--validation-workers", "1")
    limits = ("--max-total-tokens", str(LONGEST), "--max-batch-prefill-tokens", "96")
    with Server(tmp_path / "run", *arguments, *limits) as server:
        server.start().ready()

        def ask(prompt: Any, **fields: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **fields}
            answer = server.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        prompts = [ids[:LONGEST], ids[:1], ids[5:40], ids[7:LONGEST]]
        scored = ask(prompts)
        assert scored["usage"] == {
            "prompt_tokens": sum(map(len, prompts)),
            "completion_tokens": 0,
            "total_tokens": sum(map(len, prompts)),
        }
        for prompt, choice in zip(prompts, scored["choices"], strict=True):
            assert choice["finish_reason"] == "length"
            columns = choice["logprobs"]
            assert {len(column) for column in columns.values()} == {len(prompt)}
            assert columns["token_logprobs"][0] is None
            assert columns["token_logprobs"][1:] == pytest.approx(theirs(prompt), abs=1e-4)
        text = scored["choices"][2]["text"]
        assert text in TEXT * 13

        # The same prompt as a text, and with a token behind it, has the same logprobs.
        whole = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
        by_ids, by_text, more = ask(whole), ask(TEXT), ask(whole, max_tokens=1, temperature=0)
        assert by_ids["choices"] == by_text["choices"]
        assert by_ids["choices"][0]["text"] == TEXT
        columns, longer = by_ids["choices"][0]["logprobs"], more["choices"][0]["logprobs"]
        assert {name: column[:-1] for name, column in longer.items()} == columns

        # What is generated behind ids is what is generated behind their text, and streams say the same.
        body = {"temperature": 0, "max_tokens": 8, "echo": False, "logprobs": None}
        texts = [ask(prompt, **body)["choices"][0]["text"] for prompt in (TEXT, whole)]
        assert texts[0] == texts[1]

        answer = server.client.post(
            "/v1/completions", json={"prompt": ids[: LONGEST + 1], "echo": True, "max_tokens": 0}
        )
        assert answer.status_code == 422
        for fields in ({"max_tokens": 0}, {"max_tokens": 1, "echo": True}):
            assert server.client.post("/v1/completions", json={"prompt": ids[:LONGEST], **fields}).status_code == 422

        for victim in ("worker-0", "scheduler-0", "tokenizer-0"):
            killing = threading.Thread(target=server.kill, args=(victim,))
            with ThreadPoolExecutor(4) as pool:
                under_way = [pool.submit(ask, prompts) for _ in range(4)]
                killing.start()
                assert [one.result()["choices"] for one in under_way] == [scored["choices"]] * 4, victim
            killing.join()
