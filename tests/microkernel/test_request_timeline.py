"""What `tgi why` tells, from stamps that are made here."""

from tgi.microkernel.observability.flight_recorder import (
    EVERY_REQUEST,
    Event,
    Stamp,
    client_name,
    client_number,
    find_requests,
    name_digest,
)
from tgi.microkernel.observability.request_timeline import MAX_IDS, Timeline, explain

KEY = 0x0123456789ABCDEF
ALICE, BOB = client_number("key 00000000000000a1"), client_number("192.0.2.7")


class History:
    """Stamps at one time after the other, in seconds."""

    def __init__(self) -> None:
        self.stamps: list[Stamp] = []
        self.now = 100.0

    def add(self, event: Event, key: int = KEY, a: int = 0, b: int = 0, after: float = 0.0) -> "History":
        role = {0: "api-0", 1: "api-0", 2: "tokenizer-0"}.get(event // 10, "scheduler-0")
        self.now += after
        self.stamps.append(Stamp(self.now, role, key, 0, event, a, b))
        return self

    def timeline(self) -> Timeline:
        return Timeline(self.stamps, KEY, 0)

    def seconds(self) -> dict[str, float]:
        return {name: round(spent, 6) for name, spent in self.timeline().seconds.items()}

    def text(self) -> str:
        return "\n".join(explain(self.stamps, KEY))


def queued(history: History, key: int = KEY, client: tuple[int, int] = ALICE) -> History:
    for event in (Event.SUBMITTED, Event.TOKENIZED, Event.QUEUED):
        if event is Event.SUBMITTED:
            history.add(Event.RECEIVED, key, *client)
        history.add(event, key)
    return history


def ended(history: History, key: int = KEY) -> History:
    return history.add(Event.ENDED, key).add(Event.ANSWERED, key)


def test_clients_have_numbers() -> None:
    for name in ("key 0123456789abcdef", "192.0.2.7", "2001:db8:1:2::/64", ""):
        assert client_name(*client_number(name)) == name


def test_a_request_is_found_by_each_of_its_names() -> None:
    history = queued(History()).add(Event.NAMED, b=name_digest("mine"))
    queued(history, 7).add(Event.NAMED, 7, b=name_digest("other"))
    for name in (
        "mine",
        "chatcmpl-0123456789abcdef" + "0" * 16,
        "resp_0123456789abcdef" + "0" * 16,
        "msg_0123456789abcdef" + "0" * 16,
        "cmpl-0123456789abcdef" + "f" * 16,
        "0123456789abcdef",
    ):
        assert find_requests(history.stamps, name) == [KEY], name
    assert find_requests(history.stamps, "chatcmpl-0123456789abcdee" + "0" * 16) == []
    assert find_requests(history.stamps, "") == []


def test_a_wait_tells_whose_requests_ran_and_were_admitted_before() -> None:
    history = History()
    for key in range(2, 8):
        queued(history, key, ALICE if key < 7 else BOB).add(Event.ADMITTED, key)
    ended(history, 2)
    queued(history, 8, BOB)  # waits when it arrives, and is admitted after it
    queued(history, client=BOB)
    queued(history, 9).add(Event.ADMITTED, 9, after=1.0)  # overtakes it: its client has had less
    history.add(Event.ADMITTED, after=1.0)
    (wait,) = history.timeline().waits
    assert wait.until - wait.since == 2.0
    assert [key for key, _ in wait.running] == [3, 4, 5, 6, 7]
    assert [key for key, _ in wait.admitted] == [9]
    text = history.text()
    assert "in queue for 2000.0 ms" in text
    assert "5 ran when it began to wait" in text
    assert f"4 of key 00000000000000a1: {'0' * 15}3" in text
    assert f"1 of 192.0.2.7, its own client: {'0' * 15}7" in text
    assert "1 were admitted before it" in text


def test_the_list_of_ids_is_bounded() -> None:
    history = History()
    for key in range(2, 102):
        queued(history, key).add(Event.ADMITTED, key)
    queued(history).add(Event.ADMITTED, after=1.0)
    (line,) = [line for line in history.text().splitlines() if "100 of key" in line]
    assert line.endswith("…")
    assert line.count("0" * 10) == MAX_IDS + 1  # and in the name of the client


def test_while_the_worker_is_down_queued_requests_wait_for_its_recovery() -> None:
    history = queued(History()).add(Event.WORKER_DOWN, EVERY_REQUEST, after=1.0)
    history.add(Event.WORKER_UP, EVERY_REQUEST, after=5.0).add(Event.ADMITTED, after=2.0)
    ended(history.add(Event.PREFILLED, after=0.5))
    assert history.seconds() == {"queue": 3.0, "recovery of worker-0": 5.0, "prefill": 0.5}
    assert "the worker has ended" in history.text()


def test_a_trial_is_told_and_also_that_of_others() -> None:
    history = queued(History()).add(Event.ADMITTED).add(Event.PREFILLED)
    queued(history, 2).add(Event.ADMITTED, 2).add(Event.PREFILLED, 2)
    history.add(Event.WORKER_DOWN, EVERY_REQUEST, after=1.0).add(Event.WORKER_LOST).add(Event.WORKER_LOST, 2)
    history.add(Event.ON_TRIAL, a=1, after=2.0).add(Event.ON_TRIAL, 2, a=1).add(Event.WORKER_UP, EVERY_REQUEST)
    history.add(Event.ADMITTED, after=0.25).add(Event.PREFILLED, after=0.25).add(Event.RELEASED, after=4.0)
    ended(history.add(Event.PREFILLED, 2, after=3.0))
    assert history.seconds() == {
        "decode": 4.0,
        "recovery of worker-0": 2.0,
        "queue on trial": 0.25,
        "prefill on trial": 0.25,
        "decode on trial": 4.0,
    }
    assert "on trial with 1 strikes" in history.text()
    assert history.timeline().tried_meanwhile == {(2, 0): None}
    assert "others are on trial" in history.text()


def test_a_suspect_of_a_tokenizer_waits_for_its_turn_there() -> None:
    history = History().add(Event.RECEIVED, KEY, *ALICE).add(Event.SUBMITTED).add(Event.TOKENIZER_LOST, a=1, after=1.0)
    history.add(Event.RESUBMITTED, a=0, after=2.0)
    history.stamps.append(Stamp(history.now, "api-0", KEY, 0, Event.ON_TRIAL, 1))
    ended(history.add(Event.TOKENIZED, after=3.0).add(Event.QUEUED).add(Event.ADMITTED, after=1.0))
    assert history.seconds() == {
        "tokenizer": 1.0,
        "recovery of tokenizer-1": 2.0,
        "tokenizer on trial": 3.0,
        "queue": 1.0,
    }


def test_the_loss_of_the_scheduler_voids_what_ran_there() -> None:
    history = queued(queued(History()).add(Event.ADMITTED), 2).add(Event.ADMITTED, 2)
    history.add(Event.SCHEDULER_LOST, after=1.0).add(Event.SCHEDULER_LOST, 2).add(Event.QUEUED, after=2.0)
    history.add(Event.QUEUED, 2).add(Event.ADMITTED, after=1.0)
    ended(history).add(Event.RECEIVED, 3)
    assert history.seconds() == {"prefill": 1.0, "recovery of scheduler-0": 2.0, "queue": 1.0}
    assert history.timeline().waits == []  # nothing ran when it was queued again


def test_the_time_of_a_client_that_comes_back_is_told_as_such() -> None:
    history = queued(History()).add(Event.ADMITTED).add(Event.PREFILLED)
    history.add(Event.LEFT, after=1.0).add(Event.ENDED, after=5.0).add(Event.RECEIVED, KEY, *ALICE, after=1.0)
    history.add(Event.SUBMITTED).add(Event.FIRST_TOKEN).add(Event.ANSWERED, after=2.0)
    assert history.seconds() == {"decode": 3.0, "client is away": 6.0}


def test_a_client_that_comes_back_before_it_is_known_to_be_gone_is_not_away() -> None:
    history = queued(History()).add(Event.ADMITTED).add(Event.PREFILLED)
    history.add(Event.RECEIVED, KEY, *ALICE, after=1.0).add(Event.SUBMITTED).add(Event.LEFT, after=1.0)
    history.add(Event.FIRST_TOKEN).add(Event.ANSWERED, after=2.0)
    assert history.seconds() == {"decode": 3.0, "tokenizer": 1.0}
