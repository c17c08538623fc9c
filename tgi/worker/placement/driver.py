"""The process that stands for a worker whose ranks run on a Ray cluster: asks Ray for a device for each rank, has its
actors run `tgi worker` there, and follows them. The ranks connect to the scheduler; this process computes nothing.

Ray restarts actors that it loses with a node, on a node that has what they need. The driver sees that an actor has no
command and gives it one. The rest is done by the processes themselves: ranks meet anew, and the scheduler submits the
requests to the new worker. Placement group and actors belong to this process: if it ends in whatever way, Ray removes
them.
"""

import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tgi import __version__
from tgi.microkernel.errors import UserError
from tgi.microkernel.links import curve
from tgi.microkernel.links.discovery import nth_address
from tgi.microkernel.messages.protocol import Beat, LastExit
from tgi.microkernel.processes.process import HAND_OVER, Process, last_exit_text
from tgi.microkernel.settings.loading import to_environment, worker_settings
from tgi.microkernel.settings.table import Settings
from tgi.worker.placement.rank_actor import RankActor, RankReport

log = logging.getLogger(__name__)

INSTALL_RAY = "--ray needs Ray: install it with `pip install 'tgi-server[ray]'`, here and on all nodes of the cluster."
CONNECT_SECONDS = 150.0  # until Ray itself gives up
PROBE_SECONDS = 10.0
# How often an actor is asked for its report.
POLL_SECONDS = 0.5
# An actor that has not answered for this long is reported as lost, or as not placed yet.
LATE_SECONDS = 5.0
COMPLAINT_SECONDS = 30.0
# A rank whose command has ended is started again after this long, doubled up to the maximum.
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 10.0
# Within the time that the supervisor gives a worker to end.
STOP_SECONDS = 3.5
SIGNALS = (signal.SIGTERM, signal.SIGINT, HAND_OVER)
ERROR = "Error: "  # begins the line in which a command says why it cannot run
WILDCARDS = ("0.0.0.0", "::")  # listens on all addresses of its host


def serve_on_ray(process: Process) -> None:
    """Runs until SIGTERM. Raises UserError if Ray is not there, or a rank cannot run."""
    settings = process.settings
    process.publish_state("starting", f"connecting to Ray at {settings.ray}")
    process.extend_deadline(CONNECT_SECONDS)
    ray = _connect(settings)
    try:
        placement = Placement(process, ray)
        try:
            while not process.stopping:
                process.wait(POLL_SECONDS)
                placement.advance(time.monotonic())
                if process.beat_due:
                    process.exchange_beats(Beat(None))
        finally:
            process.extend_deadline(30)
            placement.remove()
    finally:
        ray.shutdown()


def _connect(settings: Settings) -> Any:
    """The module ray, connected to the cluster. Raises UserError."""
    record_factory, handlers = logging.getLogRecordFactory(), {one: signal.getsignal(one) for one in SIGNALS}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is ever sent
    try:
        import ray
    except ImportError as error:
        raise UserError(f"{INSTALL_RAY} ({error})") from error
    _require_listener(settings.ray or "")
    try:
        ray.init(
            address=settings.ray,
            namespace="tgi",
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"Cannot connect to the Ray cluster at {settings.ray}: {reason}. Start `tgi up --ray` on a node of the "
            "cluster, with its address HOST:PORT (`ray start --head` prints it) or auto."
        ) from error
    logging.setLogRecordFactory(record_factory)  # Ray's adds a field to all records
    for number, handler in handlers.items():  # Ray's ends the process
        signal.signal(number, handler)
    return ray


def _require_listener(address: str) -> None:
    """Raises UserError if no program listens at HOST:PORT. Ray itself would try for a minute or more."""
    url = urlsplit(f"//{address}")
    try:
        port = url.port
    except ValueError:
        port = None
    if url.hostname is None or port is None:
        return  # auto, or an address that Ray judges
    try:
        socket.create_connection((url.hostname, port), PROBE_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"Cannot connect to the Ray cluster at {address}: {error.strerror or error}. Give the address that "
            "`ray start --head` has printed, or start `tgi up --ray auto` on a node of the cluster."
        ) from error


class Rank:
    """One rank, as the driver sees it."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.report: RankReport | None = None  # None: it is not known to run
        self.question: Any = None  # a reference to the report that was asked for
        self.asked_at = 0.0  # by time.monotonic
        self.sent_order = ""  # of the command that the actor was given last
        self.start: Any = None  # a reference to the end of its start
        self.attempt = 0  # counts the commands that have ended by themselves
        self.start_at = 0.0
        self.has_served = False
        self.error = ""  # that its command has printed last

    @property
    def ready(self) -> bool:
        """Whether its worker process is ready."""
        report = self.report
        return report is not None and report.state is not None and report.state.state == "ready"

    @property
    def stage(self) -> str:
        """What it does now, for people."""
        if self.report is None:
            return "waiting for Ray"
        state = self.report.state
        return "starting" if state is None else state.stage or state.state


class LastWorker:
    """The worker process of the first rank that served last, in a file that outlives this process. If its actor is
    gone, Ray, a node or this process ended it, and no request did: the next worker tells the scheduler so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = path.read_text().split() if path.exists() else []  # incarnation of the actor, boot id

    def store(self, incarnation: str, boot: str) -> None:
        """To be called while it serves."""
        if self._known != [incarnation, boot]:
            self._known = [incarnation, boot]
            self._path.write_text(f"{incarnation} {boot}")

    def exit_before(self, incarnation: str) -> str:
        """The report on it for a worker of this actor; "" if it is not known how it ended."""
        if len(self._known) != 2 or self._known[0] == incarnation:
            return ""
        return last_exit_text(LastExit(bytes.fromhex(self._known[1]), "was lost with its Ray actor", outside=True))


class Placement:
    """The placement group of a worker, with an actor in each of its bundles."""

    def __init__(self, process: Process, ray: Any) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        settings = process.settings
        self._process, self._ray = process, ray
        self._ranks_count = settings.num_shard or 1
        on_gpu = settings.worker == "torch" and (
            settings.device == "cuda" or (settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        )
        self.bundle: dict[str, float] = {"GPU": 1} if on_gpu else {"CPU": settings.ray_cpus}
        name = f"{process.name} of {settings.run_dir}"
        # Ranks are placed on one node if it has room for all, else on as few as possible.
        self._group = placement_group([dict(self.bundle)] * self._ranks_count, strategy="PACK", name=name)
        resources = {"num_gpus": 1, "num_cpus": 0} if on_gpu else {"num_cpus": settings.ray_cpus}
        actor = ray.remote(max_restarts=-1, max_task_retries=0, **resources)(RankActor)
        self._ranks = [
            Rank(
                number,
                actor.options(
                    name=f"{name}, rank {number}, {process.boot.hex()}",
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
                ).remote(),
            )
            for number in range(self._ranks_count)
        ]
        self._keys = curve.host_file(settings.keys or "").read_text()
        self._scheduler = _scheduler_address(settings, ray.util.get_node_ip_address())
        self._last_worker = LastWorker(settings.run_dir / f"{process.name}.ray")
        self._began_waiting = self._complained_at = time.monotonic()

    def advance(self, now: float) -> None:
        """Receives reports, and gives each actor without the right command one. Raises UserError."""
        for rank in self._ranks:
            self._exchange_reports(rank, now)
        first = self._ranks[0].report
        for rank in self._ranks:
            if rank.report is not None and first is not None:
                self._direct(rank, rank.report, first, now)
        self._publish(now)

    def remove(self) -> None:
        """Ends all ranks and gives their devices back."""
        from ray.util.placement_group import remove_placement_group

        ending = [rank.actor.stop.remote() for rank in self._ranks if rank.report is not None]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=STOP_SECONDS)
        for rank in self._ranks:
            self._ray.kill(rank.actor, no_restart=True)
        remove_placement_group(self._group)

    def _exchange_reports(self, rank: Rank, now: float) -> None:
        """Takes the report of an actor if it is there, and asks for the next one. Raises UserError."""
        if rank.start is not None and self._ray.wait([rank.start], timeout=0)[0]:
            try:
                self._ray.get(rank.start)
            except self._ray.exceptions.RayTaskError as error:
                raise UserError(f"Rank {rank.number} could not be started by its Ray actor: {error.cause}") from error
            except self._ray.exceptions.RayError:
                rank.sent_order = ""  # the actor is lost: Ray starts another
            rank.start = None
        if rank.question is not None:
            done, _ = self._ray.wait([rank.question], timeout=0)
            if not done:
                if now - rank.asked_at > LATE_SECONDS:
                    self._lose(rank, "does not answer")
                return
            try:
                report: RankReport = self._ray.get(rank.question)
            except self._ray.exceptions.RayError as error:
                self._lose(rank, str(error).splitlines()[0] if str(error) else type(error).__name__)
            else:
                if rank.report is None:
                    log.info("rank %d is on %s", rank.number, report.host)
                rank.report = report
                _print_lines(rank, report)
        elif rank.asked_at and now - rank.asked_at < POLL_SECONDS:
            return
        rank.question, rank.asked_at = rank.actor.report.remote(), now

    def _lose(self, rank: Rank, why: str) -> None:
        if rank.report is not None:
            log.warning("rank %d on %s is lost: %s", rank.number, rank.report.host, why)
            self._began_waiting = time.monotonic()
        rank.report = None

    def _direct(self, rank: Rank, report: RankReport, first: RankReport, now: float) -> None:
        """Has the actor run the command that belongs to the present place of the first rank."""
        if report.version != __version__:
            raise UserError(
                f"The Ray node {report.host} has tgi {report.version}, and this host {__version__}. Install the same "
                "version on all nodes."
            )
        order = f"{report.incarnation} {first.incarnation} {rank.attempt}"
        if rank.ready:
            rank.has_served = True
        if report.order == order and report.exit_code is not None:
            if not rank.has_served:
                raise UserError(
                    f"Rank {rank.number} on the Ray node {report.host} cannot run: {rank.error or 'see its log.'}"
                )
            delay = min(FIRST_BACKOFF_SECONDS * 2**rank.attempt, MAX_BACKOFF_SECONDS)
            log.warning("rank %d on %s ended with code %d", rank.number, report.host, report.exit_code)
            rank.attempt += 1
            rank.start_at = now + delay
        elif rank.sent_order != order and now >= rank.start_at:
            address = f"[{first.host}]" if ":" in first.host else first.host
            environment = self._environment(rank.number, f"tcp://{address}:{first.port}")
            last_exit = self._last_worker.exit_before(report.incarnation) if rank is self._ranks[0] else ""
            rank.start = rank.actor.start.remote(order, environment, self._keys, last_exit)
            rank.sent_order = order
            rank.report = report._replace(order=order, state=None, exit_code=None)

    def _environment(self, rank: int, group: str) -> dict[str, str]:
        """The settings of a rank's command, as environment variables."""
        chosen: dict[str, Any] = {"num_shard": self._ranks_count}
        if self._ranks_count > 1:
            chosen |= {"group": group, "rank": rank}
        if rank == 0:
            chosen["connect"] = (self._scheduler,)
        return to_environment(worker_settings(self._process.settings, chosen))

    def _publish(self, now: float) -> None:
        """Publishes the stage, and says what Ray lacks if ranks have waited for long."""
        waiting = [rank for rank in self._ranks if not rank.ready]
        if not waiting:
            first = self._ranks[0].report
            if first is not None and first.state is not None:
                self._process.facts = first.state.facts
                self._last_worker.store(first.incarnation, first.state.boot)
            self._process.publish_state("ready", "ready", 100)
            return
        unplaced = [rank for rank in waiting if rank.report is None]
        state = "ready" if all(rank.has_served for rank in self._ranks) else "starting"
        one = (unplaced or waiting)[0]
        self._process.publish_state(state, f"rank {one.number}: {one.stage}")
        if unplaced and now - max(self._began_waiting, self._complained_at) > LATE_SECONDS:
            self._complained_at = now + COMPLAINT_SECONDS - LATE_SECONDS
            numbers = ", ".join(str(rank.number) for rank in unplaced)
            there, free = self._ray.cluster_resources(), self._ray.available_resources()
            what = next(iter(self.bundle))
            log.warning(
                "waiting for Ray to place rank %s, which needs %g %s; of %g in the cluster %g are free",
                *(numbers, self.bundle[what], what, there.get(what, 0), free.get(what, 0)),
            )


def _scheduler_address(settings: Settings, own_host: str) -> str:
    """Where the scheduler of this worker listens, as other hosts reach it."""
    address = nth_address(settings.listen or "", settings.replica_index)
    url = urlsplit(address)
    if url.hostname not in WILDCARDS:
        return address
    return f"tcp://{f'[{own_host}]' if ':' in own_host else own_host}:{url.port}"


def _print_lines(rank: Rank, report: RankReport) -> None:
    """Writes the lines of a rank's log to the log of this process. JSON stays JSON."""
    for line in report.lines:
        if line.startswith(ERROR):
            rank.error = line.removeprefix(ERROR)
        sys.stderr.write(f"{line}\n" if line.startswith("{") else f"[rank {rank.number} on {report.host}] {line}\n")
    sys.stderr.flush()
