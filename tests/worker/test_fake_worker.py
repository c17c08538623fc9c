"""The fake worker: deterministic tokens, and each step that breaks the protocol is rejected with the fault's name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each_case
from tgi.microkernel.messages.codec import (
    FLOAT32,
    INT32,
    UINT8,
    pack_column,
    unpack_float32,
    unpack_int32,
    unpack_uint32,
)
from tgi.microkernel.messages.protocol import MAX_DRAFT_TOKENS, SlotAssignment, Step, StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.fake_worker.fake_tokens import ID_COUNT
from tgi.worker.fake_worker.fake_worker import FakeEngine, FakeWorker, FakeWorkerConfig, read_answers

SCRIPT = FakeWorkerConfig(
    pages=12, page_size=4, slots=3, vocab_size=128, max_total_tokens=24, max_batch_prefill_tokens=16
)
GREEDY = encode(SamplingParams(1))


def slot(number: int, ids: list[int], sampling: bytes = GREEDY, prompt_tokens: int = 0) -> SlotAssignment:
    return SlotAssignment(number, pack_column(INT32, ids), prompt_tokens or len(ids), sampling)


def biased(*ids: int) -> bytes:
    """A request with one bias, for these ids."""
    return encode(SamplingParams(1, bias_ids=pack_column(INT32, ids), biases=pack_column(FLOAT32, [1.0])))


def step(
    number: int,
    rows: list[tuple[int, int, int, int]],
    slots: Sequence[SlotAssignment] = (),
    pages: Sequence[tuple[int, int]] = (),
    epoch: int = 1,
    drafts: Sequence[int] = (),
    draft_ids: Sequence[int] = (),
) -> Step:
    """A step of rows (slot, start, count, draw) and pages (slot, page). Row k has drafts[k] drafts."""
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    owners = list(zip(*pages, strict=True)) or [(), ()]
    return Step(
        number,
        epoch,
        list(slots),
        pack_column(INT32, owners[0]),
        pack_column(INT32, owners[1]),
        pack_column(INT32, columns[0]),
        pack_column(INT32, columns[1]),
        pack_column(INT32, columns[2]),
        pack_column(UINT8, columns[3]),
        pack_column(INT32, drafts),
        pack_column(INT32, draft_ids),
    )


def good(result: StepResult) -> list[int]:
    assert result.error == ""
    ids = unpack_int32(result.token_ids)
    assert len(unpack_float32(result.logprobs)) == sum(result.counts) == len(ids)
    return ids


def generate(worker: FakeWorker, ids: list[int], count: int, sampling: bytes = GREEDY) -> list[int]:
    """`count` tokens after `ids`, alone in slot 0 of a new epoch."""
    worker.reset()
    pages = [(0, page) for page in range((len(ids) + count + 3) // 4)]
    drawn = good(worker.run_step(step(1, [(0, 0, len(ids), 1)], [slot(0, ids, sampling)], pages)))
    for number in range(1, count):
        drawn += good(worker.run_step(step(number + 1, [(0, len(ids) + number - 1, 1, 1)])))
    return drawn


def test_a_resumed_request_continues_as_if_never_interrupted() -> None:
    worker = FakeWorker(SCRIPT)
    whole = generate(worker, [7, 8, 9], 10)
    assert len(set(whole)) > 3
    assert generate(worker, [7, 8, 9, *whole[:6]], 4) == whole[6:]
    assert generate(worker, [7, 8, 10], 10) != whole


def test_scripted_answers_to_prompts_with_these_ids_in_this_order(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text("[[[7, 9], [1, 2, 0]], [[9, 9], [3]]]")
    worker = FakeWorker(SCRIPT._replace(answers=read_answers(path)))
    assert generate(worker, [6, 7, 8, 9], 5) == [1, 2, 0, 0, 0]
    assert generate(worker, [9, 7, 9], 2) == [1, 2]
    assert generate(worker, [9, 7, 8, 9, 9], 2) == [1, 2]
    assert generate(worker, [9, 8, 9], 2) == [3, 3]
    assert generate(worker, [9, 7], 4) == generate(FakeWorker(SCRIPT), [9, 7], 4)


def test_the_seed_matters_where_the_request_samples() -> None:
    worker = FakeWorker(SCRIPT)
    one, two = (encode(SamplingParams(seed, do_sample=True)) for seed in (1, 2))
    assert generate(worker, [7], 8, one) == generate(worker, [7], 8, one)
    assert generate(worker, [7], 8, one) != generate(worker, [7], 8, two)
    assert generate(worker, [7], 8, GREEDY) == generate(worker, [7], 8, encode(SamplingParams(2)))


def test_the_choice_matters_where_the_request_samples() -> None:
    worker = FakeWorker(SCRIPT)
    answers = [
        generate(worker, [7], 8, encode(SamplingParams(1, do_sample=True, choice=choice))) for choice in range(4)
    ]
    assert answers[0] == generate(worker, [7], 8, encode(SamplingParams(1, do_sample=True)))
    assert len({tuple(ids) for ids in answers}) == 4
    assert generate(worker, [7], 8, GREEDY) == generate(worker, [7], 8, encode(SamplingParams(1, choice=1)))


def test_top_n_tokens_for_the_rows_that_ask() -> None:
    """As many as requested, or one more that ties with the last."""
    worker = FakeWorker(SCRIPT)
    asked = (3, 0, 1)
    news = [slot(at, [7 + at], encode(SamplingParams(at, do_sample=True, top_n=n))) for at, n in enumerate(asked)]
    pages = [(at, at * 4 + n) for at in range(3) for n in range(4)]
    seen = set()
    for number in range(1, 13):
        rows = [(at, number - 1, 1, 1) for at in range(3)]
        result = worker.run_step(step(number, rows, news if number == 1 else [], pages if number == 1 else []))
        drawn, counts = good(result), unpack_uint32(result.top_counts)
        tops = list(zip(unpack_int32(result.top_ids), unpack_float32(result.top_logprobs), strict=True))
        assert len(counts) == 3
        assert sum(counts) == len(tops)
        for row, (n, count) in enumerate(zip(asked, counts, strict=True)):
            mine, tops = tops[:count], tops[count:]
            assert len({token for token, _ in mine}) == count
            assert mine == sorted(mine, key=lambda top: (-top[1], top[0]))
            seen.add(count - n)
            if n:
                assert (drawn[row], unpack_float32(result.logprobs)[row]) in mine
                assert count == n or (count == n + 1 and mine[n - 1][1] == mine[n][1])
    assert seen == {0, 1}


def test_no_top_n_tokens_unless_requested_and_at_most_the_vocabulary() -> None:
    worker = FakeWorker(SCRIPT)
    plain = worker.run_step(FIRST)
    assert (plain.top_counts, plain.top_ids, plain.top_logprobs) == (b"", b"", b"")
    everything = slot(1, [9], encode(SamplingParams(1, top_n=1 << 40)))
    result = worker.run_step(step(2, [(0, 6, 1, 0), (1, 0, 1, 1)], [everything], [(1, 3)]))
    assert unpack_uint32(result.top_counts) == [ID_COUNT]
    assert len(set(unpack_int32(result.top_ids))) == ID_COUNT


def test_chunks_rows_and_shared_prefixes_do_not_change_the_tokens() -> None:
    worker = FakeWorker(SCRIPT)
    prompt = [5, 6, 7, 8, 9, 10]
    expected = generate(worker, prompt, 2)
    worker.reset()
    good(worker.run_step(step(1, [(0, 0, 4, 0)], [slot(0, prompt)], [(0, 3), (0, 5)])))
    # Slot 1 finds the page of the first four ids; both finish their prompt in one step.
    later = step(2, [(0, 4, 2, 1), (1, 4, 2, 1)], [slot(1, prompt)], [(1, 3), (1, 7)])
    assert good(worker.run_step(later)) == [expected[0]] * 2
    assert good(worker.run_step(step(3, [(1, 6, 1, 1), (0, 6, 1, 1)]))) == [expected[1]] * 2


def test_the_last_token_of_a_whole_cached_prompt_may_be_computed_again() -> None:
    worker = FakeWorker(SCRIPT)
    prompt = [5, 6, 7, 8]
    expected = good(worker.run_step(step(1, [(0, 0, 4, 1)], [slot(0, prompt)], [(0, 3)])))
    again = step(2, [(1, 3, 1, 1)], [slot(1, prompt)], [(1, 3)])
    assert good(worker.run_step(again)) == expected


def test_a_new_epoch_starts_empty() -> None:
    worker = FakeWorker(SCRIPT)
    expected = generate(worker, [7, 8, 9], 1)
    assert good(worker.run_step(step(1, [(0, 0, 3, 1)], [slot(0, [7, 8, 9])], [(0, 0)], epoch=2))) == expected
    assert "epoch 1 is over" in worker.run_step(step(2, [(0, 3, 1, 1)])).error


def test_a_full_context_may_be_computed_but_no_token_sampled_after_it() -> None:
    worker = FakeWorker(SCRIPT)
    pages = [(0, page) for page in range(6)]
    good(worker.run_step(step(1, [(0, 0, 16, 0)], [slot(0, [1] * 24)], pages)))
    good(worker.run_step(step(2, [(0, 16, 7, 0)])))
    assert "token 24 is over the limit of a request" in worker.run_step(step(3, [(0, 23, 1, 1)])).error


FIRST = step(1, [(0, 0, 6, 1)], [slot(0, [1, 2, 3, 4, 5, 6])], [(0, 0), (0, 1)])


@each_case(
    ("bad", "fault"),
    [
        (step(3, [(0, 6, 1, 1)]), "number 3 follows 1"),
        (step(2, []), "no rows"),
        (step(2, [(0, 6, 1, 1), (0, 7, 1, 1)]), "two rows"),
        (step(2, [(1, 0, 1, 1)]), "slot 1 is empty"),
        (step(2, [(0, 5, 1, 1)]), "starts at 5, but 6 tokens are computed"),
        (step(2, [(0, 6, 2, 1)]), "position 7 of 7 known ids"),
        (step(2, [(0, 6, 0, 1)]), "0 tokens to compute"),
        (step(2, [(0, 6, 1, 2)]), "samples are 0 or 1"),
        (step(2, [(0, 6, 1, 1)], pages=[(0, 12)]), "page 12 of 12"),
        (step(2, [(0, 6, 1, 1)], pages=[(0, 1)]), "page 1 is in the table of slot 0 twice"),
        (step(2, [(0, 6, 1, 1)], pages=[(2, 3)]), "slot 2 is empty"),
        (step(2, [(3, 0, 1, 1)], [slot(3, [1])], [(3, 3)]), "slot 3 of 3"),
        (step(2, [(1, 0, 1, 1)], [slot(1, [128])], [(1, 3)]), "not in the vocabulary"),
        (step(2, [(1, 0, 1, 1)], [slot(1, [-1])], [(1, 3)]), "not in the vocabulary"),
        (step(2, [(1, 0, 1, 1)], [slot(1, [1], biased(128))], [(1, 3)]), "a biased id is not in the vocabulary"),
        (step(2, [(1, 0, 1, 1)], [slot(1, [1], biased(1, 2))], [(1, 3)]), "bias_ids and biases differ in length"),
        (step(2, [(1, 0, 24, 1)], [slot(1, [1] * 25)], [(1, 3)]), "25 tokens are over the limit of a request"),
        (step(2, [(1, 0, 5, 1)], [slot(1, [1] * 5)], [(1, 3)]), "1 pages do not cover 5 tokens"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1] * 4)], [(1, 3)]), "samples at 3 of 4 known ids"),
        (step(2, [(1, 0, 17, 1)], [slot(1, [1] * 17)], [(1, page) for page in range(3, 8)]), "over the limit of 16"),
        (step(2, [(1, 0, 1, 1)], [slot(1, [1]), slot(1, [1])], [(1, 3)]), "two requests"),
        (step(2, [(1, 0, 1, 1)], [slot(1, [1], b"\x91\x07")], [(1, 3)]), "Tokenize"),
        # Shared pages must hold the same tokens, all of them.
        (step(2, [(1, 4, 1, 1)], [slot(1, [1, 2, 3, 9, 5])], [(1, 0), (1, 3)]), "page 0 holds other tokens"),
        (step(2, [(1, 5, 1, 1)], [slot(1, [1, 2, 3, 4, 5, 6])], [(1, 0), (1, 1)]), "page 1 is shared with 2 of 4"),
        (step(2, [(1, 4, 1, 1)], [slot(1, [1, 2, 3, 4, 5])], [(1, 4), (1, 3)]), "page 4 is shared with 0 of 4"),
        # Slot 0 still computes on a page that slot 1 is given to write.
        (step(2, [(0, 6, 1, 1), (1, 0, 1, 1)], [slot(1, [9])], [(1, 1)]), "page 1 was given to slot 1"),
    ],
)  # fmt: skip
def test_a_bad_step_is_rejected_with_the_faults_name(bad: Step, fault: str) -> None:
    worker = FakeWorker(SCRIPT)
    good(worker.run_step(FIRST))
    result = worker.run_step(bad)
    assert fault in result.error
    assert (result.number, result.epoch, result.token_ids) == (bad.number, bad.epoch, b"")


def test_pages_of_an_ended_request_may_be_reused() -> None:
    worker = FakeWorker(SCRIPT)
    good(worker.run_step(FIRST))
    good(worker.run_step(step(2, [(1, 0, 1, 1)], [slot(1, [9])], [(1, 1)])))
    assert "page 1 was given to slot 1" in worker.run_step(step(3, [(0, 6, 1, 1)])).error


def test_a_slot_can_be_reused() -> None:
    worker = FakeWorker(SCRIPT)
    good(worker.run_step(FIRST))
    again = step(2, [(0, 0, 6, 1)], [slot(0, [1, 2, 3, 4, 5, 6])], [(0, 8), (0, 9)])
    expected = good(FakeWorker(SCRIPT).run_step(FIRST))
    assert good(worker.run_step(again)) == expected


def test_the_length_limit_of_a_request_is_enforced() -> None:
    worker = FakeWorker(SCRIPT)
    assert len(generate(worker, [3], 23)) == 23
    with pytest.raises(AssertionError, match="over the limit of a request"):
        generate(worker, [3], 24)


def test_drafts_change_only_the_number_of_steps() -> None:
    sampling = encode(SamplingParams(3, do_sample=True, top_n=2))
    worker = FakeWorker(SCRIPT)
    whole = generate(worker, [7, 8, 9], 9, sampling)
    worker.reset()
    pages = [(0, page) for page in range(4)]
    drawn = good(worker.run_step(step(1, [(0, 0, 3, 1)], [slot(0, [7, 8, 9], sampling)], pages)))
    for number, (drafts, accepted) in enumerate(
        [(whole[1:4], 3), ([127, 127], 0), ([whole[6], 127, whole[8]], 1), ([], 0)], 2
    ):
        rows = [(0, 2 + len(drawn), 1, 1)]
        result = worker.run_step(step(number, rows, drafts=[len(drafts)], draft_ids=drafts))
        assert list(result.counts) == [accepted + 1]
        drawn += good(result)
        assert len(unpack_uint32(result.top_counts)) == accepted + 1
    assert drawn == whole[: len(drawn)]
    assert len(drawn) == 9


def test_proposed_drafts_are_often_accepted() -> None:
    worker = FakeWorker(SCRIPT._replace(pages=200, max_total_tokens=800))
    whole = generate(worker, [7], 500)
    worker.reset()
    drawn = good(worker.run_step(step(1, [(0, 0, 1, 1)], [slot(0, [7])], [(0, page) for page in range(130)])))
    number, counts = 1, set()
    while len(drawn) < 490:
        number += 1
        result = worker.run_step(step(number, [(0, len(drawn), 1, 1)], drafts=[2]))
        drawn += good(result)
        counts.add(result.counts[0])
    assert drawn == whole[: len(drawn)]
    assert counts == {1, 2, 3}
    assert 490 / 3 < number < 490 / 2


@each_case(
    ("how", "fault"),
    [
        ({"drafts": [1, 1], "draft_ids": [5, 6]}, "rows and drafts differ"),
        ({"drafts": [-1]}, "a row has -1"),
        ({"drafts": [MAX_DRAFT_TOKENS + 1]}, "254 are possible"),
        ({"draft_ids": [5]}, "draft_ids without drafts"),
        ({"drafts": [2], "draft_ids": [5]}, "1 draft_ids for 2 drafts"),
        ({"drafts": [1], "draft_ids": [128]}, "a draft is not in the vocabulary"),
        ({"drafts": [2], "draft_ids": [5, 6]}, "2 pages do not cover 9 tokens"),
        ({"drafts": [17]}, "18 tokens are over the limit of 16"),
    ],
)
def test_bad_drafts_are_rejected_with_the_faults_name(how: dict[str, Any], fault: str) -> None:
    worker = FakeWorker(SCRIPT)
    good(worker.run_step(FIRST))
    assert fault in worker.run_step(step(2, [(0, 6, 1, 1)], **how)).error


def test_drafts_need_a_sampling_row_and_end_with_the_request() -> None:
    worker = FakeWorker(SCRIPT)
    good(worker.run_step(FIRST))
    unsampled = step(2, [(1, 0, 2, 0)], [slot(1, [1, 2])], [(1, 3)], drafts=[1], draft_ids=[5])
    assert "drafts without samples" in worker.run_step(unsampled).error
    long = [slot(2, [1] * 13)]
    pages = [(2, page) for page in range(4, 11)]
    good(worker.run_step(step(3, [(2, 0, 13, 1)], long, pages)))
    assert "over the limit of a request" in worker.run_step(step(4, [(2, 13, 1, 1)], drafts=[10])).error
    good(worker.run_step(step(5, [(2, 13, 1, 1)], drafts=[9])))


def test_the_engine_keeps_its_pace() -> None:
    engine = FakeEngine(SCRIPT._replace(step_us=20_000))
    pending = engine.launch(FIRST)
    assert engine.is_done(pending)
    result = engine.collect(pending)
    assert result.forward_us >= 20_000
    assert good(result) == good(FakeWorker(SCRIPT).run_step(FIRST))
