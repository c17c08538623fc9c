"""The ranks of a worker that run on several hosts, each started there by a command of its own: `tgi worker --rank R`.

The first rank listens on an encrypted link (--group). When all others have connected to it, it tells them where
torch.distributed meets, and from then on they live and end together: a thread of each rank watches the link, and ends
the process when a rank is gone, also while the main thread waits for that rank in a collective operation, or loads. The
supervisors start all ranks again, and they meet anew.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tgi.hub.model_config import content_hash
from tgi.microkernel.errors import UserError
from tgi.microkernel.links import curve
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId
from tgi.microkernel.messages.protocol import (
    AdapterUpdated,
    Beat,
    GroupFormed,
    Hello,
    JoinGroup,
    LastExit,
    LoadedAdapter,
    OfferMemory,
    ReadAdapter,
)
from tgi.microkernel.processes.process import Process
from tgi.microkernel.processes.watched_link import WatchedLink
from tgi.microkernel.settings.options import flag
from tgi.microkernel.settings.table import Settings
from tgi.worker.distributed.group_memory import create_offer, open_memory
from tgi.worker.distributed.rank_place import HostRendezvous, RankPlace
from tgi.worker.lora.registry import adapter_digest

log = logging.getLogger(__name__)

# What all ranks must have in common besides the model, which the link compares.
SHARED_SETTINGS = (
    "worker", "dtype", "quantize", "kv_cache_dtype", "max_total_tokens", "max_input_tokens", "max_batch_total_tokens",
    "max_batch_prefill_tokens", "max_batch_size", "cuda_graphs", "speculate", "watermark_gamma", "watermark_delta",
    "batch_invariant", "disable_custom_kernels", "load_format",
)  # fmt: skip
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Which network interface the collective operations use, for gloo and for NCCL.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ALL_ADDRESSES = ("0.0.0.0", "::")
WAIT_SECONDS = 1.0
# Between two looks for the answers of the ranks that read an adapter.
POLL_SECONDS = 0.01


class HostGroup:
    """The further ranks of a worker, on any hosts, as its first rank sees them."""

    def __init__(self, process: Process, ranks: int, model: str) -> None:
        """`model`: the content hash of the model. Raises UserError if the address cannot be used."""
        address = process.settings.group or ""
        self._process = process
        self._ranks = ranks
        self._host = urlsplit(address).hostname or ""
        keys, _ = curve.load_group_keys(process.settings.keys or "")
        self._link = WatchedLink(process, Link.bind(address, process.hello(model), keys))
        self._shared = shared_settings(process.settings)
        self._joined: dict[int, tuple[PeerId, JoinGroup]] = {}
        self._hellos: dict[PeerId, Hello] = {}
        self._memory, self._offer = create_offer()
        self._adapters_read = 0

    def meet(self) -> RankPlace | None:
        """Waits until all ranks have joined. Returns the place of the first one; None if the process was told to
        end."""
        process, waiting = self._process, ""
        while not process.stopping:
            missing = [str(rank) for rank in range(1, self._ranks) if rank not in self._joined]
            if not missing and (place := self._form()) is not None:
                return place
            stage = f"waiting for rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
            if missing and stage != waiting:
                waiting = stage
                log.info("%s of %d at %s", stage, self._ranks, process.settings.group)
                process.publish_state("starting", stage)
            _wait(process)
            for peer, message in self._link.receive():
                self._handle(peer, message)
        return None

    def send(self, message: tuple[Any, ...]) -> None:
        self._link.send(message)

    def confirm_adapter(self, adapter: LoadedAdapter) -> None:
        """Has the other ranks read an adapter that this one has read. Called by the one thread that reads adapters,
        which waits for them: if one is gone meanwhile, this process ends. Raises UserError if one cannot."""
        self._adapters_read += 1
        wanted = ReadAdapter(self._adapters_read, adapter.name, adapter.path, adapter.digest)
        ranks = {peer: rank for rank, (peer, _) in self._joined.items()}
        self._link.send(wanted)
        while ranks:
            for peer, message in self._link.receive():
                if isinstance(message, AdapterUpdated) and message.rid == wanted.rid and peer in ranks:
                    rank = ranks.pop(peer)
                    if message.error:
                        raise UserError(f"Rank {rank} cannot use the adapter. {message.error}")
            time.sleep(POLL_SECONDS)

    def wait_for_ranks(self) -> None:
        """All ranks were there when the group was formed, and each waits for the others while it loads."""

    def close(self) -> None:
        self._link.close()

    def last_exit(self, own: LastExit | None) -> LastExit | None:
        """How the previous life of the group has ended, for the scheduler. `own`: the report on the first rank."""
        return group_exit(own, {rank: self._hellos[peer].last_exit for rank, (peer, _) in self._joined.items()})

    def _handle(self, peer: PeerId, message: Any) -> None:
        if isinstance(message, Hello):
            self._hellos[peer] = message
            self._link.send(self._offer, peer)
        elif isinstance(message, PeerDisconnected):
            self._hellos.pop(peer, None)
            self._joined = {rank: joined for rank, joined in self._joined.items() if joined[0] != peer}
        elif isinstance(message, JoinGroup) and peer in self._hellos:
            if error := self._rejection(message):
                log.error("rank %d cannot join: %s", message.rank, error)
                self._link.send(GroupFormed(0, 0, 0, error), peer)
                return
            if message.rank in self._joined:
                log.warning("%s takes the place of another process with --rank %d", peer, message.rank)
            self._joined[message.rank] = peer, message

    def _rejection(self, join: JoinGroup) -> str:
        """Why a process cannot be a rank of this group, or ""."""
        if join.ranks != self._ranks or not 0 < join.rank < self._ranks:
            return (
                f"it is started with --rank {join.rank} --num-shard {join.ranks}, rank 0 with --num-shard {self._ranks}"
            )
        try:
            its = json.loads(join.settings)
        except (ValueError, RecursionError):
            its = None
        if not isinstance(its, dict):
            return "its settings are damaged"
        different = [name for name in self._shared if its.get(name) != self._shared[name]]
        return f"all ranks need the same {', '.join(map(flag, different))}" if different else ""

    def _form(self) -> RankPlace | None:
        """Tells all ranks where to meet. None if one is gone meanwhile."""
        members = frozenset(peer for peer, _ in self._joined.values())
        if not self._link.set_members(members):
            return None
        listener = _listen(self._host)
        port = listener.getsockname()[1]
        hosts = [host_id(), *(self._joined[rank][1].host for rank in range(1, self._ranks))]
        memory_error = self._memory_error()
        for rank, (peer, _) in self._joined.items():
            before, all_there = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
            self._link.send(GroupFormed(port, before, all_there, "", not memory_error), peer)
        _choose_interface(self._link.local_address(members) if self._host in ALL_ADDRESSES else self._host)
        self._process.publish_state("starting", "starting")
        meeting = HostRendezvous(self._host, port, listener.detach())
        memory = None if memory_error else self._memory
        return RankPlace(0, self._ranks, meeting, memory, 0, hosts.count(hosts[0]), memory_error)

    def _memory_error(self) -> str:
        """Why the ranks that have joined cannot share memory, or ""."""
        for rank, (_, join) in sorted(self._joined.items()):
            if join.host != host_id():
                return f"rank {rank} runs on another host"
            if join.memory_error:
                return f"rank {rank} cannot open the memory of rank 0 ({join.memory_error})"
        return ""


def join_group(process: Process, model: str) -> tuple[RankPlace, WatchedLink] | None:
    """Connects a further rank to the first one and waits until all are there. None if the process was told to end.
    Raises UserError if rank 0 refuses it."""
    settings = process.settings
    _, keys = curve.load_group_keys(settings.keys or "")
    rank, ranks, address = settings.rank, settings.num_shard or 1, settings.group or ""
    hello = process.hello(model)._replace(replica=rank, rank=rank)
    link = WatchedLink(process, Link.connect(address, hello, keys))
    join = JoinGroup(rank, ranks, host_id(), json.dumps(shared_settings(settings)))
    memory: int | None = None
    process.publish_state("starting", "waiting for rank 0")
    log.info("rank %d waits for rank 0 at %s", rank, address)
    while not process.stopping:
        _wait(process)
        for peer, message in link.receive():
            if isinstance(message, Hello):
                process.publish_state("starting", "waiting for the other ranks")
            elif isinstance(message, OfferMemory):
                if memory is not None:
                    os.close(memory)
                memory, error = _try_memory(message)
                link.send(join._replace(memory_error=error), peer)
            elif isinstance(message, PeerDisconnected):
                process.publish_state("starting", "waiting for rank 0")
            elif isinstance(message, GroupFormed):
                if message.error:
                    raise UserError(f"Rank 0 at {address} refuses rank {rank}: {message.error}.")
                if link.set_members(frozenset((peer,))):
                    host = urlsplit(address).hostname or ""
                    _choose_interface(host)
                    meeting = HostRendezvous(host, message.port)
                    shared = memory if message.shares_memory else None
                    return RankPlace(rank, ranks, meeting, shared, message.local_rank, message.local_ranks), link
    link.close()
    return None


def _try_memory(offer: OfferMemory) -> tuple[int | None, str]:
    """The memory of the first rank, or why this process cannot use it: ranks of one host may be in containers that
    cannot share memory, or belong to different users."""
    try:
        return open_memory(offer), ""
    except OSError as error:
        return None, error.strerror or type(error).__name__


def _wait(process: Process) -> None:
    process.wait(WAIT_SECONDS)
    if process.beat_due:
        process.exchange_beats(Beat(None))


def group_exit(own: LastExit | None, others: Mapping[int, LastExit | None]) -> LastExit | None:
    """How a group has ended, from the reports on its ranks: by the fault of one of them, if there is one, since the
    others only followed it."""
    if own is None or not own.outside:
        return own
    for rank, report in others.items():
        if report is not None and not report.outside:
            return own._replace(cause=f"ended with rank {rank}, which {report.cause}", outside=False)
    return own


def shared_settings(settings: Settings) -> dict[str, Any]:
    """What this rank must have in common with the others, by the name of the setting."""
    shared = {name: getattr(settings, name) for name in SHARED_SETTINGS}
    shared["lora_adapters"] = [(name, adapter_digest(Path(path)).hex()) for name, path in settings.adapters]
    draft = settings.draft_model_dir
    shared["draft_model_id"] = settings.draft_model_id if draft is None else content_hash(draft)
    decoded: dict[str, Any] = json.loads(json.dumps(shared))  # lists for tuples, as the other side reads them
    return decoded


def host_id() -> str:
    """The same for all processes of a machine, whose memory and cores they share."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def _listen(host: str) -> socket.socket:
    """A listening socket with a port that the kernel chooses."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host}: {error.strerror}. --group needs an address of rank 0's host."
        ) from error


def _choose_interface(host: str) -> None:
    """Has the collective operations use the network interface that leads to rank 0, unless the environment names one.
    By default gloo takes the one that the host's own name resolves to, which may be the loopback."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)
            return
