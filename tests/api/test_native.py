"""The native generation routes, byte by byte: what is expected here is written from the wire contract."""

from tests.api.conftest import Front

EVENT_1 = (
    b'data: {"index":1,"token":{"id":5,"text":" a","logprob":-0.34,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)
EVENT_2 = (
    b'data: {"index":2,"token":{"id":2,"text":"</s>","logprob":-0.01,"special":true},'
    b'"generated_text":" a","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":42,"input_length":3}}\n\n'
)
EVENT_2_BARE = EVENT_2.partition(b'"details":{')[0] + b'"details":null}\n\n'


def test_stream_bytes(front: Front) -> None:
    reply = front.post("/generate_stream", '{"inputs":"été","parameters":{"details":true,"seed":42,"do_sample":true}}')
    assert reply.status == 200
    assert reply.body == EVENT_1 + EVENT_2
    headers = reply.headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "3"
    assert headers["access-control-allow-origin"] == "*"
    assert "server" not in headers


def test_stream_without_details(front: Front) -> None:
    reply = front.post("/generate_stream", '{"inputs":"x","parameters":{}}')
    assert reply.body == EVENT_1 + EVENT_2_BARE
