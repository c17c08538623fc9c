"""The running batch: requests that hold a slot of the worker, and the columns of those that decode."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tgi.microkernel.messages.codec import INT32, UINT32
from tgi.microkernel.messages.protocol import PREFILL
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.scheduler.columns import increment_each
from tgi.scheduler.request import NO_SLOT, NO_STEP, ClientShare, Request, TokenizerPeer


class RunningBatch:
    """A request holds a slot from admission until it ends or is preempted. In between it prefills, then decodes; once
    all its tokens are planned it only waits for results.

    A step plan decides which requests decode from the next step on and which no longer do; `commit` applies that.
    """

    def __init__(self, slots: int, work_register: WorkRegister) -> None:
        """`work_register`: where the requests in the slots are registered, unless there are too many slots."""
        fits = slots <= len(work_register.slots)
        self._registered: Any = work_register.slots if fits else array("Q", bytes(8 * slots))
        self.step = 0  # the number of the last step plan
        self.early_exits = 0  # requests that have left before their last token, perhaps with rows in flight
        self.prefilling: dict[Request, None] = {}  # in the order of admission
        self.partitions: dict[TokenizerPeer, DecodePartition] = {}  # the decoding requests; no partition is empty
        self.paused: dict[Request, None] = {}  # they keep slot and pages, and get no rows: see `restrict`
        self.prefilled: list[Request] = []  # their last prefill chunk is planned: they decode from the next step on
        self.finishing: list[Request] = []  # their last token is planned: they decode no longer
        self.shares: dict[ClientShare, None] = {}  # the clients that hold slots
        self.free_slots = list(range(slots - 1, -1, -1))
        self.images = 0  # of the requests that hold slots
        self._slots: list[Request | None] = [None] * slots

    def __len__(self) -> int:
        return len(self._slots) - len(self.free_slots)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._slots if request is not None)

    @property
    def decoding(self) -> list[Request]:
        """In the order of a step's rows."""
        return [request for partition in self.partitions.values() for request in partition.requests]

    @property
    def unfinished(self) -> list[Request]:
        """The requests that need further steps."""
        return [*self.prefilling, *self.decoding, *self.paused]

    @property
    def busy(self) -> bool:
        """Whether any slot is held."""
        return len(self.free_slots) < len(self._slots)

    @property
    def full(self) -> bool:
        return not self.free_slots

    def assign_slot(self, request: Request) -> int:
        """Gives a free slot to a request that is to be prefilled, and returns it. Raises IndexError if none is free."""
        request.slot = slot = self.free_slots.pop()
        share = request.share
        if not share.running:
            self.shares[share] = None
        share.running += 1
        self.images += len(request.images)
        self._slots[slot] = request
        self._registered[slot] = request.work_number
        return slot

    def restrict(self, may_run: Callable[[Request], bool]) -> None:
        """Pauses all requests but these, which are the batch in progress from now on, and resumes these. To be called
        while no step is in flight."""
        self.commit()
        for request in [one for one in self.unfinished if may_run(one) is (one in self.paused)]:
            if request in self.paused:
                del self.paused[request]
                if request.state is PREFILL:
                    self.prefilling[request] = None
                else:
                    self._enter_partition(request)
            else:
                if request.partition is not None:
                    self._leave_partition(request)
                self.prefilling.pop(request, None)
                self.paused[request] = None
        for slot, one in enumerate(self._slots):
            self._registered[slot] = 0 if one is None or one in self.paused else one.work_number

    def commit(self) -> None:
        """Moves requests into and out of the partitions as the last step plan decided. To be called before the next
        one."""
        for request in self.finishing:
            if request.partition is not None:  # else it has ended
                self._leave_partition(request)
        for request in self.prefilled:
            if request.slot != NO_SLOT:  # else it has ended
                self._enter_partition(request)
        self.finishing, self.prefilled = [], []

    def due(self) -> tuple[list[Request], list[Request]]:
        """Decoding requests whose next row needs a page, and those whose next row samples the last token."""
        need_page: list[Request] = []
        finishing: list[Request] = []
        for partition in self.partitions.values():
            partition.collect_due(need_page, finishing)
        return need_page, finishing

    def _enter_partition(self, request: Request) -> None:
        partition = self.partitions.get(request.tokenizer)
        if partition is None:
            partition = self.partitions[request.tokenizer] = DecodePartition()
        partition.add(request)
        request.share.enter_decode(request, self.step)

    def _leave_partition(self, request: Request) -> None:
        partition = self.partitions[request.tokenizer]
        partition.remove(request)
        request.share.leave_decode(request)
        if not partition.requests:
            del self.partitions[request.tokenizer]

    def release_slots(self, requests: list[Request]) -> None:
        slots, free, prefilling, registered = self._slots, self.free_slots, self.prefilling, self._registered
        for request in requests:
            if len(request.token_ids) < request.max_total_tokens:
                self.early_exits += 1
            slot = request.slot
            slots[slot] = None
            registered[slot] = 0
            free.append(slot)
            share = request.share
            share.running -= 1
            self.images -= len(request.images)
            if not share.running:
                del self.shares[share]
            if request.partition is not None:
                self._leave_partition(request)
            else:
                prefilling.pop(request, None)
                self.paused.pop(request, None)
            request.slot = NO_SLOT
            request.valid_from_step = NO_STEP

    def preemption_candidate(
        self, excluding: Request | None = None, share: ClientShare | None = None
    ) -> Request | None:
        """The first to be preempted of all other requests that still need steps: of the client with the highest load,
        or of this one, the last to arrive."""
        candidates = [one for one in self.unfinished if one is not excluding and share in (None, one.share)]
        return max(candidates, key=preemption_order) if candidates else None


def preemption_order(request: Request) -> tuple[tuple[int, float], int]:
    """Of two requests, the one for which this is higher is preempted first. Clients hold what their weight gives them,
    and within a client the first to arrive finishes first."""
    return request.share.load, request.arrival


class PartitionRows(NamedTuple):
    """The rows of a step that are a whole partition, with its columns as they were when the step was planned."""

    tokenizer: TokenizerPeer
    begin: int  # index of the first of them among the sampling rows
    end: int
    rids: bytes  # uint32
    token_ids: "list[array[int]]"
    stop_ids: list[frozenset[int]]
    stop_id_union: set[int]


class DecodePartition:
    """The decoding requests of one tokenizer, as columns: item k of each column belongs to request k.

    All requests have a row in nearly every step, and columns are handled in C. Python code handles a single request
    only when it is due: when its next row needs a page or samples the last token. All positions advance by one in each
    step, so the step in which a request is due is known ahead. This also avoids cache misses: the Request objects of a
    large batch do not fit into a processor's caches.
    """

    __slots__ = ("_due", "_steps", "requests", "rids", "slots", "starts", "starts_sum", "stop_id_union",
                 "stop_ids", "token_ids")  # fmt: skip

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.token_ids: list[array[int]] = []
        self.stop_ids: list[frozenset[int]] = []
        self.stop_id_union: set[int] = set()  # a superset of all `stop_ids`: it may keep those of former requests
        self.rids = array(UINT32)
        self.slots = array(INT32)
        self.starts = array(INT32)  # the position that the next row computes
        self.starts_sum = 0
        self._steps = 0  # steps in which all requests had a row
        self._due: dict[int, dict[Request, None]] = {}  # by the value of `_steps` at which they are due

    def add(self, request: Request) -> None:
        """Adds a request, whose next row starts at `request.planned`."""
        start = request.planned
        request.partition = self
        request.partition_index = len(self.requests)
        self.requests.append(request)
        self.token_ids.append(request.token_ids)
        self.stop_ids.append(request.stop_ids)
        self.stop_id_union |= request.stop_ids
        self.rids.append(request.rid)
        self.slots.append(request.slot)
        self.starts.append(start)
        self.starts_sum += start
        self._schedule(request, start)

    def remove(self, request: Request) -> None:
        """Removes a request; the last one moves to its index."""
        self._unschedule(request)
        index = request.partition_index
        request.planned = self.starts[index]
        self.starts_sum -= request.planned
        request.partition = None
        last = self.requests.pop()
        token_ids, stop_ids = self.token_ids.pop(), self.stop_ids.pop()
        rid, slot, start = self.rids.pop(), self.slots.pop(), self.starts.pop()
        if last is not request:
            last.partition_index = index
            self.requests[index], self.token_ids[index], self.stop_ids[index] = last, token_ids, stop_ids
            self.rids[index], self.slots[index], self.starts[index] = rid, slot, start

    def collect_due(self, need_page: list[Request], finishing: list[Request]) -> None:
        """Appends requests whose next row needs a page, and requests whose next row samples the last token. Updates
        `planned` of both."""
        starts = self.starts
        for request in self._due.get(self._steps, ()):
            request.planned = start = starts[request.partition_index]
            if start == request.capacity:
                need_page.append(request)
            if start == request.last_start:
                finishing.append(request)

    def plan_rows(self, tokenizer: TokenizerPeer, begin: int) -> PartitionRows:
        """Plans one row for each request; the first is at index `begin` among the step's sampling rows. All positions
        advance by one."""
        count = len(self.requests)
        rows = PartitionRows(
            tokenizer=tokenizer,
            begin=begin,
            end=begin + count,
            rids=self.rids.tobytes(),
            token_ids=self.token_ids.copy(),
            stop_ids=self.stop_ids.copy(),
            stop_id_union=self.stop_id_union,
        )
        self.starts = increment_each(self.starts)
        self.starts_sum += count
        self._due.pop(self._steps, None)
        self._steps += 1
        return rows

    def set_start(self, request: Request, start: int) -> None:
        """Sets the position that the request's next row computes."""
        self._unschedule(request)
        self.starts_sum += start - self.starts[request.partition_index]
        request.planned = self.starts[request.partition_index] = start
        self._schedule(request, start)

    def page_added(self, request: Request) -> None:
        """To be called when the request has got another page."""
        self._unschedule(request)
        self._schedule(request, self.starts[request.partition_index])

    def _schedule(self, request: Request, start: int) -> None:
        """Computes when the request is due."""
        capacity, last = request.capacity, request.last_start
        request.due_step = step = self._steps + (capacity if capacity < last else last) - start
        if (others := self._due.get(step)) is None:
            self._due[step] = {request: None}
        else:
            others[request] = None

    def _unschedule(self, request: Request) -> None:
        if (others := self._due.get(request.due_step)) is not None:
            others.pop(request, None)
