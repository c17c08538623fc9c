"""The tokens of a step become text: each row is decoded by its request and goes into a message for its api."""

import time
from collections.abc import Mapping

from tgi.kernel import metrics
from tgi.kernel.answer import Texts
from tgi.kernel.link import Peer
from tgi.kernel.messages import Reason, Tokens
from tgi.kernel.pack import ints, uints
from tgi.tokenizer.columns import Columns, Tops
from tgi.tokenizer.request import Request, Stage
from tgi.tokenizer.vocabulary import Vocabulary

# Measurements are written with the first tokens after so long: one would cost as much as decoding a token.
KEPT_SECONDS = 1.0


class Steps:
    """Gathers what is to be said of the steps since the last `take`. `measured` writes down how long they took: call it
    when a request has ended, so that whoever has seen the end of an answer finds it in the metrics."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._columns: dict[Peer, Columns] = {}
        self._decoding: dict[str, list[float]] = {"prefill": [], "decode": []}  # seconds per step, by its kind
        self._due = 0.0  # when these are to be written, on the clock of time.perf_counter

    def decode(self, requests: Mapping[int, Request], tokens: Tokens) -> list[int]:
        """Takes the tokens of one step. Returns the requests that a stop string has ended. The last tokens of one that
        is over stay with it (`Request.last`)."""
        begun = time.perf_counter()
        method = "decode"
        ids, live = ints(tokens.ids), Stage.LIVE
        tops = Tops(tokens) if tokens.top_counts else None
        stopped: list[int] = []
        end = 0
        for rid, count in zip(uints(tokens.rids), uints(tokens.counts), strict=True):
            first, end = end, end + count
            request = requests.get(rid)
            if request is None or request.stage is not live or request.reason is not None:
                continue  # drawn before the scheduler heard that this request is over
            if not request.generated:
                method = "prefill"
            columns = self._columns.get(request.api)
            if columns is None:
                columns = self._columns[request.api] = Columns(self._vocabulary)
            at = first
            while at < end and request.reason is None:
                number = ids[at]
                text = request.push(number)
                columns.texts.append(text)
                columns.special.append(request.hidden)
                if request.held:
                    columns.hold(request.held)
                if request.division is not None:
                    columns.divide(request.division.push(number, text, request.held, request.hidden))
                at += 1
            columns.rids.append(request.asked.rid)
            columns.counts.append(at - first)
            columns.ids += tokens.ids[4 * first : 4 * at]
            columns.logprobs += tokens.logprobs[4 * first : 4 * at]
            if request.reason is not None:
                columns = request.last = columns.split()
            if tops is not None:
                columns.tops(tops, first, at)
            if request.reason is Reason.STOP:
                stopped.append(rid)
        self._decoding[method].append(time.perf_counter() - begun)
        if begun > self._due:
            self._due = begun + KEPT_SECONDS
            self.measured()
        return stopped

    def take(self) -> list[tuple[Peer, Texts]]:
        """A message for each api that has got tokens."""
        messages = [(api, columns.message()) for api, columns in self._columns.items() if columns.rids]
        self._columns = {}
        return messages

    def forget(self, api: Peer) -> None:
        """Nobody is there to read what this api has got."""
        self._columns.pop(api, None)

    def measured(self) -> None:
        """Writes what decoding has taken since the last time."""
        for method, seconds in self._decoding.items():
            if seconds:
                metrics.tgi_batch_decode_duration.labels(method=method).observe_all(seconds)
                seconds.clear()
