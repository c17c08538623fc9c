"""The waiting queue: fair between clients, first come, first served within a client.

Fairness is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
client has a counter of the tokens that were computed for it, divided by its weight; the client with the lowest counter
is next. A client that begins to wait is lifted to the lowest counter of those that wait, so that idle time earns no
credit. The paper bounds by how much the service of two clients that both have requests waiting differs, whatever they
send.
"""

from bisect import bisect
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil
from operator import attrgetter

from tgi.microkernel.messages.protocol import QUEUED
from tgi.scheduler.request import ClientShare, Request

# Ended requests that a client's queue may hold in addition to as many as wait: bounds the cost of a sweep per request.
SWEEP_THRESHOLD = 64
# Idle clients whose counters are kept in addition to as many as are active; a forgotten one begins anew.
MAX_IDLE_CLIENTS = 4096
_arrival = attrgetter("arrival")


# An entry of the heap: (-priority, counter, whether it has running requests, arrival of its head, the client). Counters
# only grow, so an entry's is a lower bound.
_Entry = tuple[int, float, bool, int, ClientShare]


class WaitingQueue:
    """Requests that wait for a slot. The client with the lowest counter is next. A request that is preempted returns to
    its place in its client's order of arrival.

    Nothing here iterates over waiting requests, and over clients only when one begins to wait behind another priority.
    """

    def __init__(self) -> None:
        self.step = 0  # the number of the step that is planned
        self.clients: dict[str, ClientShare] = {}  # active and idle ones
        self._max_clients = MAX_IDLE_CLIENTS  # with more of them, idle ones are forgotten
        self._heap: list[_Entry] = []  # of each client with waiting requests; a client may have ended all of its own
        self._length = 0
        self._latest: ClientShare | None = None  # the client that was admitted from last

    def __len__(self) -> int:
        return self._length

    def append(self, request: Request) -> None:
        """Adds a new request: the last to arrive, unless it had been submitted before and was lost."""
        request.share = share = self.clients.get(request.context.client) or self._new_client(request)
        waiting = share.waiting
        if waiting and waiting[-1].arrival > request.arrival:
            self.reinsert(request)
            return
        waiting.append(request)
        self._length += 1
        if not share.in_heap:
            self._begin_to_wait(share)

    def reinsert(self, request: Request) -> None:
        """Adds a request that was in the queue before, at its place."""
        # Its client may have been forgotten while the request was elsewhere.
        request.share = share = self.clients.setdefault(request.context.client, request.share)
        self._length += 1
        share.waiting.insert(bisect(share.waiting, request.arrival, key=_arrival), request)
        if not share.in_heap:
            self._begin_to_wait(share)

    def remove(self, request: Request) -> None:
        """Removes a waiting request. Raises ValueError if it does not wait here."""
        request.share.waiting.remove(request)
        self._length -= 1

    def head(self) -> Request | None:
        """The next request, which stays in the queue."""
        heap = self._heap
        while heap:
            entry = heap[0]
            share = entry[4]
            requests = share.waiting
            while requests:
                head = requests[0]
                if head.state is QUEUED:
                    if len(heap) == 1 or (key := self._key(share, head)) <= entry:
                        return head
                    heapreplace(heap, key)
                    break
                requests.popleft()  # ended while it waited
                share.ended -= 1
            else:
                heappop(heap)
                share.in_heap = False
        return None

    def pop(self, request: Request) -> None:
        """Removes what `head` has just returned. Raises IndexError if the queue is empty."""
        self._latest = share = request.share
        share.waiting.popleft()
        self._length -= 1

    def record_ended(self, request: Request) -> None:
        """A request in the queue has ended. It is removed when it reaches the head, or in a sweep."""
        self._length -= 1
        share = request.share
        share.ended += 1
        if 2 * share.ended > len(share.waiting) + SWEEP_THRESHOLD:
            share.waiting = deque(_queued(share.waiting))
            share.ended = 0

    def waiting(self) -> list[Request]:
        """All requests in the queue, by client."""
        shares = (share.waiting for share in self.clients.values())
        return [request for requests in shares for request in _queued(requests)]

    def ahead(self, request: Request) -> int:
        """About how many requests are admitted before this one, the latest of its client: clients of its priority take
        turns by their weights, and the one with the lowest counter begins."""
        share, step = request.share, self.step
        before = own = len(share.waiting) - share.ended - 1
        place = share.counter(step), share.running > 0
        for *_, other in self._heap:
            if other is share or other.priority < share.priority:
                continue
            waiting = len(other.waiting) - other.ended
            if other.priority == share.priority:
                first = (other.counter(step), other.running > 0) < place
                waiting = min(waiting, ceil(own * other.weight / share.weight) + first)
            before += waiting
        return before

    def _key(self, share: ClientShare, head: Request) -> _Entry:
        return -share.priority, share.counter(self.step), share.running > 0, head.arrival, share

    def _begin_to_wait(self, share: ClientShare) -> None:
        """Lifts a client to the lowest counter of those of its priority that wait, or, if none does, to that of the
        client that was admitted from last."""
        step, heap, head = self.step, self._heap, share.waiting[0]
        share.set_rank(head.context.weight, head.context.priority)
        if not heap:
            floor = 0.0 if self._latest is None else self._latest.counter(step)
        elif heap[0][0] == -share.priority:
            floor = heap[0][4].counter(step)
        else:
            floor = min((entry[1] for entry in heap if entry[0] == -share.priority), default=0.0)
        if (missing := floor - share.counter(step)) > 0:
            share.served += missing
        share.in_heap = True
        heappush(heap, self._key(share, head))

    def _new_client(self, request: Request) -> ClientShare:
        if len(self.clients) > self._max_clients:
            self._forget_idle_clients()
        context = request.context
        share = self.clients[context.client] = ClientShare(context.client, context.weight, context.priority)
        return share

    def _forget_idle_clients(self) -> None:
        for share in self.clients.values():
            share.in_heap = len(share.waiting) > share.ended
        self._heap = [entry for entry in self._heap if entry[4].in_heap]
        heapify(self._heap)
        self.clients = {name: share for name, share in self.clients.items() if share.running or share.in_heap}
        self._max_clients = 2 * len(self.clients) + MAX_IDLE_CLIENTS


def _queued(requests: deque[Request]) -> Iterator[Request]:
    return (request for request in requests if request.state is QUEUED)
