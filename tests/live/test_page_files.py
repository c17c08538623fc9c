"""KV pages on disk: streams are exact when a worker, or the whole server, goes on from them."""

from pathlib import Path

import psutil
import pytest

from tests.live.server import Server
from tests.live.test_tree import all_streams, token_ids
from tgi.microkernel.processes.fork_server import adopting_orphans

pytestmark = pytest.mark.live


def test_streams_go_on_from_pages_on_disk(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "pages"
    flags = "--model-id", str(tiny_llama), "--validation-workers", "1", "--prefix-cache-dir", str(directory)
    others = set(psutil.Process().children())
    with adopting_orphans(), Server(tmp_path / "run", *flags).start() as server:
        server.wait_until_ready()
        undisturbed = [token_ids(events) for events in all_streams(server, 150)]
        found = server.metric("tgi_prefix_cache_hit_tokens")
        disturbed = all_streams(server, 150, act=lambda: server.kill("worker-0"), after=40)
        assert [token_ids(events) for events in disturbed] == undisturbed
        assert server.metric("tgi_prefix_cache_hit_tokens") - found > 8 * 100
        server.stop()
        assert set(psutil.Process().children()) <= others  # nothing is left of the server, dead or alive
    files = sorted(directory.glob("*/*.page"))
    assert files
    for damaged in files[::9]:
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with Server(tmp_path / "run2", *flags).start() as server:
        server.wait_until_ready()
        assert [token_ids(events) for events in all_streams(server, 150)] == undisturbed
        assert server.metric("tgi_prefix_cache_hit_tokens") > 0
        server.stop()
