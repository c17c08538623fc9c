"""Routes of models that end in a vector. The tokenizer is scripted: a text's vector follows from its characters."""

import json
import math
from array import array
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.conftest import Front, openai_error
from tgi.api.pooling import MAX_INPUTS, WINDOW, probabilities
from tgi.microkernel.messages.codec import FLOAT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate, ModelSource, ModelTask, PoolingInput

EMBED = ModelSource(task=ModelTask.EMBED, normalizes=True, prompts=["query"])
RAW = ModelSource(task=ModelTask.EMBED)
RANK = ModelSource(task=ModelTask.CLASSIFY, labels=["LABEL_0"])
CLASSES = ModelSource(task=ModelTask.CLASSIFY, labels=["no", "maybe", "yes"])
MANY = CLASSES._replace(multi_label=True)
FAILING = "fail"


def vector(message: Generate) -> list[float]:
    """Three numbers: characters of the text, of its pair, and the sum of the ids."""
    assert message.pooling is not None
    ids = unpack_int32(message.input_ids)
    return [float(len(message.inputs)), float(len(message.pooling.pair or "")) - 2, float(sum(ids))]


def answer(source: ModelSource) -> Callable[[Any], list[Any]]:
    def reply(message: Any) -> list[Any]:
        assert isinstance(message, Generate)
        assert message.pooling is not None
        assert message.max_new_tokens == 0
        if message.inputs == FAILING:
            return [End(message.rid, FinishReason.INVALID, "`inputs` must have at most 8 tokens. Given: 9")]
        numbers = vector(message)[: len(source.labels) or None]
        tokens = 2 + len(message.inputs)
        packed = pack_column(FLOAT32, numbers)
        return [End(message.rid, FinishReason.LENGTH, prompt_tokens=tokens, vector=packed)]

    return reply


@pytest.fixture
def pooling(serve: Callable[..., Front]) -> Callable[..., Front]:
    def start(source: ModelSource, **settings: Any) -> Front:
        front = serve(answer(source), up=False, **settings)
        front.tokenizers[0].source = source
        front.tokenizers[0].start()
        front.until_ready()
        return front

    return start


def post(front: Front, path: str, **body: Any) -> Any:
    reply = front.post(path, json.dumps(body))
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def failure(front: Front, path: str, **body: Any) -> tuple[int, str]:
    reply = front.post(path, json.dumps(body))
    content = json.loads(reply.body) if reply.headers["content-type"].startswith("application/json") else {}
    error = content.get("error", reply.body.decode())
    return reply.status, error["message"] if isinstance(error, dict) else error


def unit(*numbers: float) -> list[float]:
    length = math.sqrt(sum(number * number for number in numbers))
    return [number / length for number in numbers]


def test_embeddings(pooling: Callable[..., Front]) -> None:
    front = pooling(EMBED)
    found = post(front, "/v1/embeddings", input=["abc", "abcd"], model="any")
    assert [one["embedding"] for one in found["data"]] == [
        pytest.approx(unit(3, -2, 0)),
        pytest.approx(unit(4, -2, 0)),
    ]
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    found = post(front, "/v1/embeddings", input=[5, 7], encoding_format="base64")
    assert array("f", b64decode(found["data"][0]["embedding"])).tolist() == pytest.approx(unit(0, -2, 12))
    found = post(front, "/v1/embeddings", input=[[5, 7], [1]], dimensions=2)
    assert [one["embedding"] for one in found["data"]] == [[0, -1], [0, -1]]
    assert post(front, "/v1/embeddings", input="abc", normalize=False)["data"][0]["embedding"] == [3, -2, 0]
    assert post(front, "/embed", inputs="abc") == [pytest.approx(unit(3, -2, 0))]
    assert post(front, "/embed", inputs=["abc"], normalize=False, dimensions=1) == [[3]]


def test_a_model_without_normalization_keeps_the_length_of_its_vectors(pooling: Callable[..., Front]) -> None:
    front = pooling(RAW)
    assert post(front, "/v1/embeddings", input="abc")["data"][0]["embedding"] == [3, -2, 0]
    assert post(front, "/v1/embeddings", input="abc", dimensions=2)["data"][0]["embedding"] == pytest.approx(
        unit(3, -2)
    )
    assert post(front, "/embed", inputs="abc") == [pytest.approx(unit(3, -2, 0))]  # as Text Embeddings Inference


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/embeddings", {"input": "a"}, PoolingInput()),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -1}, PoolingInput(truncate=0)),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": 9, "truncation_side": "left", "prompt_name": "query"},
            PoolingInput(truncate=9, keep_end=True, prompt="query"),
        ),
        ("/embed", {"inputs": "a", "truncate": True}, PoolingInput(truncate=0)),
        ("/embed", {"inputs": "a", "truncate": True, "truncation_direction": "Left"}, PoolingInput(None, 0, True)),
    ],
)
def test_options(pooling: Callable[..., Front], path: str, body: dict[str, Any], expected: PoolingInput) -> None:
    front = pooling(EMBED)
    post(front, path, **body)
    assert front.tokenizers[0].next(Generate).pooling == expected


def test_scores_of_a_model_that_ranks(pooling: Callable[..., Front]) -> None:
    front = pooling(RANK)
    documents = ["a", "abc", "ab"]
    high = [1 / (1 + math.exp(-3)), 1 / (1 + math.exp(-3))]
    found = post(front, "/v1/rerank", query="que", documents=[*documents[:2], {"text": "ab"}], top_n=2)
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx(high)  # equal: in their order
    assert [one["index"] for one in found["results"]] == [0, 1]
    assert found["results"][0]["document"] == {"text": "a"}
    sent = [front.tokenizers[0].next(Generate) for _ in documents]
    assert [(one.inputs, one.pooling.pair) for one in sent] == [("que", text) for text in documents]
    assert post(front, "/rerank", query="que", texts=["a"], raw_scores=True) == [{"index": 0, "score": 3}]
    found = post(front, "/rerank", query="que", texts=["a"], return_text=True)
    assert found == [{"index": 0, "score": pytest.approx(high[0]), "text": "a"}]
    found = post(front, "/v1/score", text_1=["a", "abc"], text_2=["b", "c"])
    assert [one["score"] for one in found["data"]] == pytest.approx([1 / (1 + math.exp(-1)), high[0]])


def test_scores_of_embeddings_are_cosines(pooling: Callable[..., Front]) -> None:
    front = pooling(EMBED)
    expected = sum(map(float.__mul__, unit(1, -2, 0), unit(3, -2, 0)))
    found = post(front, "/similarity", inputs={"source_sentence": "a", "sentences": ["abc", "a"]})
    assert found == pytest.approx([expected, 1])
    assert post(front, "/score", text_1="a", text_2="abc")["data"][0]["score"] == pytest.approx(expected)
    ranked = post(front, "/rerank", query="a", documents=["abc", "x"], return_documents=False)["results"]
    assert ranked == [
        {"index": 1, "relevance_score": pytest.approx(1)},
        {"index": 0, "relevance_score": pytest.approx(expected)},
    ]


def test_classes(pooling: Callable[..., Front]) -> None:
    front = pooling(CLASSES)
    expected = probabilities([3, -2, 0], independent=False)
    (found,) = post(front, "/classify", input="abc")["data"]
    assert found == {"index": 0, "label": "no", "probs": pytest.approx(expected), "num_classes": 3}
    by_score = sorted(zip(expected, ["no", "maybe", "yes"], strict=True), reverse=True)
    predictions = [{"score": pytest.approx(score), "label": label} for score, label in by_score]
    assert post(front, "/predict", inputs="abc") == predictions
    assert post(front, "/predict", inputs=[["abc"]]) == [predictions]
    pair = post(front, "/predict", inputs=["abc", "xyz"], raw_scores=True)
    assert pair == [{"score": 3, "label": "no"}, {"score": 1, "label": "maybe"}, {"score": 0, "label": "yes"}]


def test_labels_that_do_not_exclude_each_other(pooling: Callable[..., Front]) -> None:
    (found,) = post(pooling(MANY), "/v1/classify", input="abc")["data"]
    assert found["probs"] == pytest.approx([1 / (1 + math.exp(-logit)) for logit in (3, -2, 0)])


@pytest.mark.parametrize(
    ("source", "path", "body", "words"),
    [
        (EMBED, "/generate", {"inputs": "a"}, "it makes embeddings: use /v1/embeddings"),
        (EMBED, "/vertex", {"instances": [{"inputs": "a"}]}, "it makes embeddings: use /v1/embeddings"),
        (CLASSES, "/v1/completions", {"prompt": "a"}, "it classifies and ranks: use /classify"),
        (CLASSES, "/v1/embeddings", {"input": "a"}, "it classifies and ranks: use /classify"),
        (EMBED, "/predict", {"inputs": "a"}, "it makes embeddings: use /v1/embeddings"),
        (CLASSES, "/rerank", {"query": "a", "texts": ["b"]}, "has 3 classes, so it ranks no pairs"),
        (ModelSource(), "/v1/embeddings", {"input": "a"}, "it generates text: use /v1/chat/completions"),
    ],
)
def test_routes_of_other_tasks_are_refused_in_words(
    pooling: Callable[..., Front], source: ModelSource, path: str, body: dict[str, Any], words: str
) -> None:
    status, message = failure(pooling(source), path, **body)
    assert status == 404
    assert words in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "Empty array detected"),
        ({"input": ["a", 1]}, "data did not match any variant of untagged enum Input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"at most {MAX_INPUTS} inputs"),
        ({"input": "a", "dimensions": 4}, "`dimensions` must be > 0 and <= 3. Given: 4"),
        ({"input": "a", "dimensions": 0}, "`dimensions` must be > 0 and <= 3. Given: 0"),
        ({"input": ["a", FAILING, "b"]}, "must have at most 8 tokens"),
    ],
)
def test_invalid_requests(pooling: Callable[..., Front], body: dict[str, Any], words: str) -> None:
    status, message = failure(pooling(EMBED), "/v1/embeddings", **body)
    assert status == 422
    assert words in message


def test_pairs_are_limited_in_characters(pooling: Callable[..., Front]) -> None:
    front = pooling(RANK, payload_limit=4000)
    status, message = failure(front, "/rerank", query="q" * 3000, texts=["a"] * 30)
    assert (status, "the texts of all pairs must have <= 64000 characters. Given: 90030" in message) == (422, True)


def test_inputs_of_a_request_share_a_permit(pooling: Callable[..., Front]) -> None:
    front = pooling(EMBED, max_concurrent_requests=1)
    texts = ["a" * (index % 9 + 1) for index in range(3 * WINDOW)]
    found = post(front, "/v1/embeddings", input=texts, normalize=False)
    assert [one["embedding"][0] for one in found["data"]] == [len(text) for text in texts]
    assert front.router.admission.permits.held_by(1) == 0


def test_a_disconnect_cancels_all_inputs(pooling: Callable[..., Front]) -> None:
    from tests.api.conftest import Stream, silent

    front = pooling(EMBED)
    front.tokenizers[0].answer = silent
    stream = Stream(front, "/v1/embeddings", json.dumps({"input": ["a", "b"]}))
    rids = {front.tokenizers[0].next(Generate).rid for _ in range(2)}
    stream.disconnect()
    assert {front.tokenizers[0].next(Cancel).rid for _ in range(2)} == rids


def test_errors_have_the_format_of_their_route(pooling: Callable[..., Front]) -> None:
    front = pooling(EMBED)
    reply = front.post("/v1/embeddings", '{"input":"fail"}')
    text = "Input validation error: `inputs` must have at most 8 tokens. Given: 9"
    assert json.loads(reply.body) == openai_error(422, "validation", text)
    assert json.loads(front.post("/embed", '{"inputs":"fail"}').body) == {"error": text, "error_type": "validation"}
