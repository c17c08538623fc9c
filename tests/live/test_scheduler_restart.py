"""A restarted scheduler keeps the KV pages of its worker, and a restarted worker those of its predecessor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.server import Server, SharedServers
from tests.live.test_tree import SCRIPTED, all_streams, token_ids
from tgi.microkernel.host import rundir
from tgi.microkernel.processes.control import carry_out
from tgi.worker.kv_cache_sizes import CPU_PAGE_SIZE

pytestmark = pytest.mark.live


@pytest.mark.parametrize("worker", [SCRIPTED, ()], ids=["scripted", "torch"])
def test_streams_go_on_from_the_pages_of_the_worker(
    tiny_llama: Path, shared_server: SharedServers, worker: tuple[str, ...]
) -> None:
    server = shared_server("--model-id", str(tiny_llama), *worker)
    undisturbed = all_streams(server, 150)
    worker_pid = server.processes()["worker-0"].pid
    found_before = server.metric("tgi_prefix_cache_hit_tokens")
    resumed_before = server.metric("tgi_recomputed_tokens")
    disturbed = all_streams(server, 150, act=lambda: server.kill("scheduler-0"), after=40)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert server.processes()["worker-0"].pid == worker_pid
    resumed = server.metric("tgi_recomputed_tokens") - resumed_before
    found = server.metric("tgi_prefix_cache_hit_tokens") - found_before
    print(f"{resumed:.0f} generated tokens submitted again, {found:.0f} tokens found in the prefix cache")
    assert resumed >= 8 * 40
    assert found >= resumed  # prompts, too; less than a page of each request is computed again


def kill(server: Server) -> None:
    server.kill("worker-0")


def restart(server: Server) -> None:
    """As `tgi restart worker`, at once."""
    supervisor = rundir.lock_holders(server.run_directory)["worker"]
    list(carry_out(rundir.control_socket(server.run_directory, supervisor), {"command": "restart", "target": "worker"}))


@pytest.mark.parametrize("end", [kill, restart])
def test_streams_go_on_from_the_pages_of_a_worker_that_is_replaced(
    tiny_llama: Path, shared_server: SharedServers, end: Callable[[Server], None]
) -> None:
    """Its successor shares its memory. At most two pages of each stream are computed again: that of the steps in
    flight, and the next one."""
    server = shared_server("--model-id", str(tiny_llama))
    undisturbed = all_streams(server, 150)
    found_before, resumed_before = (server.metric(f"tgi_{name}_tokens") for name in ("prefix_cache_hit", "recomputed"))
    disturbed = all_streams(server, 150, act=lambda: end(server), after=100)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    resumed = server.metric("tgi_recomputed_tokens") - resumed_before
    found = server.metric("tgi_prefix_cache_hit_tokens") - found_before
    print(f"{resumed:.0f} generated tokens submitted again, {found:.0f} tokens found in the prefix cache")
    assert resumed >= 8 * 100
    assert found >= resumed - 8 * 2 * CPU_PAGE_SIZE
