"""Plans the next step: decode rows first, then prefill chunks, by the clients' shares and the order of arrival."""

from array import array

from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, pack_column, unpack_int32
from tgi.microkernel.messages.kv_groups import paged_groups
from tgi.microkernel.messages.protocol import (
    CHUNK,
    LAST_CHUNK,
    MAX_DIVIDED_IMAGES,
    PREEMPT,
    PREFILL,
    UNDIVIDED_PROMPT,
    WORKER_LOST,
    DeploymentLimits,
    RequestEvent,
    SlotAssignment,
    Step,
)
from tgi.microkernel.observability.flight_recorder import NO_RECORDER, Event, FlightRecorder
from tgi.microkernel.recovery.crash_isolation import CrashIsolation
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.scheduler.adapters import WorkerAdapters
from tgi.scheduler.columns import ONE
from tgi.scheduler.counters import Counters
from tgi.scheduler.decode_batch import DecodePartition, PartitionRows, RunningBatch, preemption_order
from tgi.scheduler.estimators import HANG_SECONDS, PrefillBudget, SizeClass, StepLimits, StepSizeLimit
from tgi.scheduler.in_flight import InFlightStep, PromptLogprobRow, prompt_logprob_row
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.page_pool import NO_PAGE
from tgi.scheduler.request import NO_SLOT, ClientShare, Request, TokenizerPeer
from tgi.scheduler.speculation import NgramProposer, Speculation
from tgi.scheduler.waiting_queue import WaitingQueue

# Share of the pages that admission leaves to the running requests, so that they need not be preempted at once.
SPARE_PAGES_SHARE = 0.01
# At most this share of the slots is preempted for another client in one step.
PREEMPTED_SLOTS_SHARE = 1 / 16


class StepPlanner:
    """Owns the running batch and the KV cache, and takes requests from the waiting queue.

    While requests are on trial for a crash (CrashIsolation), `begin_turn` restricts what the planner chooses from to
    those whose turn it is.

    A step may be planned while earlier ones are in flight: the worker runs steps in order, so pages that are free at
    planning time may be used, and a decode row needs only a position, not the token id of the step before.
    """

    def __init__(
        self,
        limits: DeploymentLimits,
        prefix_caching: bool,
        prefill_budget: PrefillBudget,
        step_limits: StepLimits,
        queue: WaitingQueue,
        counters: Counters,
        adapters: WorkerAdapters,
        isolation: CrashIsolation,
        work_register: WorkRegister,
        speculation: Speculation | None = None,
        recorder: FlightRecorder = NO_RECORDER,
    ) -> None:
        self._recorder = recorder
        self.limits = limits
        self.queue = queue
        self.trial_queue: dict[Request, None] = {}  # an ordered set: requests on trial that wait for a slot
        self._waiting: WaitingQueue | TrialQueue = queue  # of this turn
        self.batch = RunningBatch(limits.max_batch_size, work_register)
        self.kv_cache = KVCacheManager(limits)
        self._page_size = limits.page_size
        self._prefix_caching = prefix_caching
        self._prefill_budget = prefill_budget
        self.size_limit = StepSizeLimit(limits.max_batch_prefill_tokens, limits.page_size)
        self._step_limits = step_limits
        # A GPU computes a step while the host prepares the next one, which may take as long: it must not come late.
        self._plans_late = limits.device != "cuda"
        self._counters = counters
        self._adapters = adapters
        self._isolation = isolation
        self._speculation = speculation
        self._spare_pages = int(limits.pages * SPARE_PAGES_SHARE)
        self._max_share_preemptions = max(1, int(limits.max_batch_size * PREEMPTED_SLOTS_SHARE))
        self._tables = len(paged_groups(limits.groups))  # page tables of a slot
        # The number of each page table as a packed column of one item.
        self._table_columns = [pack_column(INT32, [at]) for at in range(limits.max_batch_size * self._tables)]

    def plan(self, number: int, epoch: int, ahead: bool, now: float) -> InFlightStep | None:
        """The next step, or None if there is nothing to compute. `ahead`: other steps are in flight, so the latest
        token ids are not known."""
        kv_cache = self.kv_cache
        if not kv_cache.committed:
            self.commit()
        self.queue.step = self.batch.step = number
        if self.queue and not self._isolation.on_trial:
            self._preempt_for_head()
        builder = StepBuilder()
        running = len(self.batch)
        if kv_cache.slides:
            self._slide_prompts()
        self._plan_decode(builder)
        decode_rows = len(builder.sampling_requests)
        if self._speculation is not None and not ahead:
            self._plan_drafts(builder, self._speculation)
        self._plan_prefill(builder, number, now)
        kv_cache.begin_step()
        if kv_cache.index is not None:
            kv_cache.index.step = number if builder.works else number - 1
        if not builder.works:
            return None
        # This step writes the pages of its prompts; later steps may find them.
        kv_cache.mark_filled(builder.sampling_requests[decode_rows:] + builder.prefilling)
        if kv_cache.appended:
            tables, pages = kv_cache.take_appended()
            builder.page_tables.insert(0, pack_column(INT32, tables))  # before any other page of the same request
            builder.page_ids[:0] = pages
        if kv_cache.snapshots is not None:
            builder.state_copies = kv_cache.snapshots.take_copies()
        return builder.build(
            number,
            epoch,
            joined=running > 0,
            early_exits=self.batch.early_exits,
            now=now,
            step_limits=self._step_limits,
            plans_late=self._plans_late,
        )

    # --- decode -------------------------------------------------------------------------------------------------------

    def _plan_decode(self, builder: "StepBuilder") -> None:
        """One row for each decoding request. Requests for which no page is available have no row."""
        need_page, finishing = self.batch.due()
        without_page: set[Request] = set()
        if need_page and not self.kv_cache.append_pages(need_page):
            without_page = self._append_scarce_pages(need_page)
            finishing = [one for one in finishing if one.partition is not None and one not in without_page]
        if not without_page:
            for tokenizer, partition in self.batch.partitions.items():
                builder.add_partition(tokenizer, partition)
        else:
            for request in self.batch.decoding:
                if request not in without_page:
                    builder.add_decode_row(request)
        builder.finishing += finishing
        self.batch.finishing = finishing

    def _append_scarce_pages(self, need_page: list[Request]) -> set[Request]:
        """Appends a page to each of these, and preempts others for it, the last in `preemption_order` first. Returns
        the requests that have got none."""
        without_page = set()
        for request in sorted(need_page, key=preemption_order):
            if request.slot == NO_SLOT:
                continue  # it was preempted in this loop
            if self._free_pages(request, self._tables):
                # Recorded with the request, since it may be preempted in this loop: that changes the order.
                self.kv_cache.append_pages([request])
            else:
                without_page.add(request)
        return without_page

    def _plan_drafts(self, builder: "StepBuilder", speculation: Speculation) -> None:
        """Adds drafts to the decode rows, within the pages that are available beyond the spare ones. While prompts
        wait, drafts get at most half of the tokens that a step may compute."""
        rows = builder.sampling_requests
        most, snapshots = self.size_limit.tokens - len(rows), self.kv_cache.snapshots
        if snapshots is not None:
            most = min(most, snapshots.drafts)
        counts = speculation.draft_counts(rows, most // 2 if self.batch.prefilling or self.queue else most)
        for request, start, wanted in zip(rows, builder.starts, counts, strict=False):  # no counts: nothing is drafted
            if snapshots is not None:  # a snapshot is taken between two steps
                wanted = min(wanted, snapshots.tokens_before_next(start) - 1)
            missing = -(-(start + 1 + wanted - request.capacity) // self._page_size)
            if missing > 0 and self.kv_cache.ensure_available(missing * self._tables + self._spare_pages):
                self.kv_cache.append_pages([request], missing)
            count = min(wanted, request.capacity - start - 1)
            builder.drafts.append(count)
            if isinstance(request.drafter, NgramProposer):
                builder.draft_ids.append(request.drafter.propose(count).tobytes())
        if not any(builder.drafts):
            del builder.drafts[:]

    def _free_pages(self, request: Request, count: int) -> bool:
        """Ensures that this many pages are available for this request; preempts those after it in `preemption_order`
        until they are, in the turn of a trial first any that is not of it. False: too few could be freed."""
        while not self.kv_cache.ensure_available(count):
            if (candidate := self._bystander()) is None:
                candidate = self.batch.preemption_candidate(excluding=request)
                if candidate is None or preemption_order(candidate) < preemption_order(request):
                    return False
            self._preempt(candidate)
        return True

    def _bystander(self) -> Request | None:
        """In the turn of a trial: the last to arrive of the paused requests. They make room for it, so that a trial
        never waits for other requests."""
        return None if self._waiting is self.queue else max(self.batch.paused, key=_arrival, default=None)

    def _slide_prompts(self) -> None:
        """Of prompts that have pages for a part only, in groups with a sliding window: gives back the pages before the
        window, and appends those for the next chunk. A prompt for which too few are available waits."""
        for request in sorted(self.batch.prefilling, key=preemption_order):
            if request.slot == NO_SLOT or request.capacity >= len(request.token_ids):
                continue  # it was preempted in this loop, or has pages for all its tokens
            missing = self.kv_cache.pages_to_slide(request)
            if self._free_pages(request, sum(missing)):
                self.kv_cache.slide(request, missing)

    def _preempt(self, request: Request) -> None:
        self._counters.preemptions += 1
        self._requeue(request, PREEMPT)

    def may_preempt(self, share: ClientShare) -> bool:
        """Whether a client that waits has a right to a slot of another one."""
        return any(share.may_preempt(other, self.queue.step) for other in self.batch.shares)

    def _preempt_for_head(self) -> None:
        """If the head of the queue finds no slot, or too few pages, preempts requests of the client with the highest
        load, as long as the head's client has a right to what that one holds."""
        batch, kv_cache = self.batch, self.kv_cache
        if len(self.queue.clients) == 1 or (head := self.queue.head()) is None:
            return
        for _ in range(self._max_share_preemptions):
            if not batch.full and (not head.missing_pages or kv_cache.ensure_available(head.missing_pages)):
                return
            if not batch.shares or batch.shares.keys() == {head.share}:
                return
            share = max(batch.shares, key=lambda one: one.load)
            if not head.share.may_preempt(share, self.queue.step):
                return
            if (candidate := batch.preemption_candidate(share=share)) is None:
                return
            self._preempt(candidate)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _plan_prefill(self, builder: "StepBuilder", number: int, now: float) -> None:
        """Adds chunks of prompts, by the counters of their clients: of each client first those that are partly
        computed, then waiting requests, in the order of arrival.

        The first prompt gets the whole budget. Another one joins only while the step is smaller than what makes it
        worthwhile: beyond that a prompt takes the same time in any step, and the mean latency is lowest if prompts
        finish one after the other.
        """
        waiting = self._waiting
        if not self.batch.prefilling and not waiting:
            return
        budget = self.size_limit.tokens - len(builder.sampling_requests) - sum(builder.drafts)
        if budget <= 0:
            return
        if builder.sampling_requests:
            budget = self._prefill_budget.target_tokens(min(self.limits.page_size, budget), budget)
        elif len(self.queue.clients) > 1:  # a request of another client may arrive at any time, and waits for this step
            budget = self._prefill_budget.shared_tokens(budget)
        # Prompts are added until the remaining budget is at or below this.
        stop_at = max(0, budget - self._prefill_budget.amortizing_tokens(budget))
        begun = self._begun_prompts()
        free, blocked = self.batch.free_slots, False
        while budget > stop_at:
            head = None if blocked else waiting.head()
            if begun and (head is None or not self._precedes(head, begun[-1])):
                budget -= self._add_chunk(builder, begun.pop(), budget)
            elif head is None:
                return
            elif free and self._admit(builder, head, self.batch.busy, number, now):
                waiting.pop(head)
                budget -= self._add_chunk(builder, head, budget)
            elif (bystander := self._bystander()) is not None:
                self._preempt(bystander)
            else:
                blocked = True

    def _begun_prompts(self) -> list[Request]:
        """The prompts that are partly computed, the next one last."""
        begun = list(self.batch.prefilling)
        if len(begun) > 1:
            begun.sort(key=self._prefill_order)  # stable: in the order of admission within a client
            begun.reverse()
        return begun

    def _prefill_order(self, request: Request) -> tuple[int, float]:
        return -request.share.priority, request.share.counter(self.queue.step)

    def _precedes(self, head: Request, begun: Request) -> bool:
        """Whether the head of the queue comes before a prompt that is partly computed."""
        if head.share is begun.share:
            return False
        # At equal counters, which a client gets when it begins to wait, the one with fewer slots is first.
        return (*self._prefill_order(head), head.share.load) < (*self._prefill_order(begun), begun.share.load)

    def _add_chunk(self, builder: "StepBuilder", request: Request, budget: int) -> int:
        """Adds a row of at most `budget` prompt tokens, or more if an image has. Returns how many it has, and what the
        images that are computed for it cost."""
        start, known, left = request.planned, len(request.token_ids), budget
        if request.capacity < known and request.capacity - start < budget:  # see `_slide_prompts`
            budget = request.capacity - start
            if not budget:
                return 0
        if request.snapshot_at:
            budget = self.kv_cache.snapshot_prompt(request, budget)
        tokens = known - start
        if tokens > budget:
            tokens = budget
        encoder_cost = 0
        if request.images and start < request.prompt_tokens:
            if self.limits.tower_slices > 1 and request.next_image(start, start + tokens, self.limits.undivided):
                return self._add_tower_slices(builder, request, tokens, left)
            tokens, encoder_cost = self._add_images(builder, request, tokens, left)
            if not tokens:
                return 0
        samples = start + tokens == known
        request.planned = end = start + tokens
        if end > (charged := request.charged_tokens):  # not so if it was computed before a preemption
            share = request.share
            share.served += share.input_cost * (end - (start if start > charged else charged))
            request.charged_tokens = end
        if request.prompt_logprobs_from < request.prompt_tokens and (row := prompt_logprob_row(request, start, end)):
            builder.prompt_logprob_rows.append(row)
        if samples:
            if request.state is PREFILL:
                del self.batch.prefilling[request]
            request.state = LAST_CHUNK[request.state]
            if end <= request.last_start:
                builder.sampling_requests.append(request)
                self.batch.prefilled.append(request)
            elif request.prompt_only:
                samples = False
                builder.prefilling.append(request)
                if request.pooling:
                    builder.pooled.append(request)
            else:
                builder.sampling_requests.append(request)
                builder.finishing.append(request)
        else:
            request.state = CHUNK[request.state]
            builder.prefilling.append(request)
            self.batch.prefilling[request] = None
        builder.chunks.append((request.slot, start, tokens, samples))
        return tokens + encoder_cost

    def _add_images(self, builder: "StepBuilder", request: Request, tokens: int, budget: int) -> tuple[int, int]:
        """How many tokens the next chunk of a prompt with images has that would have `tokens`, and what its images cost
        in tokens. 0: there are too few pages for one that is not divided; or it goes on with more tokens than a step
        with those of other prompts may have, or with an image that does not fit a step in which prompts of other
        clients have tokens, which do not wait for it."""
        start, cost = request.planned, self._prefill_budget.encoder_cost
        if self.limits.tower_slices > 1:
            cost = 0.0  # the tower has done its work
        shared = bool(builder.rows or builder.chunks or len(self.queue.clients) > 1)
        undivided = self.limits.undivided
        end, positions = request.image_chunk(start, start + tokens, budget, cost, shared, undivided)
        encoder_cost = int(positions * cost)
        too_large = bool(builder.chunks) and end - start > budget
        if positions and end - start + encoder_cost > budget:
            others = (*builder.finishing, *builder.prefilling)
            too_large |= any(other.share is not request.share for other in others)
        if end > request.capacity or (too_large and request.state is PREFILL):
            return 0, 0
        if not cost:
            return end - start, 0
        builder.encoder_positions += positions
        builder.encoder_cost += encoder_cost
        builder.unmeasured |= positions > 0 and not self._prefill_budget.encoder_measured
        if start >= request.charged_tokens:  # not so if it was computed before a preemption
            request.share.served += request.share.input_cost * encoder_cost
        return end - start, encoder_cost

    def _add_tower_slices(self, builder: "StepBuilder", request: Request, tokens: int, budget: int) -> int:
        """Adds slices of the vision tower for the images of the next chunk of a prompt that would have `tokens`, which
        is planned once the tower has computed them. Returns `budget`: no prompt follows in this step.

        They are few, so that requests that arrive do not wait long, and none in a step with prompt tokens, whose first
        token would wait for them.
        """
        start, whole, share = request.planned, self.limits.tower_slices, request.share
        request.state = CHUNK[request.state]
        self.batch.prefilling[request] = None
        if builder.chunks:
            return budget
        charged = start >= request.charged_tokens  # not so if it was computed before a preemption
        if not request.tower_slices and (other := self._divided_before(request)) is not None:
            # The client pays for its turn nevertheless: it is for its image that the other one is completed first.
            request, start, tokens = other, other.planned, other.images[other.tower_images].position + 1 - other.planned
        most, cost = self._prefill_budget.tower_tokens(budget), 0.0
        while image := request.next_image(start, start + tokens, self.limits.undivided):
            each = image.length * self._prefill_budget.encoder_cost / whole
            slices = min(whole - request.tower_slices, int((most - cost) / each))
            if slices < 1 or not self._prefill_budget.encoder_measured:
                if builder.tower:
                    break
                slices = 1
            builder.tower.extend((request.slot, request.tower_images, slices))
            cost += slices * each
            request.tower_slices += slices
            if request.tower_slices == whole:
                request.tower_images, request.tower_slices = request.tower_images + 1, 0
        builder.encoding.append(request)
        builder.encoder_cost += int(cost)
        builder.unmeasured |= not self._prefill_budget.encoder_measured
        if charged:
            share.served += share.input_cost * cost
        return budget

    def _divided_before(self, request: Request) -> Request | None:
        """The first request with an image that the tower has computed in part, if there are MAX_DIVIDED_IMAGES whose
        clients have at least the priority of this request's."""
        priority = request.share.priority
        divided = [one for one in self.batch.prefilling if one.tower_slices and one.share.priority >= priority]
        return divided[0] if len(divided) >= MAX_DIVIDED_IMAGES else None

    def _admit(self, builder: "StepBuilder", request: Request, busy: bool, number: int, now: float) -> bool:
        """Gives a waiting request a slot, with pages for all its tokens. False: too few pages are available, or too
        many images are in use.

        No request is preempted for it, and no pages are reserved for what it may generate. `busy`: other requests hold
        slots.
        """
        kv_cache = self.kv_cache
        if request.images and busy and self.batch.images + len(request.images) > self.limits.max_running_images:
            return False
        if request.missing_pages and busy and not kv_cache.ensure_available(request.missing_pages):
            return False  # as many are missing as when it was last tried
        # The last token is always computed, since its row samples the next one; so is each position that yields a
        # prompt logprob.
        prompt_logprobs = request.prompt_logprobs_from < request.prompt_tokens
        must_compute = request.prompt_logprobs_from if prompt_logprobs else len(request.token_ids)
        # Without its adapter the worker would fill the pages with other keys and values.
        request.shares_pages = shares = (
            self._prefix_caching
            and not request.pooling
            and not (request.images and self.limits.undivided == UNDIVIDED_PROMPT)  # all of it is in each page
            and (not request.cache_salt or self._adapters.is_loaded(request.cache_salt))
        )
        column = request.token_ids.tobytes()
        max_cached = (must_compute - 1) // self._page_size if shares else 0
        if max_cached and self._waiting is self.queue and not kv_cache.read_prefix(request, column, max_cached):
            return False
        if not kv_cache.allocate(request, column, max_cached, self._spare_pages if busy else 0):
            return False
        slot = self.batch.assign_slot(request)
        request.valid_from_step = request.tables_from_step = number
        if kv_cache.snapshots is not None:
            kv_cache.restore_state(kv_cache.snapshots, request)
        request.found_tokens = request.planned
        request.tower_images = request.tower_slices = 0
        self._counters.cache_hit_tokens += request.planned
        if request.first_planned_at is None:
            request.first_planned_at = now
            request.cached_tokens = min(request.planned, request.prompt_tokens)
        if self._speculation is not None:
            self._speculation.slot_assigned(request)
        self._recorder.stamp(Event.ADMITTED, request.context, request.planned, len(self.batch) - 1)
        assignment = SlotAssignment(slot, column, request.prompt_tokens, request.sampling)
        if prompt_logprobs:
            assignment = assignment._replace(
                prompt_logprobs_from=request.prompt_logprobs_from, prompt_top_n=request.prompt_top_n
            )
        if request.extras:
            assignment = assignment._replace(extras=request.extras, images=request.images)
        builder.slots.append(assignment)
        for table, pages in enumerate(request.tables, slot * self._tables):
            builder.page_tables.append(self._table_columns[table] * len(pages))
            builder.page_ids += pages
        return True

    # --- trials -------------------------------------------------------------------------------------------------------

    def put_on_trial(self) -> None:
        """Takes waiting requests that are on trial out of the queue: they are admitted in the turn of their group."""
        for request in self.queue.waiting():
            if self._isolation.is_on_trial(request):
                self.queue.remove(request)
                self.trial_queue[request] = None

    def begin_turn(self) -> None:
        """Restricts what is planned from now on to the requests whose turn it is. To be called while no step is in
        flight. The others keep their slots and pages."""
        isolation = self._isolation
        for request in [one for one in self.trial_queue if not isolation.is_on_trial(one)]:
            del self.trial_queue[request]  # its trial is over
            self.queue.reinsert(request)
        self.batch.restrict(isolation.may_run)
        self._waiting = TrialQueue(self.trial_queue, isolation) if isolation.is_group_turn else self.queue

    # --- between plans ------------------------------------------------------------------------------------------------

    def release(self, requests: list[Request]) -> None:
        """These requests have ended: takes their slots at once, and their pages with the next commit."""
        self.batch.release_slots(requests)
        self.kv_cache.release_later(requests)

    def commit(self) -> None:
        """Does the work that no step waits for: commits batch and KV cache, and appends the pages that the next rows
        need if there are enough for all."""
        self.batch.commit()
        self.kv_cache.commit()
        need_page, _ = self.batch.due()
        if need_page:
            self.kv_cache.append_pages(need_page)
        if self._speculation is not None:
            self._speculation.index_prompts()

    def _requeue(self, request: Request, event: RequestEvent) -> None:
        """Returns a request to the queue with all its tokens: the generated ones are computed again as prefill."""
        self.batch.commit()
        self.kv_cache.commit()
        self.batch.release_slots([request])
        self.kv_cache.free(request)
        request.state = event[request.state]
        request.missing_pages = 0
        self._counters.recomputed_tokens += request.generated_tokens
        stamped = Event.PREEMPTED if event is PREEMPT else Event.WORKER_LOST
        self._recorder.stamp(stamped, request.context, len(self.queue), len(self.batch))
        if self._isolation.is_on_trial(request):
            self.trial_queue[request] = None
        else:
            self.queue.reinsert(request)

    def worker_state_lost(self) -> None:
        """The worker's tensors are gone: returns all running requests to the queue and empties the KV cache."""
        for request in list(self.batch):
            self._requeue(request, WORKER_LOST)
        self.kv_cache.worker_state_lost()

    def steps_failed(self, steps: list[InFlightStep], event: RequestEvent = PREEMPT) -> None:
        """What these steps were to compute is not there, or only in part: returns all running requests to the queue.
        The pages stay that earlier steps have filled; all are lost if the pages that these steps had for a request are
        not known, since it has got others or has given them back."""
        pages, snapshots, known = [], [], True
        for step in steps:
            snapshots += [-1 - target for target in unpack_int32(step.message.state_copies)[1::2] if target < 0]
            starts = unpack_int32(step.message.starts)
            for request, start in zip(step.requests_in_row_order, starts, strict=True):
                known &= step.message.number >= request.tables_from_step
                for table in request.tables:
                    pages += table[start // self._page_size :]
        for request in list(self.batch):
            self._requeue(request, event)
        if known and NO_PAGE not in pages:
            self.kv_cache.forget(pages, snapshots)
        else:
            self.kv_cache.worker_state_lost()


class TrialQueue:
    """The waiting requests of the group whose turn it is."""

    def __init__(self, waiting: dict[Request, None], isolation: CrashIsolation) -> None:
        self._waiting = waiting
        self._isolation = isolation

    def __len__(self) -> int:
        return sum(map(self._isolation.may_run, self._waiting))

    def head(self) -> Request | None:
        """The next request, which stays in the queue."""
        return next(filter(self._isolation.may_run, self._waiting), None)

    def pop(self, request: Request) -> None:
        """Removes what `head` has returned."""
        del self._waiting[request]


def _arrival(request: Request) -> int:
    return request.arrival


class StepBuilder:
    """A step that is being planned: first the decode rows, as columns, then the prefill chunks."""

    def __init__(self) -> None:
        self.slots: list[SlotAssignment] = []
        self.page_tables: list[bytes] = []  # int32 columns
        self.page_ids: list[int] = []
        self.rows = array(INT32)  # the slots of the decode rows
        self.starts = array(INT32)  # their positions
        self.starts_sum = 0
        self.state_copies = b""  # as in Step
        self.tower = array(INT32)  # as in Step
        self.chunks: list[tuple[int, int, int, bool]] = []  # slot, start, tokens, whether the row samples
        self.draft_ids: list[bytes] = []  # of each row in `drafts`: int32
        # As in InFlightStep:
        self.drafts: list[int] = []
        self.sampling_requests: list[Request] = []
        self.partition_rows: list[PartitionRows] = []
        self.finishing: list[Request] = []
        self.prefilling: list[Request] = []
        self.prompt_logprob_rows: list[PromptLogprobRow] = []
        self.encoding: list[Request] = []
        self.pooled: list[Request] = []
        self.encoder_positions = self.encoder_cost = 0  # the latter in tokens
        self.unmeasured = False  # it has an image, and what one costs is not known

    @property
    def works(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.rows or self.chunks or self.tower)

    def add_decode_row(self, request: Request) -> None:
        partition = request.partition
        assert partition is not None
        start = partition.starts[request.partition_index]
        self.sampling_requests.append(request)
        self.rows.append(request.slot)
        self.starts.append(start)
        self.starts_sum += start
        partition.set_start(request, start + 1)

    def add_partition(self, tokenizer: TokenizerPeer, partition: DecodePartition) -> None:
        begin = len(self.sampling_requests)
        self.sampling_requests += partition.requests
        self.rows += partition.slots
        self.starts += partition.starts
        self.starts_sum += partition.starts_sum
        self.partition_rows.append(partition.plan_rows(tokenizer, begin))

    def build(
        self,
        number: int,
        epoch: int,
        joined: bool,
        early_exits: int,
        now: float,
        step_limits: StepLimits,
        plans_late: bool,
    ) -> InFlightStep:
        """The step to send. `joined`: whether other requests ran before those admitted by this step. `plans_late`: the
        step after it is planned shortly before this one ends, otherwise at once."""
        decode_rows, prefill_tokens = len(self.rows), 0
        attended = self.starts_sum + decode_rows
        rows, starts, counts, samples = (
            self.rows.tobytes(),
            self.starts.tobytes(),
            ONE * decode_rows,
            b"\1" * decode_rows,
        )
        if self.chunks:
            chunk_slots, chunk_starts, chunk_tokens, chunk_samples = zip(*self.chunks, strict=True)
            rows += pack_column(INT32, chunk_slots)
            starts += pack_column(INT32, chunk_starts)
            counts += pack_column(INT32, chunk_tokens)
            samples += bytes(chunk_samples)
            prefill_tokens = sum(chunk_tokens)
            attended += sum(tokens * (start + tokens) for _, start, tokens, _ in self.chunks)
        computed = decode_rows + prefill_tokens + self.encoder_cost
        if self.drafts:
            computed += sum(self.drafts)
        size = SizeClass(computed.bit_length(), attended.bit_length())
        late_after = None if self.unmeasured else step_limits.late_after(size)
        step = Step(
            number=number,
            epoch=epoch,
            slots=self.slots,
            page_tables=b"".join(self.page_tables),
            page_ids=pack_column(INT32, self.page_ids),
            rows=rows,
            starts=starts,
            counts=counts,
            samples=samples,
            limit_ms=0 if late_after is None else int(1000 * (late_after + HANG_SECONDS)),
            state_copies=self.state_copies,
            tower=self.tower.tobytes(),
        )
        if self.drafts:
            drafts = pack_column(INT32, self.drafts) + bytes(ITEM_BYTES * len(self.chunks))
            step = step._replace(drafts=drafts, draft_ids=b"".join(self.draft_ids))
        return InFlightStep(
            message=step,
            sampling_requests=self.sampling_requests,
            partition_rows=self.partition_rows,
            finishing=self.finishing,
            prefilling=self.prefilling,
            prompt_logprob_rows=self.prompt_logprob_rows,
            encoding=self.encoding,
            pooled=self.pooled,
            decode_rows=decode_rows,
            prefill_tokens=prefill_tokens,
            encoder_positions=self.encoder_positions,
            admitted=len(self.slots),
            joined=joined and bool(self.slots),
            sent_at=now,
            drafts=self.drafts,
            early_exits=early_exits,
            size=size,
            late_after=late_after,
            plan_ahead_after=step_limits.plan_ahead_after(size) if plans_late else 0.0,
        )
