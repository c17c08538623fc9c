"""A restarted scheduler keeps the worker, its weights and its KV pages."""

from pathlib import Path

import pytest

from tests.live.server import SharedServers
from tests.live.test_tree import SCRIPTED, all_streams, token_ids

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
