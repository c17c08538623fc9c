"""Images in prompts: ids and segments, and prompts whose placeholders do not fit."""

import pytest
from tokenizers import Tokenizer

from tests.tokenizer.harness import API, PoolHarness, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    End,
    FinishReason,
    Generate,
    ImageInput,
    ImageSegment,
    PageExtra,
    Tokenize,
    Tokenized,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.vocabulary import Vocabulary

TOKEN, ROW = "<|image|>", "<|row|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_special_tokens([TOKEN, ROW])
    return Vocabulary(tokenizer, eos_ids=[2])


VOCABULARY = vocabulary()
TOKEN_ID, ROW_ID = (VOCABULARY.tokenizer.token_to_id(token) for token in (TOKEN, ROW))
SMALL = ImageInput(b"s" * 16, pack_column(INT32, [TOKEN_ID] * 3), "small")
# With marks of rows, and text around them, of which the newline belongs to a token with what follows.
RICH = ImageInput(
    b"r" * 16, pack_column(INT32, [*ids_of("\n\n"), ROW_ID, TOKEN_ID, TOKEN_ID, ROW_ID, *ids_of("\n")]), "rich"
)


def harness(template: str = TEMPLATE) -> PoolHarness:
    return PoolHarness(VOCABULARY, template=template, image_token=TOKEN)


def ids(text: str) -> list[int]:
    return ids_of(text, VOCABULARY)


def test_ids_and_segments_of_a_text() -> None:
    add = harness().submit(1, f"A {TOKEN}B{TOKEN}C", images=[SMALL, RICH])
    inner = [ROW_ID, TOKEN_ID, TOKEN_ID, ROW_ID]
    expected = [*ids("A "), *[TOKEN_ID] * 3, *ids("B\n\n"), *inner, *ids("\nC")]
    assert unpack_int32(add.prompt_ids) == expected
    first, second = len(ids("A ")), len(expected) - len(ids("\nC")) - 4
    assert add.images == [ImageSegment(first, 3, SMALL.digest, "small"), ImageSegment(second, 4, RICH.digest, "rich")]
    assert add.extras == [PageExtra(first, SMALL.digest), PageExtra(second, RICH.digest)]


def test_a_text_that_begins_after_the_images() -> None:
    """As PaliGemma's: the images, the token that begins a text, the text and a newline."""
    begins = 1
    given = ImageInput(b"p" * 16, pack_column(INT32, [TOKEN_ID, TOKEN_ID, begins, *ids_of("\n")]), "first")
    encoder = PoolHarness(VOCABULARY, template=TEMPLATE, image_token=TOKEN, images_first=True)
    add = encoder.submit(1, f"{TOKEN}{TOKEN}What?", images=[given, given])
    assert unpack_int32(add.prompt_ids) == [*[TOKEN_ID] * 4, begins, *ids("What?\n")]
    assert [(one.position, one.length) for one in add.images] == [(0, 2), (2, 3)]


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN])
def test_parts_of_a_chat(template: str) -> None:
    """A template that knows texts alone gets the placeholder in the text."""
    chat = b'{"messages":[{"role":"user","content":[{"type":"text","text":"See "},{"type":"image"}]}]}'
    add = harness(template).submit(1, "", chat=chat, images=[SMALL])
    found = unpack_int32(add.prompt_ids)
    assert found == [*ids("user: See " if template == TEMPLATE else "See "), *[TOKEN_ID] * 3]
    assert [image.name for image in add.images] == ["small"]


def test_truncation_keeps_images_whole() -> None:
    pool = harness()
    add = pool.submit(1, f"Many words {TOKEN}B", images=[SMALL], truncate=5)
    assert unpack_int32(add.prompt_ids) == [ids("Many words ")[-1], *[TOKEN_ID] * 3, *ids("B")]
    assert add.images == [ImageSegment(1, 3, SMALL.digest, "small")]
    pool.pool.handle(API, Generate(2, f"A{TOKEN}B", SamplingParams(5), images=[SMALL], truncate=3))
    (end,) = [one for one in pool.received_by(API) if isinstance(one, End)]
    assert (end.reason, end.message) == (
        FinishReason.INVALID,
        "`truncate` would cut an image out of the prompt. Send a shorter prompt",
    )


@pytest.mark.parametrize(
    ("text", "images", "count"), [(f"A{TOKEN}B{TOKEN}", [SMALL], 2), ("A", [SMALL], 0), (f"{TOKEN}", [SMALL, RICH], 1)]
)
def test_placeholders_that_do_not_fit(text: str, images: list[ImageInput], count: int) -> None:
    pool = harness()
    pool.pool.handle(API, Generate(1, text, SamplingParams(5), images=images))
    (end,) = pool.received_by(API)
    assert end.reason == FinishReason.INVALID
    assert end.message.startswith(
        f"the prompt has {count} times '{TOKEN}', which stands for an image, and {len(images)} images"
    )


def test_tokenize_lists_the_tokens_of_images_at_their_placeholder() -> None:
    pool = harness()
    pool.pool.handle(API, Tokenize(1, f"é{TOKEN}B", False, images=[SMALL]))
    (answer,) = pool.received_by(API)
    assert isinstance(answer, Tokenized)
    assert unpack_int32(answer.token_ids) == [*ids("é"), *[TOKEN_ID] * 3, *ids("B")]
    begin = len(ids("é"))
    spans = list(zip(unpack_int32(answer.byte_starts), unpack_int32(answer.byte_stops), strict=True))
    assert spans[begin : begin + 3] == [(2, 2 + len(TOKEN))] * 3
    assert list(answer.special)[begin : begin + 3] == [1, 1, 1]


def test_prompt_logprobs_have_a_start_for_each_token() -> None:
    pool = harness()
    add = pool.submit(1, f"A{TOKEN}B", images=[SMALL], prompt_logprobs_from=0)
    (request,) = pool.pool._requests.values()
    starts = unpack_int32(request.prompt.token_starts)
    assert len(starts) == len(unpack_int32(add.prompt_ids))
    assert starts == [0, 1, 1, 1, 1 + len(TOKEN)]
