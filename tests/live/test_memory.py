"""A worker's memory is bounded by its weights and its KV cache, in several types (`scripts/bench memory` measures
more)."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.benchmarks.memory import worker_memory
from tests.live.server import Server
from tests.models import demo_model
from tgi.microkernel import rundir

PROMPTS = [f"This is story number {n}:" + " and the river runs" * (1 + 40 * n) for n in (0, 1, 2, 4, 7)]


@pytest.mark.parametrize(
    "flags",
    [(), ("--dtype", "float32", "--kv-cache-dtype", "int8"), ("--dtype", "float16", "--speculate", "3")],
    ids=["default", "float32", "float16"],
)
def test_the_worker_stays_within_its_bound(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The demo model, 4-bit weights: the smaller the weights, the more the rest counts."""
    with Server(tmp_path / "run", "--model-id", str(demo_model()), *flags) as server:
        server.start().wait_until_ready()
        facts = next(state.facts for state in rundir.read_states(server.run_directory) if state.role == "worker")
        assert facts["kernels"].startswith("our own")
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            list(pool.map(lambda prompt: server.generate(prompt, max_new_tokens=24), PROMPTS))

        def excess() -> float:
            memory = worker_memory(server.run_directory)
            assert facts["weight_bytes"] < memory.rss
            assert 0 < memory.kv_cache <= facts["kv_cache_bytes"]
            return memory.excess

        # Memory that only the requests needed is given back when the worker has been idle for a while.
        # Asked seldom: the kernel counts all pages for each answer.
        server.wait_until(lambda: excess() <= 0, "the worker's memory is within its bound", poll_seconds=0.5)
