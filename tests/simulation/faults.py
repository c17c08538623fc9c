"""What goes wrong: processes that are killed, replaced, stopped and continued, connections that break, and adapters
that cannot be read."""

from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedProcess
    from tests.simulation.simulation import Simulation


class FaultConfig(NamedTuple):
    """How often what goes wrong."""

    mean_seconds: float = 0.5  # between two faults
    mean_stop_seconds: float = 0.3
    weights: tuple[float, ...] = (4, 2, 4, 3, 1)  # of FaultInjector.KINDS
    role_weights: tuple[float, float, float, float] = (1, 6, 6, 6)  # of FaultInjector.ROLES


class FaultInjector:
    """Injects faults at random times until `end`."""

    ROLES = ("api", "tokenizer", "scheduler", "worker")
    KINDS = ("kill", "stop", "drop", "kill after a message", "replace")

    def __init__(self, simulation: "Simulation", config: FaultConfig) -> None:
        self.random = Random(f"faults {simulation.config.seed}")
        self.counts = dict.fromkeys(self.KINDS, 0)
        self._simulation = simulation
        self._config = config
        self._ended = False
        self._doomed: dict[str, int] = {}  # by process: after this many messages it is killed

    def start(self) -> None:
        self._inject_later()

    def end(self) -> None:
        """Injects no more, and continues what is stopped."""
        self._ended = True
        self._doomed.clear()
        for process in self._simulation.processes:
            process.resume()

    def kills_after_send(self, process: "SimulatedProcess") -> bool:
        """Whether this process dies of having sent this message."""
        left = self._doomed.get(process.name)
        if left is None:
            return False
        if left > 0:
            self._doomed[process.name] = left - 1
            return False
        del self._doomed[process.name]
        return True

    def adapter_fails(self) -> bool:
        """Whether the files of an adapter cannot be read now."""
        share = self._simulation.config.adapter_failures
        return share > 0 and not self._ended and self.random.random() < share

    def _inject_later(self) -> None:
        self._simulation.clock.after(self.random.expovariate(1 / self._config.mean_seconds), self._inject)

    def _inject(self) -> None:
        if self._ended:
            return
        self._inject_later()
        (kind,) = self.random.choices(self.KINDS, self._config.weights)
        (role,) = self.random.choices(self.ROLES, self._config.role_weights)
        process = self.random.choice([one for one in self._simulation.processes if one.role == role])
        connections = self._simulation.network.connections
        if kind == "drop" and connections:
            connection = self.random.choice(connections)
            self._simulation.trace(
                "network", "drops", connection.sides[0].owner.name, "at", connection.sides[1].address
            )
            self._simulation.health.disturbed()
            self._simulation.network.drop(connection)
        elif kind == "kill":
            process.kill("SIGKILL")
        elif kind == "replace":
            process.hand_over()
        elif kind == "stop":
            process.stop()
            pause = self.random.expovariate(1 / self._config.mean_stop_seconds)
            self._simulation.clock.after(pause, process.resume)
        elif kind == "kill after a message":
            self._doomed[process.name] = int(self.random.expovariate(0.3))
        self.counts[kind] += 1
