"""The reader of golden files: what it sends, what it lets pass and what it does not."""

from pathlib import Path

import pytest

from tests.golden.reader import read

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
    (exchange,) = read(example(tmp_path))
    assert exchange.bytes == (
        b"POST /x HTTP/1.1\r\ncontent-type: text/plain\r\nhost: test\r\nconnection: close\r\ncontent-length: 6\r\n\r\n"
        b"a\n\xc3\xa9\xffb"
    )
    assert exchange.settings == {"api_key": ("a", "b"), "payload_limit": 20}
    assert (exchange.status, exchange.headers, exchange.place) == (200, {"allow": "(none)"}, "example:3")


def test_a_placeholder_is_the_same_text_each_time(tmp_path: Path) -> None:
    (exchange,) = read(example(tmp_path))
    assert exchange.expected.fullmatch('{"id":1234567890,{"a":{}}}1234567890\n')
    for body in (
        '{"id":1234567890,{"a":{}}}1234567891\n',  # another one
        '{"id":1234567890,{"a":{}}}1234567890',  # no end of line
        '{"id":1234567890, {"a":{}}}1234567890\n',  # a space
        '{"id":x,{"a":{}}}x\n',  # another kind of text
        "",
    ):
        assert not exchange.expected.fullmatch(body)


def test_a_difference_is_shown_where_it_is(tmp_path: Path) -> None:
    (exchange,) = read(example(tmp_path))
    text = exchange.difference('{"id":1234567890,{"b":{}}}1234567890\n')
    assert "expected: 'a\":{}}}{{created}}\\n'" in text
    assert "received: 'b\":{}}}1234567890\\n'" in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# About.", "About.", "expected lines of #"),
        ("=== an example", "an example", "expected lines of #"),
        ("--- request", "--- question", "expected `--- request`"),
        ("tokenizer: nothing", "tokeniser: nothing", "nothing that is known"),
        ("{{created}}⏎", "{{made}}⏎", "no pattern for the placeholder"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(example(tmp_path, EXAMPLE.replace(old, new)))
