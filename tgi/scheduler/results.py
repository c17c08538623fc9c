"""What an answered step has drawn goes to the requests and their tokenizers' rows."""

from array import array
from collections.abc import Iterable
from itertools import compress, repeat
from operator import contains

from tgi.kernel.messages import Reason, Result
from tgi.kernel.pack import UINT32, floats, ints
from tgi.scheduler.counters import Counters
from tgi.scheduler.flight import Flight, Section
from tgi.scheduler.model import Model
from tgi.scheduler.plan import Planner
from tgi.scheduler.request import Request
from tgi.scheduler.tokens import Columns, Top, tops

Ended = list[tuple[Request, Reason]]


def one_each(flight: Flight, result: Result, left: int) -> Ended:
    """Every row has drawn one token. `left`: how many have left before their last token so far. Returns whom it
    completes."""
    number = flight.step.number
    drawn = ints(result.ids)
    rest = 0
    stopped: list[Request] = []
    if result.top_counts:
        for request, top in zip(flight.drawing, tops(result), strict=True):
            if number >= request.since:
                request.client.tops.append(top)
    else:
        for section in flight.sections:
            stopped += _section(section, flight, result, drawn, left != flight.left)
            rest = section.end
    if rest < len(drawn):
        logprobs = floats(result.logprobs[4 * rest :])
        for request, token, logprob in zip(flight.drawing[rest:], drawn[rest:], logprobs, strict=True):
            if number < request.since:
                continue  # it has left its slot since this step was planned
            request.ids.append(token)
            request.client.rows.append((request.rid, token, logprob))
            if token in request.stop_ids:
                stopped.append(request)
    # Length counts before an end token, as in TGI.
    ended = [(request, Reason.EOS) for request in stopped if len(request.ids) < request.limit]
    length = Reason.LENGTH
    return ended + [(request, length) for request in flight.last if number >= request.since]


def _section(section: Section, flight: Flight, result: Result, drawn: list[int], left: bool) -> Iterable[Request]:
    """Takes the rows of a lane all at once. Returns those that have drawn an end token."""
    client, begin, end, rids, ids, stops, union = section
    requests, tokens = flight.drawing[begin:end], drawn[begin:end]
    columns = Columns(rids, result.ids[4 * begin : 4 * end], result.logprobs[4 * begin : 4 * end])
    if left:  # some have left their slots since this step was planned, perhaps of these
        there = [flight.step.number >= request.since for request in requests]
        requests, tokens = [*compress(requests, there)], [*compress(tokens, there)]
        ids, stops = [*compress(ids, there)], [*compress(stops, there)]
        columns = Columns(*(array(UINT32, compress(memoryview(one).cast("I"), there)).tobytes() for one in columns))
    any(map(array.append, ids, tokens))  # `append` returns None, so this goes through them all, in C
    client.columns = columns
    if union.isdisjoint(tokens):
        return ()
    return compress(requests, map(contains, stops, tokens))


def runs_each(flight: Flight, result: Result, planner: Planner, counters: Counters) -> Ended:
    """A row has drawn as many tokens as its drafts were right, and one. What is behind a last one is dropped."""
    number = flight.step.number
    columns = zip(ints(result.ids), floats(result.logprobs), _tops(result), strict=False)
    ended: Ended = []
    for place, (request, count) in enumerate(zip(flight.drawing, result.counts, strict=True)):
        run = [next(columns) for _ in range(count)]
        drafted = flight.drafts[place] if place < len(flight.drafts) else 0
        counters.drafted_tokens += drafted
        counters.accepted_tokens += count - 1
        if number < request.since:
            continue
        if drafted and isinstance(request.guesser, Model):
            request.guesser.verified(drafted, count - 1)
        for token, logprob, top in run:
            request.ids.append(token)
            request.client.rows.append((request.rid, token, logprob))
            if top is not None:
                request.client.tops.append(top)
            if reason := request.finished():
                ended.append((request, reason))
                break
        # What was computed for wrong drafts does not count.
        if request.lane is not None:
            request.lane.move(request, len(request.ids) - 1)
        planner.holdings.filled([request])
    return ended


def _tops(result: Result) -> Iterable[Top | None]:
    return tops(result) if result.top_counts else repeat(None)
