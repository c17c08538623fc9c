"""What an answered step has drawn goes to the requests and their tokenizers' rows."""

from collections.abc import Iterable
from itertools import repeat

from tgi.kernel.messages import Reason, Result
from tgi.kernel.pack import floats, ints
from tgi.scheduler.counters import Counters
from tgi.scheduler.flight import Flight
from tgi.scheduler.model import Model
from tgi.scheduler.plan import Planner
from tgi.scheduler.request import Request
from tgi.scheduler.tokens import Top, tops

Ended = list[tuple[Request, Reason]]


def one_each(flight: Flight, result: Result, planner: Planner) -> Ended:
    """Every row has drawn one token. Returns whom that completes."""
    number = flight.step.number
    if result.top_counts:
        for request, top in zip(flight.drawing, tops(result), strict=True):
            if number >= request.since:
                request.client.tops.append(top)
    ended: Ended = []
    for request, token, logprob in zip(flight.drawing, ints(result.ids), floats(result.logprobs), strict=True):
        if number < request.since:
            continue  # it has left its slot since this step was planned
        ids = request.ids
        ids.append(token)
        request.client.rows.append((request.rid, token, logprob))
        known = len(ids)
        if known > request.publish_at:
            planner.page_generated(request)
        if (known == request.limit or token in request.stop_ids) and (reason := request.finished()):
            ended.append((request, reason))
    return ended


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
            if len(request.ids) > request.publish_at:
                planner.page_generated(request)
            if reason := request.finished():
                ended.append((request, reason))
                break
        request.planned = len(request.ids) - 1  # what was computed for wrong drafts does not count
    return ended


def _tops(result: Result) -> Iterable[Top | None]:
    return tops(result) if result.top_counts else repeat(None)
