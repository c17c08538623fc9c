"""`tgi up --quantize`: a model that is quantized at load, in a whole process tree."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.server import Server
from tests.models import model
from tgi.microkernel.host import rundir

pytestmark = pytest.mark.live

PROMPTS = [f"This is story number {n}:" + " and the river runs" * n for n in range(6)]


def answer(server: Server, prompt: str) -> list[tuple[int, float]]:
    tokens = server.generate(prompt, max_new_tokens=12)["details"]["tokens"]
    return [(token["id"], token["logprob"]) for token in tokens]


def test_int8_answers_are_the_same_alone_concurrently_and_after_a_kill(tmp_path: Path) -> None:
    directory = str(model("llama", hidden=128, intermediate=192))
    with Server(
        tmp_path / "run", "--model-id", directory, "--dtype", "bfloat16", "--validation-workers", "1"
    ) as server:
        server.start("up", "--quantize", "int8").wait_until_ready()
        served = next(state.facts for state in rundir.read_states(server.run_directory) if state.role == "worker")
        # With torch's kernels, quantized weights are dequantized at load.
        assert (8 < served["weight_bits"] < 12) == served["kernels"].startswith("our own")
        alone = [answer(server, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: answer(server, prompt), PROMPTS)) == alone
        server.kill("worker-0")
        assert answer(server, PROMPTS[0]) == alone[0]
