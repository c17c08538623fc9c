"""Who a request belongs to, and what the limits of a key do."""

from pathlib import Path
from typing import Any

import pytest
from falcon.asgi import Request
from falcon.testing import create_scope

from tests.api.conftest import Stream, request, silent, standard, word
from tests.api.test_hostile_clients import until
from tgi.api.clients import Clients
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import Cancel, Generate
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.table import Settings

BODY = '{"inputs":"x"}'


def client_name(front: Any, **headers: str) -> str:
    assert front.post("/generate", BODY, **headers).status == 200
    return str(front.tokenizers[0].next(Generate).context.client)


def test_clients_are_told_apart_by_key(serve: Any) -> None:
    front = serve(api_key=("one weight=3 priority=2", "two"))
    assert front.post("/generate", BODY, authorization="Bearer one").status == 200
    one = front.tokenizers[0].next(Generate).context
    assert (one.weight, one.priority) == (3.0, 2)
    assert "one" not in one.client
    assert client_name(front, authorization="Bearer two") != one.client
    assert front.post("/generate", BODY, authorization="Bearer one weight=3").status == 401


def test_without_keys_a_header_makes_no_client(serve: Any) -> None:
    front = serve()
    assert client_name(front, authorization="Bearer any") == client_name(front) == "127.0.0.1"
    assert client_name(front, x_forwarded_for="10.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("forwarded", "name"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("198.51.100.1, 203.0.113.7, 10.1.2.3", "203.0.113.7"),  # what a client sends itself stands first
        ("nonsense, 10.1.2.3", "10.1.2.3"),
        ("nonsense", "127.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("203.0.113.7:50123, ::ffff:10.1.2.3", "203.0.113.7"),
        ("[2001:db8:1:2:3::4]:50123", "2001:db8:1:2::/64"),
    ],
)
def test_forwarded_addresses_of_trusted_proxies(serve: Any, forwarded: str, name: str) -> None:
    front = serve(trusted_proxies=("127.0.0.1", "10.0.0.0/8"))
    assert client_name(front, x_forwarded_for=forwarded) == name


def test_a_proxy_that_connects_to_a_socket_for_both_ip_versions() -> None:
    """The system names its IPv4 address in IPv6 form."""
    clients = Clients(Settings(trusted_proxies=("127.0.0.1",)))
    scope = create_scope(headers={"x-forwarded-for": "203.0.113.7"}) | {"client": ("::ffff:127.0.0.1", 50123)}
    assert clients.identify(Request(scope, lambda: None), needs_key=False).name == "203.0.113.7"


def test_requests_at_once_of_a_key(serve: Any) -> None:
    front = serve(silent, api_key=("limited requests=1", "free"))
    head = {"authorization": "Bearer limited", "content-type": "application/json", "content-length": str(len(BODY))}
    with front.connect() as first:
        first.sendall(request("POST", "/generate_stream", BODY.encode(), head))
        front.tokenizers[0].next(Generate)
        reply = front.post("/generate", BODY, authorization="Bearer limited")
        assert (reply.status, int(reply.headers["retry-after"]) >= 1) == (429, True)
        assert b"1 requests at once" in reply.body
        front.tokenizers[0].answer = standard
        assert front.post("/generate", BODY, authorization="Bearer free").status == 200


def test_a_client_that_holds_all_permits_leaves_some_to_others(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=2, api_key=("heavy", "light"))
    streams = []
    for _ in range(2):
        streams.append(Stream(front, authorization="Bearer heavy"))
        front.tokenizers[0].next(Generate)
    assert front.post("/generate", BODY, authorization="Bearer heavy").status == 429
    front.tokenizers[0].answer = standard
    assert front.post("/generate", BODY, authorization="Bearer light").status == 200
    for stream in streams:
        stream.disconnect()


def test_keys_are_reloaded(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    settings = load_settings({"api_key": ("flag",), "api_key_file": str(file)}, {})
    front = serve(api_key=settings.api_key, given_api_keys=settings.given_api_keys, api_key_file=str(file))
    file.write_text("new weight=2\n")
    assert front.service.clients.reload() == 2
    answers = [front.post("/generate", BODY, authorization=f"Bearer {key}").status for key in ("flag", "old", "new")]
    assert answers == [200, 401, 200]
    file.write_text("new wrong=2\n")
    with pytest.raises(UserError, match="'wrong' is no option"):
        front.service.clients.reload()
    assert front.post("/generate", BODY, authorization="Bearer new").status == 200


def test_tokens_per_minute_of_a_key(serve: Any) -> None:
    front = serve(api_key=("limited tokens-per-minute=60", "free"))  # an answer has 3 prompt and 2 generated tokens
    statuses = []
    for _ in range(16):
        reply = front.post("/generate", BODY, authorization="Bearer limited")
        statuses.append(reply.status)
        if reply.status == 429:
            break
    assert statuses.count(200) in range(12, 16), "60 tokens, and what the passing time allows"
    assert reply.status == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 6
    assert b"60 tokens per minute" in reply.body
    assert front.post("/generate", BODY, authorization="Bearer free").status == 200


def test_tokens_of_an_abandoned_stream_count(serve: Any) -> None:
    """Its tokenizer continues and tells no numbers, since the client may come back."""
    front = serve(silent, api_key=("limited tokens-per-minute=60",), resume_window=30)
    stream = Stream(front, authorization="Bearer limited")
    rid = front.tokenizers[0].next(Generate).rid
    front.tokenizers[0].send(*(word(rid, number) for number in range(100)))
    stream.read_until(b'" 99"')
    stream.disconnect()
    front.tokenizers[0].next(Cancel)

    def is_refused() -> bool:
        reply = front.post("/generate", BODY, authorization="Bearer limited", x_request_timeout="0.1")
        assert reply.status in (429, 504)
        return reply.status == 429

    until(is_refused)
