"""Speculative decoding: how many tokens are drafted for each row of a step, and where the drafts come from.

`Speculation` weighs gain against cost. A drafted position takes computing time whether it is accepted or not, and a
step with drafts delays all rows: sequence lengths are unknown until it is answered, so no further step can be in flight
meanwhile. Both costs are measured, and expressed as tokens that the batch would have got in that time. So a
compute-bound batch drafts nothing, and a memory-bound batch drafts many tokens. In between, only rows with high
acceptance draft.

Drafts come from `NgramProposer`, here, or from the worker's draft model, of which only `DraftAcceptance` is known here.
"""

from array import array

from tgi.microkernel.messages.codec import INT32
from tgi.microkernel.messages.protocol import StepResult
from tgi.scheduler.decode_batch import RunningBatch
from tgi.scheduler.estimators import LinearFit
from tgi.scheduler.in_flight import InFlightStep
from tgi.scheduler.request import NO_SLOT, Request

# A draft that is less likely to be accepted is not made, even where it seems to cost nothing.
MIN_ACCEPTANCE = 0.1
# Token ids that are indexed between two steps, at about 0.2 µs each: longer prompts take several steps.
INDEX_BUDGET = 4096
# Weight of the newest idle time in the moving average.
IDLE_WEIGHT = 0.1
# Share by which the average idle time shrinks in each step without drafts. It is measured with drafts only, so one long
# pause would otherwise end drafting for good.
IDLE_DECAY = 0.01


class Speculation:
    """Decides how many tokens are drafted per row and step."""

    def __init__(self, max_drafts: int, draft_model: bool) -> None:
        """`max_drafts`: per row and step. `draft_model`: the worker's draft model proposes them, else n-grams do."""
        self._max_drafts = max_drafts
        self.draft_model = draft_model
        self._unindexed: dict[Request, None] = {}  # with a slot and a longer unindexed part than `_acceptance` handles
        self._step_us = LinearFit()  # duration of a step by the positions that it computes
        self._idle_us = 0.0  # mean time for which the worker idles between two steps that do not overlap

    def add_request(self, request: Request) -> None:
        """A request has arrived: gives it a drafter."""
        if self.draft_model:
            request.drafter = DraftAcceptance()
        else:
            request.drafter = NgramProposer(request.token_ids, request.max_total_tokens)

    def slot_assigned(self, request: Request) -> None:
        """A request has got a slot: its prompt will be indexed."""
        if isinstance(request.drafter, NgramProposer):
            self._unindexed[request] = None

    def index_prompts(self) -> None:
        """Indexes up to INDEX_BUDGET token ids of requests that hold a slot. To be called while the worker is busy."""
        budget = INDEX_BUDGET
        while budget > 0 and self._unindexed:
            request = next(iter(self._unindexed))
            if request.slot != NO_SLOT and isinstance(request.drafter, NgramProposer):
                budget -= request.drafter.index(budget)
                if request.drafter.unindexed:
                    return
            del self._unindexed[request]

    def record_step(self, step: InFlightStep, result: StepResult, now: float) -> None:
        """Updates the measured costs with an answered step."""
        if result.forward_us > 0 and not step.prefill_tokens:
            self._step_us.add(step.decode_rows + sum(step.drafts), result.forward_us)
        if step.drafts:
            idle_us = (now - step.sent_at) * 1e6 - result.forward_us
            self._idle_us += IDLE_WEIGHT * (max(idle_us, 0.0) - self._idle_us)
        else:
            self._idle_us *= 1.0 - IDLE_DECAY

    def should_wait(self, latest: InFlightStep, batch: RunningBatch) -> bool:
        """Whether the next step must be planned only after the latest one is answered: that has drafts, or the next one
        is then expected to be worth drafting."""
        if latest.drafts:
            return True
        batch.commit()
        rows = batch.decoding
        draft_cost, idle_cost = self._costs(len(rows))
        if draft_cost >= 1.0:
            return False
        gain = 0.0
        for request in rows:
            acceptance = self._acceptance(request)
            if acceptance > MIN_ACCEPTANCE:
                # The step in flight samples the next token itself; only those after it would be drafted.
                gain += acceptance * _best_draft(acceptance, draft_cost, self._max_room(request) - 1)[1]
        return gain > idle_cost

    def draft_counts(self, rows: list[Request], budget: int) -> list[int]:
        """How many tokens to draft for each of these rows, `budget` in total at most. Empty: drafting is not worth the
        idle time."""
        draft_cost, idle_cost = self._costs(len(rows))
        if draft_cost >= 1.0:
            return []
        counts = []
        total_gain = 0.0
        for request in rows:
            count, gain = _best_draft(self._acceptance(request), draft_cost, min(self._max_room(request), budget))
            counts.append(count)
            total_gain += gain
            budget -= count
        if total_gain > idle_cost:
            return counts
        for request in rows:
            if isinstance(request.drafter, DraftAcceptance):
                request.drafter.decay()
        return []

    def _acceptance(self, request: Request) -> float:
        """The probability that the request's next draft is accepted; 0 if there is none."""
        drafter = request.drafter
        if drafter is None:
            return 0.0
        if isinstance(drafter, NgramProposer):
            unindexed = drafter.unindexed
            if unindexed > self._max_drafts + 2:
                self._unindexed[request] = None  # a prompt, or the tokens of a period without drafts
                return 0.0
            if unindexed:
                drafter.update()
        return drafter.acceptance

    def _max_room(self, request: Request) -> int:
        """Drafts that the request may have: another token is sampled after the last one."""
        return min(self._max_drafts, request.max_total_tokens - len(request.token_ids) - 1)

    def _costs(self, rows: int) -> tuple[float, float]:
        """The costs of a drafted position and of the idle time, in tokens that this many rows would get in the same
        time without drafts."""
        step_us = self._step_us.at(rows)
        return (self._step_us.slope * rows / step_us, self._idle_us * rows / step_us) if step_us else (0.0, 0.0)


def _best_draft(acceptance: float, cost: float, most: int) -> tuple[int, float]:
    """How many drafts gain more than they cost, and their total gain in tokens. Each is accepted with the given
    probability if those before it are."""
    count, gain, accepted = 0, 0.0, acceptance
    while count < most and accepted > cost and accepted > MIN_ACCEPTANCE:
        count += 1
        gain += accepted - cost
        accepted *= acceptance
    return count, gain


# --- n-gram proposer (prompt lookup decoding) -------------------------------------------------------------------------

# Matches of at least 2 ids are compared up to this length.
MAX_MATCH = 16
# Earlier positions of a pair of ids that are compared, the latest first.
MAX_CANDIDATES = 8
# Weight of the newest proposal in the acceptance.
NGRAM_WEIGHT = 0.1
# Acceptance before the first proposal, for matches of 2 to 3, 4 to 7, and at least 8 ids. The index of a match of this
# length is min(length, 8).bit_length() - 2.
INITIAL_NGRAM_ACCEPTANCE = (0.3, 0.5, 0.8)
# log2 of the smallest hash table.
MIN_TABLE_BITS = 12
# Multiplicative hashing: the odd number next to 2^32 over the golden ratio.
HASH_MULTIPLIER = 2654435761


class NgramProposer:
    """Proposes the ids that followed when the latest ids of the same request, prompt included, last occurred.

    The positions of each pair of ids are chained, the latest first, as in an LZ77 compressor: 8 bytes per id, O(1) per
    new id. Every new id is compared with its proposal, drafted or not, so `acceptance` needs no drafts and also shows
    when a text begins to repeat itself.
    """

    __slots__ = ("_acceptances", "_heads", "_ids", "_mask", "_match", "_previous", "_source")

    def __init__(self, token_ids: "array[int]", max_total_tokens: int) -> None:
        """`token_ids` is extended by the caller, up to `max_total_tokens`."""
        self._ids = token_ids
        self._mask = (1 << max(max_total_tokens.bit_length(), MIN_TABLE_BITS)) - 1
        self._heads: array[int] = array(INT32)  # by hash of a pair: the latest position where one ended; 0: none
        self._previous = array(INT32, [0])  # per indexed id: the position before it with the same hash
        self._source = 0  # the position of the id that is proposed next; 0: there is no proposal
        self._match = 0  # how many ids before it are equal to the latest ones
        self._acceptances = list(INITIAL_NGRAM_ACCEPTANCE)

    @property
    def unindexed(self) -> int:
        """Ids that `index` or `update` has not handled."""
        return len(self._ids) - len(self._previous)

    @property
    def acceptance(self) -> float:
        return self._acceptances[min(self._match, 8).bit_length() - 2] if self._source else 0.0

    def _allocate_table(self) -> "array[int]":
        """Deferred until the first id is indexed, since many requests may wait."""
        self._heads = array(INT32, bytes(4 * (self._mask + 1)))
        return self._heads

    def index(self, most: int) -> int:
        """Adds up to this many ids to the chains without comparing them with proposals. Returns how many it added."""
        ids, heads, previous, mask = self._ids, self._heads or self._allocate_table(), self._previous, self._mask
        begin = len(previous)
        end = min(len(ids), begin + most)
        position = begin
        for first, second in zip(ids[begin - 1 : end - 1], ids[begin:end], strict=True):
            key = (first * HASH_MULTIPLIER + second) & mask
            previous.append(heads[key])
            heads[key] = position
            position += 1
        self._source = self._match = 0
        return end - begin

    def update(self) -> None:
        """Adds all new ids to the chains and compares each with its proposal."""
        ids, heads, previous, mask = self._ids, self._heads or self._allocate_table(), self._previous, self._mask
        acceptances = self._acceptances
        for position in range(len(previous), len(ids)):
            token = ids[position]
            key = (ids[position - 1] * HASH_MULTIPLIER + token) & mask
            candidate = heads[key]
            previous.append(candidate)
            heads[key] = position
            if self._source:
                accepted = ids[self._source] == token
                kind = min(self._match, 8).bit_length() - 2
                acceptances[kind] += NGRAM_WEIGHT * (accepted - acceptances[kind])
                if accepted:
                    self._source += 1
                    self._match += 1
                    continue
                self._source = self._match = 0
            if candidate:
                self._find_match(position, candidate)

    def propose(self, count: int) -> "array[int]":
        """The next ids, if there is a proposal. Where fewer ids follow the match, the sequence is repeated."""
        found = self._ids[self._source : self._source + count]
        return (found * (count // len(found) + 1))[:count] if len(found) < count else found

    def record_verification(self, drafted: int, accepted: int) -> None:
        """Does nothing: `update` compares every id with its proposal."""

    def _find_match(self, position: int, candidate: int) -> None:
        """Finds the longest match of the ids up to `position`, the latest of equally long ones, among the chain of
        candidates."""
        ids, previous = self._ids, self._previous
        for _ in range(MAX_CANDIDATES):
            if ids[candidate - 1] == ids[position - 1] and ids[candidate] == ids[position]:
                match, most = 2, min(MAX_MATCH, candidate + 1)
                while match < most and ids[candidate - match] == ids[position - match]:
                    match += 1
                if match > self._match:
                    self._source, self._match = candidate + 1, match
                    if match == MAX_MATCH:
                        return
            candidate = previous[candidate]
            if not candidate:
                return


# --- draft model ------------------------------------------------------------------------------------------------------

# Acceptance before the first draft.
INITIAL_ACCEPTANCE = 0.7
# Weight of the newest draft in the acceptance.
ACCEPTANCE_WEIGHT = 0.1
# Share by which the acceptance returns to its initial value in each step without drafts, so that they are tried again.
DECAY_WEIGHT = 0.01


class DraftAcceptance:
    """How often the drafts of the worker's draft model were accepted for one request."""

    __slots__ = ("acceptance",)

    def __init__(self) -> None:
        self.acceptance = INITIAL_ACCEPTANCE

    def record_verification(self, drafted: int, accepted: int) -> None:
        """Records that the first `accepted` of `drafted` tokens were accepted. Drafts after the first rejected one are
        not counted."""
        for index in range(min(drafted, accepted + 1)):
            self.acceptance += ACCEPTANCE_WEIGHT * ((index < accepted) - self.acceptance)

    def decay(self) -> None:
        """A step had no drafts: moves the acceptance towards its initial value."""
        self.acceptance += DECAY_WEIGHT * (INITIAL_ACCEPTANCE - self.acceptance)
