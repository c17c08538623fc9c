"""A house in one thread: the core between tokenizers that check everything they hear and a strict scripted worker.

Time is virtual. Nothing happens unless a test asks for it: `plan` lets the core send steps, `compute` lets the worker
run the oldest one, `deliver` brings its result up.
"""

from collections import deque
from typing import Any

from tests.scheduler.adapters import PATHS, Changes
from tests.scheduler.tokenizers import GREEDY, Asked, Tokenizer
from tests.tops import Tops, split_tops
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import Adapted, Add, Cancel, Reason, Result, Sampling, Slot, Step, Stop, decode, encode
from tgi.kernel.pack import FLOAT32, INT32, UINT8, floats, ints, pack
from tgi.kernel.presence import PROTOCOL, Adapter, Hello
from tgi.scheduler.core import Config, Core
from tgi.worker.scripted import Script, ScriptedWorker


class House:
    """Call its methods in any order; `check` at any time."""

    def __init__(self, script: Script, config: Config = Config(), tokenizers: int = 1) -> None:  # noqa: B008
        self.script = script
        self.core = Core(config)
        self.journal: list[tuple[Any, ...]] = []  # the inputs of this core
        self.now = 0.0
        self.lives = 0
        self.rids = 0
        self.tokenizers: dict[int, Tokenizer] = {}
        self.worker: Peer | None = None
        self.engine = ScriptedWorker(script)
        self.steps: deque[Step] = deque()  # on their way to the worker
        self.results: deque[Result] = deque()  # on their way back
        self.sent: list[Step] = []  # all steps of this core
        self.heard: list[tuple[Peer, Any]] = []
        self.poison: set[int] = set()  # the worker dies when it computes a request whose prompt begins so
        self.broken: set[int] = set()  # a step fails when it computes a request whose prompt begins so
        self.firsts: dict[int, int] = {}  # the first id of each slot of the worker
        self.position_us = 10  # what each token adds to the 1000 µs of a step
        self.settles = True  # after every plan, as the scheduler's loop does
        self.adapters = Changes(self)
        self.failed = 0  # an epoch in which a step has failed: later ones compute nonsense
        for place in range(tokenizers):
            self.tokenizer_up(place)

    # --- who is there ---------------------------------------------------------------------------------------------

    def tokenizer_up(self, place: int) -> Tokenizer:
        """A new life of a tokenizer; the old one, if any, is gone."""
        if place in self.tokenizers:
            self.handle(Gone(), self.tokenizers[place].peer)
        self.lives += 1
        tokenizer = self.tokenizers[place] = Tokenizer(place, self.lives)
        self.handle(Hello(PROTOCOL, *tokenizer.peer), tokenizer.peer)
        self.adapters.ask_again(place)
        return tokenizer

    def worker_up(self, script: Script | None = None) -> None:
        """A new worker that is ready at once."""
        if self.worker is not None:
            self.worker_down()
        self.lives += 1
        self.worker = Peer("worker", 0, f"boot-{self.lives}".encode())
        self.engine = ScriptedWorker(script or self.script)
        self.firsts.clear()
        self.adapters.worker_up()
        self.handle(Hello(PROTOCOL, *self.worker), self.worker)
        self.handle(self.adapters.status(), self.worker)

    def worker_down(self) -> None:
        """The worker dies with all that was under way in both directions."""
        assert self.worker is not None
        worker, self.worker = self.worker, None
        self.steps.clear()
        self.results.clear()
        self.adapters.orders.clear()
        self.handle(Gone(), worker)

    def new_core(self) -> None:
        """The scheduler dies; the next one hears of everybody, and every tokenizer submits again what it has."""
        self.core = Core(self.core.config)
        self.adapters.core_gone()
        self.journal.clear()
        self.sent.clear()
        self.heard.clear()
        self.steps.clear()
        self.results.clear()
        self.engine.reset()
        self.failed = 0
        for tokenizer in self.tokenizers.values():
            self.handle(Hello(PROTOCOL, *tokenizer.peer), tokenizer.peer)
        if self.worker is not None:
            self.handle(Hello(PROTOCOL, *self.worker), self.worker)
            self.handle(self.adapters.status(), self.worker)
        for place, tokenizer in self.tokenizers.items():
            for rid, asked in tokenizer.requests.items():
                if asked.end is None:
                    self._submit(place, rid, asked)
                    if asked.told_to_stop:
                        self.handle(Cancel(rid), tokenizer.peer)
            self.adapters.ask_again(place)

    # --- what tokenizers do ---------------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        new: int = 4,
        *,
        place: int = 0,
        stop_ids: list[int] | None = None,
        seed: int | None = None,
        resume: list[int] | None = None,
        top_n: int = 0,
        choice: int = 0,
        prompt_top_n: int | None = None,
        adapter: Adapter | None = None,
    ) -> Asked:
        sampling = GREEDY if seed is None else Sampling(seed, do_sample=True)
        sampling = sampling._replace(top_n=top_n, choice=choice)
        if adapter is not None:
            sampling = sampling._replace(adapter=adapter.name, adapter_digest=adapter.digest)
        asked = Asked(prompt, new, stop_ids or [], sampling, resume or [], prompt_top_n)
        self.rids += 1
        self.tokenizers[place].requests[self.rids] = asked
        self._submit(place, self.rids, asked)
        return asked

    def _submit(self, place: int, rid: int, asked: Asked) -> None:
        columns = [pack(INT32, values) for values in (asked.prompt, asked.stop_ids, asked.ids)]
        asked.resumed = len(asked.ids)
        add = Add(rid, columns[0], asked.new, asked.sampling, columns[1], columns[2], asked.salt)
        if asked.prompt_top_n is not None:
            add = add._replace(prompt_from=1 + len(asked.told), prompt_top_n=asked.prompt_top_n)
        self.handle(add, self.tokenizers[place].peer)

    def cancel(self, asked: Asked, kind: Any = Cancel) -> None:
        for tokenizer in self.tokenizers.values():
            for rid, other in tokenizer.requests.items():
                if other is asked:
                    self.handle(kind(rid), tokenizer.peer)
                    asked.told_to_stop = True

    def stop(self, asked: Asked) -> None:
        self.cancel(asked, Stop)

    # --- what happens ---------------------------------------------------------------------------------------------

    def handle(self, message: Any, source: Peer) -> None:
        self.now += 0.001
        self.journal.append(("handle", message, source, self.now))
        self.core.handle(message, source, self.now)
        self._listen()

    def plan(self) -> int:
        """Lets the core send what it wants to. Returns how many steps that were."""
        self.now += 0.001
        count = 0
        while True:
            self.journal.append(("plan", self.now))
            step = self.core.plan(self.now)
            if step is None:
                break
            assert self.worker is not None
            self.sent.append(step)
            self.steps.append(step)
            count += 1
        if self.settles:
            self.settle()
        under_way = [one for one in (*self.steps, *self.results) if one.epoch == self.core.under_way.epoch]
        assert len(under_way) <= 2
        assert not any(isinstance(one, Step) and one.drafts for one in under_way) or len(under_way) == 1
        return count

    def settle(self) -> None:
        """Lets the core keep its books."""
        self.journal.append(("settle",))
        self.core.settle()

    def compute(self) -> Result | None:
        """The worker runs the next step."""
        if not self.steps:
            return None
        step = self.steps.popleft()
        self.firsts |= {slot.slot: ints(slot.tokens)[0] for slot in step.slots}
        computed = {self.firsts[slot] for slot in ints(step.rows)}
        if computed & self.poison:
            self.worker_down()
            return None
        if step.epoch == self.failed:
            result = self._nonsense(step)
        elif computed & self.broken:
            self.failed = step.epoch
            result = Result(step.number, step.epoch, b"", b"", b"", error="ValueError: broken")
        else:
            result = self.engine.run_step(step)
            assert result.error == "", result.error
        self.results.append(
            result._replace(forward_us=1000 + self.position_us * sum(ints(step.counts) + ints(step.drafts)))
        )
        return result

    def _nonsense(self, step: Step) -> Result:
        """What a real worker may answer to a step that builds on a failed one."""
        rows = sum(step.draws)
        return Result(step.number, step.epoch, b"\1" * rows, pack(INT32, [1] * rows), pack(FLOAT32, [0.0] * rows))

    def deliver(self) -> bool:
        """The oldest result reaches the core."""
        if not self.results:
            return False
        assert self.worker is not None
        self.handle(self.results.popleft(), self.worker)
        return True

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.journal.append(("tick", self.now))
        self.core.tick(self.now)
        self._listen()

    def _listen(self) -> None:
        for peer, message in self.core.outgoing():
            message = decode(encode(message))
            self.heard.append((peer, message))
            if peer == self.worker:
                self.adapters.orders.append(message)
            for tokenizer in self.tokenizers.values():
                if tokenizer.peer == peer and isinstance(message, Adapted):
                    self.adapters.hears(tokenizer.peer.place, message)
                elif tokenizer.peer == peer:
                    tokenizer.hears(message)

    def step(self) -> bool:
        """One result, with the next step planned ahead. Returns whether anything happened."""
        planned = self.plan() + self.adapters.work()
        self.compute()
        if self.worker is None and self.core.counters.worker_losses:
            return True
        return self.deliver() or planned > 0

    def run(self, steps: int = 10_000) -> int:
        """Until nothing is left to do. Returns how many steps that took."""
        for count in range(steps):
            if self.worker is None:
                self.worker_up()
            if not self.step():
                self.check()
                return count
        raise AssertionError(f"not finished after {steps} steps")

    def check(self) -> None:
        self.core.check()

    @property
    def asked(self) -> list[Asked]:
        return [asked for tokenizer in self.tokenizers.values() for asked in tokenizer.requests.values()]


def expected(asked: Asked, script: Script) -> list[int]:
    """What a request generates when it is alone: the reference for any schedule."""
    return alone(asked, script)[0]


def alone(asked: Asked, script: Script) -> tuple[list[int], list[Tops]]:
    """The same with what stands beside each token."""
    drawn, tops, _, _ = everything(asked, script)
    return drawn, tops


def everything(asked: Asked, script: Script) -> tuple[list[int], list[Tops], list[float], Tops]:
    """The same with the logprobs of the prompt, and all that stands beside these."""
    worker = ScriptedWorker(script)
    if asked.salt:
        worker.adapters.put(worker.adapters.fetch("", PATHS[asked.salt]))
    size = script.page_size
    known = len(asked.prompt)
    drawn: list[int] = []
    tops: list[Tops] = []
    told: list[float] = []
    told_tops: Tops = []
    asks = () if asked.prompt_top_n is None or known == 1 else (1, asked.prompt_top_n)
    scored = not asked.new and asks  # no token is drawn
    while (scored and not told) or (len(drawn) < asked.new and known < script.limits().max_total_tokens):
        slots = [] if drawn else [Slot(0, pack(INT32, asked.prompt), known, asked.sampling, *asks)]
        start = 0 if not drawn else known - 1
        held = 0 if not drawn else -(-start // size)
        pages = list(range(held, -(-known // size)))
        step = Step(
            len(drawn) + 1, 1, slots, pack(INT32, [0] * len(pages)), pack(INT32, pages), pack(INT32, [0]),
            pack(INT32, [start]), pack(INT32, [known - start]), pack(UINT8, [not scored]),
        )  # fmt: skip
        # The reference knows no limit of a step.
        worker.limits = worker.limits._replace(max_batch_prefill_tokens=1 << 30)
        result = worker.run_step(step)
        assert not result.error, result.error
        drawn += ints(result.ids)
        tops += split_tops(result) or [[]] * len(ints(result.ids))
        told += floats(result.prompt_logprobs)
        told_tops += zip(ints(result.prompt_top_ids), floats(result.prompt_top_logprobs), strict=True)
        known += 1
        if drawn and drawn[-1] in asked.stop_ids:
            break
    return drawn, tops, told, told_tops


def replay(journal: list[tuple[Any, ...]], config: Config) -> tuple[list[tuple[Peer, Any]], list[Step]]:
    """A fresh core fed with recorded inputs: what it says and plans."""
    core = Core(config)
    heard: list[tuple[Peer, Any]] = []
    steps: list[Step] = []
    for kind, *arguments in journal:
        answer = getattr(core, kind)(*arguments)
        if kind == "plan" and answer is not None:
            steps.append(answer)
        heard += core.outgoing()
    return heard, steps


def ok(asked: Asked, script: Script) -> None:
    """A request that ended as if it had been alone."""
    assert asked.end is not None
    want, tops, told, told_tops = everything(asked, script)
    assert asked.ids == want
    assert asked.tops == tops[len(want) - len(asked.tops) :]
    assert (asked.told, asked.told_tops) == (told, told_tops)
    assert asked.end.reason == (Reason.LENGTH if len(want) == asked.new else Reason.EOS)
