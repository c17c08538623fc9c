"""The reader of golden files: request bytes, placeholders, differences, and invalid files."""

from pathlib import Path

import pytest

from tests.golden.reader import read_exchanges

EXAMPLE = """# About.

=== an example
tokenizer: nothing
server: api_key=a
server: api_key=b
server: payload_limit=20
--- request
POST /x HTTP/1.1
content-type: text/plain

a⏎é{{byte ff}}
b
--- response
HTTP/1.1 200
allow: (none)

{"id":{{created}},{"a":{}}
}{{created}}⏎
"""


def example(folder: Path, text: str = EXAMPLE) -> Path:
    path = folder / "example.http"
    path.write_text(text)
    return path


def test_a_request_as_bytes(tmp_path: Path) -> None:
    (exchange,) = read_exchanges(example(tmp_path))
    assert exchange.bytes == (
        b"POST /x HTTP/1.1\r\ncontent-type: text/plain\r\nhost: test\r\nconnection: close\r\ncontent-length: 6\r\n\r\n"
        b"a\n\xc3\xa9\xffb"
    )
    assert exchange.settings == {"api_key": ("a", "b"), "payload_limit": 20}
    assert (exchange.status, exchange.headers, exchange.place) == (200, {"allow": "(none)"}, "example:3")


def test_occurrences_of_a_placeholder_must_match_the_same_text(tmp_path: Path) -> None:
    (exchange,) = read_exchanges(example(tmp_path))
    assert exchange.expected.fullmatch('{"id":1234567890,{"a":{}}}1234567890\n')
    for body in (
        '{"id":1234567890,{"a":{}}}1234567891\n',  # another number
        '{"id":1234567890,{"a":{}}}1234567890',  # no final line feed
        '{"id":1234567890, {"a":{}}}1234567890\n',  # a space
        '{"id":x,{"a":{}}}x\n',  # another kind of text
        "",
    ):
        assert not exchange.expected.fullmatch(body)


def test_difference_shows_where_the_body_differs(tmp_path: Path) -> None:
    (exchange,) = read_exchanges(example(tmp_path))
    text = exchange.difference('{"id":1234567890,{"b":{}}}1234567890\n')
    assert "expected: 'a\":{}}}{{created}}\\n'" in text
    assert "received: 'b\":{}}}1234567890\\n'" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# About.", "About.", "expected lines of #"),
        ("=== an example", "an example", "expected lines of #"),
        ("--- request", "--- question", "expected `--- request`"),
        ("tokenizer: nothing", "tokeniser: nothing", "is not a known field"),
        ("{{created}}⏎", "{{made}}⏎", "no pattern for the placeholder"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_exchanges(example(tmp_path, EXAMPLE.replace(old, new)))
