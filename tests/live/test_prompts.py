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
