"""Sampling parameters through a whole server with a real model: their effect, also after a worker is killed."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.live.server import Server, SharedServers, event_lines
from tests.models import model

pytestmark = pytest.mark.live

PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.4,
    "presence_penalty": 0.6,
    "typical_p": 0.9,
    "min_p": 0.001,
    "temperature": 0.8,
    "seed": 5,
}
BODY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 60, "logprobs": 0}


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """The answer of POST /v1/completions."""
    answer = server.client.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The `logprobs` object of one completion, with its tokens and their logprobs."""
    return ask(server, **fields)["choices"][0]["logprobs"]  # type: ignore[no-any-return]


def encoded(server: Server, text: str) -> list[int]:
    answer = server.client.post("/tokenize", json={"inputs": text, "add_special_tokens": False})
    return [token["id"] for token in answer.json()]


def agree(native: list[dict[str, Any]], tokens: list[str]) -> bool:
    """Whether tokens of /v1 are those of a native route; on /v1 parts of characters are written as `bytes:\\xf0`."""
    pairs = zip(native, tokens, strict=True)
    return all(token in (one["text"], "bytes:" + token[6:]) for one, token in pairs)


def stream(server: Server, act: Callable[[], Any], after: int, **fields: Any) -> dict[str, Any]:
    """The same, streamed; `act` is called in another thread once `after` tokens have been received."""
    text = ""
    tokens: list[str] = []
    logprobs: list[float] = []
    acting = threading.Thread(target=act)
    with server.client.stream("POST", "/v1/completions", json=BODY | fields | {"stream": True}) as answer:
        for line in event_lines(answer):
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                text += choices[0]["text"]
                tokens += choices[0]["logprobs"]["tokens"]
                logprobs += choices[0]["logprobs"]["token_logprobs"]
                if len(tokens) == after:
                    acting.start()
    acting.join()
    return {"text": text, "tokens": tokens, "token_logprobs": logprobs}


@pytest.fixture
def server(shared_server: SharedServers) -> Server:
    return shared_server("--model-id", str(model("llama")), "--dtype", "float32", "--validation-workers", "1")


def test_penalties_bias_and_bad_words_hold_after_kills(server: Server) -> None:
    (most_likely,) = server.generate(BODY["prompt"], max_new_tokens=1)["details"]["tokens"]
    fields = {**PENALTIES, "logit_bias": {str(most_likely["id"]): 1.5}}
    free = complete(server, **fields)
    fields["bad_words"] = [text for text in free["tokens"] if text.isalpha()]
    expected = complete(server, **fields)
    assert expected["tokens"] != complete(server, seed=PENALTIES["seed"])["tokens"]
    assert not set(expected["tokens"]) & set(fields["bad_words"])
    for target in ("worker-0", "tokenizer-0"):
        got = stream(server, lambda name=target: server.kill(name), 15, **fields)
        assert (got["tokens"], got["token_logprobs"]) == (expected["tokens"], expected["token_logprobs"]), target
    forced = complete(server, temperature=2, logit_bias={str(most_likely["id"]): 100}, max_tokens=5)
    assert agree([most_likely] * 5, forced["tokens"])
    banned = complete(server, temperature=0, logit_bias={str(most_likely["id"]): -100}, max_tokens=1)
    assert banned["tokens"] != forced["tokens"][:1]


def test_min_p_of_one_draws_the_most_likely_token(server: Server) -> None:
    greedy = server.generate(BODY["prompt"], max_new_tokens=20)["details"]
    answer = server.generate(BODY["prompt"], max_new_tokens=20, min_p=1.0, temperature=2.0, seed=1)["details"]
    ids = [[token["id"] for token in details["tokens"]] for details in (answer, greedy)]
    assert ids[0] == ids[1]
    assert answer["seed"] == 1  # it was sampled, from one token per step
    drawn, most_likely = complete(server, min_p=1.0), complete(server, temperature=0)
    assert drawn["tokens"] == most_likely["tokens"]


def test_xtc_changes_the_text_and_is_reproducible(server: Server) -> None:
    fields = {"xtc_threshold": 0.01, "seed": 5}
    neutral, changed, again = (complete(server, **fields, xtc_probability=share) for share in (0, 0.7, 0.7))
    assert changed == again
    assert changed["tokens"] != neutral["tokens"]
    native = server.generate(BODY["prompt"], max_new_tokens=60, **fields, xtc_probability=0.7)["details"]
    assert agree(native["tokens"], changed["tokens"])


def test_stop_token_ids(server: Server) -> None:
    """Whole and streamed, for each choice, with min_tokens, and with the stop token included in the text."""
    tokens = server.generate(BODY["prompt"], max_new_tokens=20, ignore_eos=True)["details"]["tokens"]
    ids = [token["id"] for token in tokens]
    at = next(place for place in range(5, 20) if not tokens[place]["special"] and ids[place] not in ids[:place])
    before = "".join(token["text"] for token in tokens[:at] if not token["special"])
    greedy = {"temperature": 0, "ignore_eos": True, "stop_token_ids": [ids[at]]}
    answer = ask(server, n=2, **greedy)
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [(before, "stop")] * 2
    assert answer["usage"]["completion_tokens"] == 2 * (at + 1)
    assert agree(tokens[: at + 1], answer["choices"][1]["logprobs"]["tokens"])
    assert stream(server, lambda: None, 1, **greedy)["text"] == before
    (included,) = ask(server, include_stop_str_in_output=True, **greedy)["choices"]
    assert included["text"] == before + tokens[at]["text"]
    (longer,) = ask(server, min_tokens=at + 5, **greedy)["choices"]
    assert longer["logprobs"]["tokens"][: at + 1] != answer["choices"][0]["logprobs"]["tokens"]
    assert len(longer["logprobs"]["tokens"]) > at + 4


def test_bad_words(server: Server) -> None:
    """Words of one token and of two, as they occur in the unconstrained answer."""
    tokens = server.generate(BODY["prompt"], max_new_tokens=60, ignore_eos=True)["details"]["tokens"]
    tried = 0
    for size in (1, 2):
        for at in range(len(tokens) - size):
            some = tokens[at : at + size]
            word, ids = "".join(token["text"] for token in some), [token["id"] for token in some]
            if not word.strip() or word != word.lstrip() or encoded(server, word) != ids:
                continue
            (choice,) = ask(server, temperature=0, ignore_eos=True, bad_words=[word])["choices"]
            drawn = choice["logprobs"]["tokens"]
            texts = [token["text"] for token in some]
            assert texts not in [drawn[begin : begin + size] for begin in range(len(drawn))]
            first = next(place for place in range(60) if [one["id"] for one in tokens[place : place + size]] == ids)
            assert agree(tokens[: first + size - 1], drawn[: first + size - 1])
            tried += 1
            break
    assert tried == 2


def test_bad_words_and_a_grammar_that_exclude_every_token(server: Server) -> None:
    fields = {"response_format": {"type": "regex", "value": "a{3}"}, "bad_words": ["a", "aa", "aaa"]}
    answer = server.client.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 424
    assert "`bad_words` leave no token" in answer.text
    both = {"response_format": {"type": "regex", "value": "(a|b){3}"}, "bad_words": ["a", "aa", "aaa", "ba", "ab"]}
    assert ask(server, **both)["choices"][0]["text"] == "bbb"
