"""What must hold on the links, of the front ends' health, and at the end."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from tgi.microkernel.codec import unpack_uint32
from tgi.microkernel.link import PeerDisconnected, PeerId
from tgi.microkernel.protocol import Add, End, Generate, Hello, Prompted, PromptLogprobs, PromptTokens, Texts, Tokens

if TYPE_CHECKING:
    from tests.simulation.processes import SchedulerProcess, SimulatedProcess, TokenizerProcess
    from tests.simulation.simulation import Simulation

# The longest time between two looks at the health of the front ends, and at what stopped processes have asked for.
HEALTH_SECONDS = 0.25
# A process that is stopped is found after four ticks of its neighbour, each half a second and up to a busy turn later.
SILENT_SECONDS = 5.0


class EndsPerAdd:
    """One side that answers Adds (the scheduler) or Generates (a tokenizer), in one life.

    Each gets one End, and nothing after it. When a connection is lost, so are the answers on it.
    """

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self._simulation = simulation
        self._name = name
        self.open: dict[PeerId, set[int]] = {}

    def received(self, peer: PeerId, message: Any) -> None:
        if isinstance(message, Add | Generate):
            self._require(message.rid not in self.open[peer], peer, message, "this rid is in use")
            self.open[peer].add(message.rid)
        elif isinstance(message, Hello):
            self._require(peer not in self.open, peer, message, "a Hello without a loss before it")
            self.open[peer] = set()
        elif isinstance(message, PeerDisconnected):
            self.open.pop(peer, None)

    def sent(self, peer: PeerId, message: Any) -> None:
        if peer not in self.open:
            return
        if isinstance(message, End):
            self._require(message.rid in self.open[peer], peer, message, "an End of a request that is not open")
            self.open[peer].discard(message.rid)
        elif isinstance(message, Tokens | Texts):
            rids = unpack_uint32(message.rids)
            self._require(self.open[peer].issuperset(rids), peer, message, "tokens of a request that is not open")
        elif isinstance(message, PromptLogprobs | PromptTokens | Prompted):
            self._require(message.rid in self.open[peer], peer, message, "an answer to a request that is not open")

    def _require(self, holds: bool, peer: PeerId, message: Any, fault: str) -> None:
        if not holds:
            self._simulation.fail(f"{self._name}: {fault}: {message} ({peer})")


class HealthCheck:
    """`/health` is true: it is 503 when nothing was computed for long, and 200 when all has been well for long."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._disturbed_at = 0.0
        self._down_since: dict[str, float] = {}  # by role without a running process
        self._stalled_since: float | None = (
            None  # the worker is stopped, all processes between it and the front ends run
        )
        self.samples = 0

    def start(self) -> None:
        self._simulation.clock.after(HEALTH_SECONDS, self._look)

    def disturbed(self) -> None:
        """A process has started, ended, was stopped or continues, or a connection has broken."""
        simulation, self._disturbed_at = self._simulation, self._simulation.clock.now
        for processes in (simulation.tokenizers, simulation.schedulers, simulation.workers):
            if any(one.running for one in processes):
                self._down_since.pop(processes[0].role, None)
            else:
                self._down_since.setdefault(processes[0].role, self._disturbed_at)

    def _look(self) -> None:
        simulation, now, config = self._simulation, self._simulation.clock.now, self._simulation.config
        self.samples += 1
        down = [role for role, since in self._down_since.items() if now - since > config.unhealthy_after]
        well = all(one.running for one in simulation.processes) and now - self._disturbed_at > config.healthy_after
        for front_end in simulation.front_ends:
            if front_end.running and front_end.healthy and down:
                simulation.fail(f"{front_end.name} is healthy, but no {down[0]} runs for long")
            if front_end.running and not front_end.healthy and well:
                assert front_end.router is not None
                stage = front_end.router.health.stage
                simulation.fail(
                    f"{front_end.name} is not healthy ({stage}), but all processes run undisturbed since "
                    f"{self._disturbed_at:.3f} s"
                )
        simulation.clock.after(HEALTH_SECONDS, self._look)


class StoppedUpstreamCheck:
    """What a process has asked for is cancelled while it is stopped for long: nothing is computed for it."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._looks: Counter[tuple[str, int, bool]] = Counter()  # in a row, by name, life and whether it is stopped

    def start(self) -> None:
        self._simulation.clock.after(HEALTH_SECONDS, self._look)

    def _look(self) -> None:
        simulation = self._simulation
        states = [(one.name, one.lives, one.stopped) for one in simulation.processes if one.alive]
        self._looks = Counter({state: self._looks[state] + 1 for state in states})
        for front_end in simulation.front_ends:
            for tokenizer in simulation.tokenizers:
                self._check(front_end, tokenizer)
        for tokenizer in simulation.tokenizers:
            self._check(tokenizer, simulation.schedulers[0])
        simulation.clock.after(HEALTH_SECONDS, self._look)

    def _check(self, upper: "SimulatedProcess", lower: "TokenizerProcess | SchedulerProcess") -> None:
        if self._seconds(upper, stopped=True) > SILENT_SECONDS and self._seconds(lower, stopped=False) > SILENT_SECONDS:
            hello = upper.hello()
            held = lower.ends.open.get(PeerId(hello.role, hello.replica, hello.boot))
            if held:
                self._simulation.fail(f"{lower.name} holds {held} of {upper.name}, which is stopped")

    def _seconds(self, process: "SimulatedProcess", stopped: bool) -> float:
        return HEALTH_SECONDS * self._looks[process.name, process.lives, stopped]
