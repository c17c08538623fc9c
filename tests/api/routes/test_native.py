"""The native generation routes, byte by byte. The expected bytes are those of the wire contract."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front, texts, two_tokens
from tgi.microkernel.messages.protocol import End, FinishReason, Generate, ModelSource
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.observability import metrics

EVENT_1 = (
    b'data: {"index":1,"token":{"id":5,"text":" a","logprob":-0.34,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)
EVENT_2 = (
    b'data: {"index":2,"token":{"id":2,"text":"</s>","logprob":-0.01,"special":true},"generated_text":" a",'
    b'"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":42,"input_length":3}}\n\n'
)
EVENT_2_BARE = EVENT_2.partition(b'"details":{')[0] + b'"details":null}\n\n'
TOKENS = b'[{"id":5,"text":" a","logprob":-0.34,"special":false},{"id":2,"text":"</s>","logprob":-0.01,"special":true}]'


def asked(front: Front, parameters: dict[str, Any] | None) -> Generate:
    """The message that the tokenizer receives for these parameters."""
    body: dict[str, Any] = {"inputs": "x"}
    if parameters is not None:
        body["parameters"] = parameters
    assert front.post("/generate", json.dumps(body)).status == 200
    message = front.tokenizers[0].next(Generate)
    assert isinstance(message, Generate)
    return message


@pytest.fixture(autouse=True)
def _forget(front: Front) -> None:
    while not front.tokenizers[0].received.empty():
        front.tokenizers[0].received.get()


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
def test_bytes_of_a_stream(front: Front, path: str) -> None:
    parameters = '{"details":true,"seed":42,"do_sample":true,"return_full_text":false}'
    reply = front.post(path, f'{{"inputs":"été","parameters":{parameters},"stream":true}}')
    assert reply.status == 200
    assert reply.body == EVENT_1 + EVENT_2
    headers = reply.headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "3"
    assert headers["access-control-allow-origin"] == "*"
    assert headers["vary"] == "origin, access-control-request-method, access-control-request-headers"
    assert "server" not in headers


def test_events_that_are_ready_are_one_chunk(front: Front) -> None:
    reply = front.post("/generate_stream", '{"inputs":"x","parameters":{}}')
    assert reply.chunks == [EVENT_1 + EVENT_2_BARE]


def test_each_token_of_a_step_is_an_event(front: Front) -> None:
    tokenizer = front.tokenizers[0]
    usual = tokenizer.answer

    def a_run(message: Any) -> list[Any]:
        tokens = [(5, " a", -0.5, False), (6, " b", -0.25, False), (2, "</s>", -0.01, True)]
        return [
            texts(message.rid, *tokens),
            End(message.rid, FinishReason.EOS, "", " a b", 3, 3, 0, 1_000, 2_000, 30_000),
        ]

    tokenizer.answer = a_run
    before = [sample(name) for name in COUNTED]
    reply = front.post("/generate_stream", '{"inputs":"x","parameters":{}}')
    tokenizer.answer = usual
    events = [json.loads(line[5:]) for line in reply.body.splitlines() if line]
    assert [(event["index"], event["token"]["id"], event["token"]["text"]) for event in events] == [
        (1, 5, " a"),
        (2, 6, " b"),
        (3, 2, "</s>"),
    ]
    assert [event["generated_text"] for event in events] == [None, None, " a b"]
    assert [sample(name) - old for name, old in zip(COUNTED, before, strict=True)] == [2, 2, 0]


COUNTED = (
    "tgi_request_skipped_tokens_sum",
    "tgi_inter_token_duration_count",
    "tgi_inter_token_duration_sum",
)


def sample(name: str) -> float:
    """The value of a metric without labels; 0 if it is absent."""
    lines = metrics.render().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_a_greedy_response_has_no_seed(front: Front) -> None:
    reply = front.post("/generate_stream", '{"inputs":"x","parameters":{"details":true,"seed":42}}')
    assert b'"seed":null,"input_length":3}}' in reply.body


def test_full_text_of_a_stream_is_in_the_last_event(front: Front) -> None:
    reply = front.post("/generate_stream", '{"inputs":"A \\"","parameters":{"return_full_text":true}}')
    assert reply.body == EVENT_1 + EVENT_2_BARE.replace(b'"generated_text":" a"', b'"generated_text":"A \\" a"')


def test_bytes_and_headers_of_a_whole_response(front: Front) -> None:
    reply = front.post("/generate", '{"inputs":"été","parameters":{"details":true,"seed":0,"temperature":0.5}}')
    assert reply.status == 200
    assert reply.body == (
        b'{"generated_text":" a","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":0,'
        b'"prefill":[],"tokens":' + TOKENS + b"}}"
    )
    headers = reply.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "3"
    assert headers["x-validation-time"] == "1"
    assert headers["x-queue-time"] == "2"
    assert headers["x-inference-time"] == "30"
    assert headers["x-time-per-token"] == "15"
    assert headers["x-prompt-tokens"] == "3"
    assert headers["x-generated-tokens"] == "2"
    assert float(headers["x-compute-time"]) > 0
    assert headers["x-total-time"].isdigit()


def test_bytes_of_a_whole_response_without_details(front: Front) -> None:
    assert front.post("/generate", '{"inputs":"x","stream":true}').body == b'{"generated_text":" a"}'


def test_root_answers_with_an_array_and_the_prompt(front: Front) -> None:
    assert front.post("/", '{"inputs":"x"}').body == b'[{"generated_text":"x a"}]'
    assert (
        front.post("/", '{"inputs":"x","parameters":{"return_full_text":null}}').body == b'[{"generated_text":"x a"}]'
    )
    assert (
        front.post("/", '{"inputs":"x","parameters":{"return_full_text":false}}').body == b'[{"generated_text":" a"}]'
    )
    assert front.post("/generate", '{"inputs":"x","parameters":{"return_full_text":true}}').body == (
        b'{"generated_text":"x a"}'
    )


def test_missing_parameters_sample_and_empty_ones_are_greedy(front: Front) -> None:
    bare = asked(front, None)
    assert bare.sampling.do_sample
    assert bare.max_new_tokens is None
    assert not asked(front, {}).sampling.samples


def test_random_seeds_span_uint64(front: Front) -> None:
    seeds = {asked(front, None).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) > 2**53
    assert asked(front, {"seed": 2**64 - 1}).sampling.seed == 2**64 - 1


def test_parameters_reach_the_tokenizer(front: Front) -> None:
    message = asked(
        front,
        {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "repetition_penalty": 1.5, "seed": 1, "max_new_tokens": 9}
        | {"stop": ["a", "b"], "truncate": 7},
    )
    assert message.sampling == SamplingParams(1, False, 0.5, 3, 0.25, 1.5)
    sampling = asked(front, {"typical_p": 0.75, "frequency_penalty": -1.5, "seed": 1}).sampling
    assert sampling == SamplingParams(1, typical_p=0.75, frequency_penalty=-1.5)
    assert sampling.samples
    sampling = asked(front, {"min_p": 0.25, "seed": 1}).sampling
    assert sampling == SamplingParams(1, min_p=0.25)
    assert sampling.samples
    assert asked(front, {"min_p": 0.1}).sampling.min_p == 0.10000000149011612  # float32, as all parameters
    assert not asked(front, {"frequency_penalty": 2.0}).sampling.samples
    assert (message.max_new_tokens, message.truncate, message.stop_strings) == (9, 7, ["a", "b"])
    assert message.resume_ids == b""
    assert message.add_special_tokens


def test_a_bare_stop_string_is_accepted(front: Front) -> None:
    assert asked(front, {"stop": "end"}).stop_strings == ["end"]


def test_watermark_min_new_tokens_and_ignore_eos_reach_the_tokenizer(front: Front) -> None:
    message = asked(front, {"watermark": True, "min_new_tokens": 3, "seed": 1})
    assert message.sampling == SamplingParams(1, watermark=True, min_new_tokens=3)
    assert not message.ignore_eos
    for name in ("ignore_eos", "ignore_eos_token"):
        assert asked(front, {name: True}).ignore_eos
        assert not asked(front, {name: False}).ignore_eos


def test_neutral_values_are_accepted(front: Front) -> None:
    off = {"best_of": 1, "typical_p": 1.0, "top_p": 1.0, "frequency_penalty": 0.0, "watermark": False, "stop": []}
    off |= {"decoder_input_details": False, "top_n_tokens": 0, "grammar": None, "adapter_id": None, "details": False}
    off |= {"min_p": 0, "min_new_tokens": 0, "ignore_eos": False, "ignore_eos_token": False}
    assert not asked(front, off).sampling.samples
    assert not asked(front, dict.fromkeys(off)).sampling.samples
    asked(front, {"best_of": 0})


def test_unicode_and_control_characters(serve: Any) -> None:
    def answer(message: Generate) -> list[Any]:
        token = texts(message.rid, (0, 'é"\\\n\x01\x7f\u2028🙂', float("-inf"), False))
        return [token, End(message.rid, FinishReason.LENGTH, "", "\t", 1, 1)]

    reply = serve(answer).post("/generate_stream", '{"inputs":"x"}')
    assert reply.body.decode() == (
        'data: {"index":1,"token":{"id":0,"text":"é\\"\\\\\\n\\u0001\x7f\u2028🙂","logprob":null,"special":false},'
        '"generated_text":"\\t","details":null}\n\n'
    )


ENDS = [
    (End(0, FinishReason.INVALID, "d"), 422, b'{"error":"Input validation error: d","error_type":"validation"}'),
    (End(0, FinishReason.OVERLOADED), 429, b'{"error":"Model is overloaded","error_type":"overloaded"}'),
    (
        End(0, FinishReason.FAILED, "Server error: x"),
        424,
        b'{"error":"Request failed during generation: Server error: x","error_type":"generation"}',
    ),
]


@pytest.mark.parametrize(("end", "status", "body"), ENDS)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_errors_before_the_first_token_are_http_errors(
    serve: Any, path: str, end: End, status: int, body: bytes
) -> None:
    front = serve(lambda message: [end._replace(rid=message.rid)])
    reply = front.post(path, '{"inputs":"x"}')
    assert (reply.status, reply.headers["content-type"], reply.body) == (status, "application/json", body)
    assert ("retry-after" in reply.headers) == (status == 429)
    assert "x-compute-type" not in reply.headers


@pytest.mark.parametrize(("end", "status", "body"), ENDS)
def test_errors_after_the_first_token_are_events(serve: Any, end: End, status: int, body: bytes) -> None:
    def answer(message: Generate) -> list[Any]:
        return [two_tokens(message)[0], end._replace(rid=message.rid)]

    reply = serve(answer).post("/generate_stream", '{"inputs":"x"}')
    assert reply.status == 200
    assert reply.body == EVENT_1 + b"data: " + body + b"\n\n"


def test_an_end_without_its_last_token_is_an_incomplete_generation(serve: Any) -> None:
    front = serve(lambda message: [two_tokens(message)[0], End(message.rid, FinishReason.CANCELLED)])
    reply = front.post("/generate_stream", '{"inputs":"x"}')
    assert reply.body == EVENT_1 + (
        b'data: {"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'
    )
    reply = front.post("/generate", '{"inputs":"x"}')
    assert reply.status == 500
    assert reply.body == b'{"error":"Incomplete generation","error_type":"incomplete_generation"}'


def test_root_returns_the_prompt_by_pipeline_tag(serve: Any) -> None:
    body = '{"inputs":"x","parameters":{}}'
    for tag, text in ((None, b"x a"), ("text-generation", b"x a"), ("text2text-generation", b" a")):
        front = serve(model_pipeline_tag=tag, model_sha="abc")
        assert front.post("/", body).body == b'[{"generated_text":"%s"}]' % text
        info = json.loads(front.get("/info").body)
        assert (info["model_pipeline_tag"], info["model_sha"]) == (tag, "abc")
        front.stop()


def test_a_front_end_without_the_model_learns_its_source_from_tokenizers(serve: Any) -> None:
    front = serve(up=False)
    front.tokenizers[0].source = ModelSource("abc", "text2text-generation", [2, 7])
    front.tokenizers[0].start()
    front.until_ready()
    info = json.loads(front.get("/info").body)
    assert (info["model_pipeline_tag"], info["model_sha"]) == ("text2text-generation", "abc")
    assert info["eos_token_ids"] == [2, 7]
    assert front.post("/", '{"inputs":"x","parameters":{}}').body == b'[{"generated_text":" a"}]'
