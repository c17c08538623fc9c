"""Stop strings, stop tokens and bad words in the pool."""

import pytest

from tests.tokenizer.harness import API, EOS, LIMITS, OTHER, READY, PoolHarness, end_messages, ids_of, streamed_output
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.links.link import PeerDisconnected
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate, Stop, Texts, decode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.encoder import encode_bad_words


def test_stop_string_sends_stop_and_cuts_within_a_token() -> None:
    harness = PoolHarness()
    plain = [piece for piece in byte_level().pieces if isinstance(piece, str) and "<" not in piece]
    word = max(plain, key=len)
    assert len(word) >= 4
    add = harness.submit(9, stop_strings=["nowhere", "x" + word[:2]])
    number = byte_level().pieces.index(word)
    harness.send_tokens((add.rid, ids_of("of")))
    harness.send_tokens((add.rid, ids_of("x")), (add.rid, [number]))
    assert harness.received_by(harness.scheduler) == [Stop(add.rid)]
    harness.send_tokens((add.rid, [number]))
    before = harness.received_by(API)
    assert streamed_output(before, 9) == ([*ids_of("of"), *ids_of("x")], "ofx")
    harness.send_end(add.rid, FinishReason.STOP)
    received = harness.received_by(API)
    assert streamed_output([*before, *received], 9) == ([*ids_of("of"), *ids_of("x"), number], "ofx" + word[:2])
    (end,) = end_messages(received)
    assert (end.reason, end.text) == (FinishReason.STOP, "ofx" + word[:2])
    assert (end.queue_us, end.cached_tokens, end.inference_us) == (30, 16, 70)
    assert end.generated_tokens == len(ids_of("of")) + 2
    assert harness.pool.idle


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.EOS, FinishReason.FAILED])
def test_scheduler_end_that_crosses_the_stop_is_overridden(reason: FinishReason) -> None:
    harness = PoolHarness()
    add = harness.submit(9, stop_strings=["b"])
    harness.send_tokens((add.rid, ids_of("a") + ids_of("b")))
    harness.send_end(add.rid, reason, "worker burnt" if reason is FinishReason.FAILED else "")
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.message, end.text) == (FinishReason.STOP, "", "ab")


def test_cancel_or_disconnect_between_stop_and_end() -> None:
    harness = PoolHarness()
    mine, other = harness.submit(9, stop_strings=["b"]), harness.submit(9, stop_strings=["b"], api=OTHER)
    harness.send_tokens((mine.rid, ids_of("b")), (other.rid, ids_of("b")))
    harness.pool.handle(API, Cancel(9))
    harness.pool.handle(OTHER, PeerDisconnected())
    harness.send_end(mine.rid, FinishReason.STOP)
    harness.send_end(other.rid, FinishReason.STOP)
    assert len(end_messages(harness.received_by(API))) == 1
    assert harness.pool.idle


def test_last_tokens_are_sent_with_the_end_after_scheduler_loss() -> None:
    harness = PoolHarness()
    stopped, full = harness.submit(1, stop_strings=["b"]), harness.submit(2, max_new_tokens=1)
    harness.send_tokens((stopped.rid, ids_of("b")), (full.rid, ids_of("c")))
    assert harness.received_by(API) == []
    harness.disconnect_scheduler()
    received = harness.received_by(API)
    assert [type(message) for message in received[:4]] == [Texts, End, Texts, End]
    assert (streamed_output(received, 1)[1], streamed_output(received, 2)[1]) == ("b", "c")


def test_tokens_after_the_stop_in_the_same_row_are_not_counted() -> None:
    harness = PoolHarness()
    add = harness.submit(9, stop_strings=["b"])
    harness.send_tokens((add.rid, ids_of("a") + ids_of("b") + ids_of("c")))
    harness.send_end(add.rid, FinishReason.STOP)
    received = harness.received_by(API)
    assert streamed_output(received, 9) == (ids_of("a") + ids_of("b"), "ab")
    assert end_messages(received)[0].generated_tokens == 2


def test_length_and_eos_come_before_a_stop_string() -> None:
    harness = PoolHarness()
    add = harness.submit(1, max_new_tokens=2, stop_strings=["b", "<|eos|>"])
    harness.send_tokens((add.rid, ids_of("a") + ids_of("b")))
    harness.send_tokens((add.rid, ids_of("c")))  # more than max_new_tokens
    harness.send_end(add.rid, FinishReason.LENGTH)
    received = harness.received_by(API)
    assert streamed_output(received, 1)[1] == "ab"
    (end,) = end_messages(received)
    assert (end.reason, end.text) == (FinishReason.LENGTH, "ab")
    add = harness.submit(2, stop_strings=["<|eos|>"])
    harness.send_tokens((add.rid, [EOS]))
    harness.send_end(add.rid, FinishReason.EOS)
    assert [end.reason for end in end_messages(harness.received_by(API))] == [FinishReason.EOS]


def test_stop_strings_match_special_tokens_but_not_the_prompt() -> None:
    harness = PoolHarness()
    add = harness.submit(1, "stop here", stop_strings=["stop", "<|user|>"])
    harness.send_tokens((add.rid, ids_of("a")))
    assert end_messages(harness.received_by(API)) == []
    harness.send_tokens((add.rid, ids_of("<|user|>")))
    harness.send_end(add.rid, FinishReason.STOP)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.text) == (FinishReason.STOP, "a")


def test_ignore_eos_sends_no_stop_ids() -> None:
    harness = PoolHarness()
    add = harness.submit(1, ignore_eos=True)
    assert add.stop_ids == b""
    harness.send_tokens((add.rid, [EOS]), (add.rid, ids_of("a")))
    assert streamed_output(harness.received_by(API), 1) == ([EOS, *ids_of("a")], "<|eos|>a")


def test_end_ids_are_sent_with_min_new_tokens() -> None:
    """Only ids within the model's vocabulary, and only ids that end the request."""
    harness = PoolHarness()
    assert [decode(harness.submit(rid, least=rid).sampling).end_ids for rid in (0, 1)] == [
        b"",
        pack_column(INT32, [EOS]),
    ]
    assert decode(harness.submit(3, least=5, ignore_eos=True).sampling).end_ids == b""
    narrow = PoolHarness()
    narrow.pool.handle(narrow.scheduler, READY._replace(limits=LIMITS._replace(vocab_size=EOS)))
    assert decode(narrow.submit(1, least=1).sampling).end_ids == b""


@pytest.mark.parametrize("hide_stop", [False, True])
def test_stop_strings_are_enabled_after_min_new_tokens(hide_stop: bool) -> None:
    """A string that began earlier matches, one that was complete does not; hidden strings are held back."""
    a, b, c = ids_of("a") + ids_of("b") + ids_of("c")
    harness = PoolHarness()
    add = harness.submit(1, stop_strings=["ab"], least=4, hide_stop=hide_stop)
    harness.send_tokens((add.rid, [a, b]), (add.rid, [a, b, c]))
    harness.send_end(add.rid, FinishReason.STOP)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.generated_tokens, end.text) == (FinishReason.STOP, 4, "ab" if hide_stop else "abab")
    harness.received_by(harness.scheduler)
    again = harness.submit(
        2, stop_strings=["ab"], least=4, hide_stop=hide_stop, resume_ids=pack_column(INT32, [a, b, a])
    )
    harness.send_tokens((again.rid, [b]))
    harness.send_end(again.rid, FinishReason.STOP)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.generated_tokens, end.text) == (FinishReason.STOP, 4, "ab" if hide_stop else "abab")


def test_incomplete_character_is_never_shown() -> None:
    harness = PoolHarness()
    add = harness.submit(1)
    emoji = ids_of("👍")
    assert len(emoji) > 1
    harness.send_tokens((add.rid, ids_of("a") + emoji[:-1]))
    harness.send_end(add.rid)
    received = harness.received_by(API)
    assert streamed_output(received, 1)[1] == "a"
    assert end_messages(received)[0].text == "a"


A, B, C = ids_of("a") + ids_of("b") + ids_of("c")


def test_stop_token_is_left_out_of_the_text() -> None:
    """The scheduler gets them as stop ids. The token is counted in logprobs and usage."""
    harness = PoolHarness()
    add = harness.submit(1, hide_stop=True, stop_token_ids=pack_column(INT32, [B, 400]))
    assert unpack_int32(add.stop_ids) == sorted({EOS, B, 400})
    harness.send_tokens((add.rid, [A, B, C]))
    harness.send_end(add.rid, FinishReason.EOS)
    received = harness.received_by(API)
    (columns,) = [message for message in received if isinstance(message, Texts)]
    assert (columns.texts, columns.special) == (["a", "b"], b"\x00\x01")
    (end,) = end_messages(received)
    assert (end.reason, end.text, end.generated_tokens) == (FinishReason.EOS, "a", 2)


def test_stop_token_ids_with_ignore_eos_and_min_new_tokens() -> None:
    harness = PoolHarness()
    add = harness.submit(1, ignore_eos=True, hide_stop=True, stop_token_ids=pack_column(INT32, [B]))
    assert unpack_int32(add.stop_ids) == [B]
    harness.send_tokens((add.rid, [EOS, A, B]))
    harness.send_end(add.rid, FinishReason.EOS)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.text, end.generated_tokens) == (FinishReason.EOS, "a", 3)
    harness.received_by(harness.scheduler)
    sampling = decode(harness.submit(2, least=4, stop_token_ids=pack_column(INT32, [B])).sampling)
    assert unpack_int32(sampling.end_ids) == sorted([EOS, B])
    sampling = decode(harness.submit(3, least=4, ignore_eos=True, stop_token_ids=pack_column(INT32, [B])).sampling)
    assert unpack_int32(sampling.end_ids) == [B]


def test_stop_token_at_max_new_tokens_ends_with_stop() -> None:
    """So does EOS; native routes make it a length, as TGI."""
    harness = PoolHarness()
    for number in (B, EOS):
        add = harness.submit(number, max_new_tokens=2, hide_stop=True, stop_token_ids=pack_column(INT32, [B]))
        harness.send_tokens((add.rid, [A, number]))
        harness.send_end(add.rid, FinishReason.LENGTH)
        (end,) = end_messages(harness.received_by(API))
        assert (end.reason, end.text) == (FinishReason.EOS, "a")
        harness.received_by(harness.scheduler)


@pytest.mark.parametrize(("resume", "left"), [([A], [B]), ([A, B], [])])
def test_stop_token_ids_apply_to_resumed_ids(resume: list[int], left: list[int]) -> None:
    harness = PoolHarness()
    asked = Generate(
        1,
        "Hello",
        SamplingParams(5),
        hide_stop=True,
        resume_ids=pack_column(INT32, resume),
        stop_token_ids=pack_column(INT32, [B]),
    )
    harness.pool.handle(API, asked)
    if left:
        (add,) = harness.received_by(harness.scheduler)
        harness.send_tokens((add.rid, left))
        harness.send_end(add.rid, FinishReason.EOS)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.text, end.generated_tokens) == (FinishReason.EOS, "a", 2)


def test_stop_token_releases_held_text() -> None:
    """Unless the stop token completes the stop string."""
    harness = PoolHarness()
    for stop, text in (("bcx", "ab"), ("bc", "a")):
        add = harness.submit(1, stop_strings=[stop], hide_stop=True, stop_token_ids=pack_column(INT32, [C]))
        harness.send_tokens((add.rid, [A, B]))
        harness.send_tokens((add.rid, [C]))
        harness.send_end(add.rid, FinishReason.EOS)
        assert [end.text for end in end_messages(harness.received_by(API))] == [text]
        harness.received_by(harness.scheduler)


def test_include_stop_str_in_output() -> None:
    """Without `hide_stop`, as on native routes, stop strings and stop tokens stay in the text."""
    harness = PoolHarness()
    add = harness.submit(1, stop_strings=["xb"], stop_token_ids=pack_column(INT32, [B]))
    harness.send_tokens((add.rid, [A, B]))
    harness.send_end(add.rid, FinishReason.EOS)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.text) == (FinishReason.EOS, "ab")


@pytest.mark.parametrize(("hide_stop", "text"), [(True, "a<|user|>b"), (False, "a<|user|>b<|eos|>")])
def test_special_tokens_are_shown_on_request(hide_stop: bool, text: str) -> None:
    """The token that ends the text is shown only without `hide_stop`."""
    harness = PoolHarness()
    add = harness.submit(1, hide_stop=hide_stop, skip_special_tokens=False)
    (user,) = ids_of("<|user|>")
    harness.send_tokens((add.rid, [A, user, B, EOS]))
    harness.send_end(add.rid, FinishReason.EOS)
    received = harness.received_by(API)
    (columns,) = [message for message in received if isinstance(message, Texts)]
    assert [*columns.special] == [0, 0, 0, int(hide_stop)]
    assert [end.text for end in end_messages(received)] == [text]


def test_bad_words_and_listed_texts_are_sent_as_ids_within_the_model_vocabulary() -> None:
    harness = PoolHarness()
    sampling = decode(harness.submit(1, bad_words=["river", "a"]).sampling)
    sequences = encode_bad_words(byte_level(), ["river", "a"])
    assert unpack_int32(sampling.bad_word_lengths) == [len(word) for word in sequences]
    assert unpack_int32(sampling.bad_word_ids) == [number for word in sequences for number in word]
    assert decode(harness.submit(2).sampling).bad_word_ids == b""
    assert unpack_int32(decode(harness.submit(3, listed_texts=["a", "b"]).sampling).listed_ids) == [A, A + 1]
    harness.pool.handle(harness.scheduler, READY._replace(limits=LIMITS._replace(vocab_size=A)))
    sampling = decode(harness.submit(4, bad_words=["a"], listed_texts=["a", "!"]).sampling)
    assert sampling.bad_word_ids == b""
    assert [byte_level().token_text(token) for token in unpack_int32(sampling.listed_ids)] == ["!"]


def test_many_bad_words_are_encoded_in_a_thread() -> None:
    harness = PoolHarness()
    cases = (([], 0), (["word"] * 20, 0), (["word"] * 256, 1), (["x" * 4096], 1))
    for rid, (words, jobs) in enumerate(cases):
        harness.pool.handle(API, Generate(rid, "Hello", SamplingParams(5), bad_words=words))
        assert len(harness.run_jobs()) == jobs
        (add,) = harness.received_by(harness.scheduler)
        assert bool(decode(add.sampling).bad_word_ids) == bool(words)
