"""Requests of a hostile tokenizer at a scheduler with a flight recorder, whose stamps hold numbers of limited size."""

from pathlib import Path

import pytest

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import PROTOCOL, Add, End, FinishReason, Hello, RequestContext, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.observability.flight_recorder import RingRecorder
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

TOKENIZER = PeerId("tokenizer", 0, b"12345678")


@pytest.mark.parametrize(
    "fields", [{"request_key": -1}, {"request_key": 1 << 64}, {"request_key": 1, "request_index": -1}]
)
def test_a_request_that_cannot_be_stamped_is_rejected(tmp_path: Path, fields: dict[str, int]) -> None:
    scheduler = Scheduler(SchedulerConfig(), RingRecorder(tmp_path / "ring"))
    scheduler.handle(Hello(PROTOCOL, *TOKENIZER), TOKENIZER, 0.0)
    prompt, sampling = pack_column(INT32, [1, 2, 3]), encode(SamplingParams(0))
    scheduler.handle(Add(1, prompt, 10, sampling, context=RequestContext(**fields)), TOKENIZER, 0.0)
    ends = [message for _, message in scheduler.outgoing() if isinstance(message, End)]
    assert [end.reason for end in ends] == [FinishReason.INVALID]
    assert "request_" in ends[0].message
