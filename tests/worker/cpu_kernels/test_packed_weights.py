"""Packed weights in files: the same model as from the checkpoint, and no file that is damaged or too many is kept."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cases import each_case
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.cpu_kernels.test_models import directory, logprobs
from tgi.worker.cpu_kernels.arena import LARGE_PAGE
from tgi.worker.models import packed_weights
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.models.packed_weights import PackedWeightFiles

pytestmark = pytest.mark.slow

BYTES = 1 << 30


def build(kind: str, files: PackedWeightFiles | None, quantize: str | None = None) -> tuple[Model, bool]:
    """The model, and whether its weights are to be written: none were read."""
    path = directory(kind)
    kernels = our_kernels(read_model_spec(path, "bfloat16", quantize))
    found = build_model(
        path, "bfloat16", "cpu", lambda stage, percent: None, kernels=kernels, quantize=quantize, files=files
    )
    if files is None:
        return found, False
    packs = bool(files._kept)
    files.write_behind()
    if packs:
        files.wait()
    return found, packs


# A tied head and a separate one, experts, heads of latent attention, recurrent layers, and codes with scales.
@pytest.mark.parametrize(
    ("kind", "quantize"),
    [("gemma2", None), ("llama", "int4"), ("mixtral", None), ("deepseek_v2", None), ("qwen3_next", "int8"),
     ("nemotron_h", None)],
)  # fmt: skip
def test_weights_that_were_written_compute_the_same_bits(
    kind: str, quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From files that are read, and mapped."""
    first, packs = build(kind, PackedWeightFiles(tmp_path, BYTES, 0), quantize)
    assert packs
    expected = logprobs(first)
    for mapped in (False, True):
        # Of these small files the system has no huge pages.
        monkeypatch.setattr(packed_weights, "HUGE_SHARE", 0.0 if mapped else 1.1)
        files = PackedWeightFiles(tmp_path, BYTES, 0)
        second, packs_again = build(kind, files, quantize)
        assert not packs_again
        assert bool(files.mapped_bytes) == mapped
        assert first.footprint == second.footprint
        assert torch.equal(logprobs(second), expected)
    # Another format of the same model is another file.
    assert build(kind, files, "int8" if quantize is None else None)[1]


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda stored: stored[:at] + bytes([stored[at] ^ 1]) + stored[at:][1:]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, Path]:
    """What a model computes, and the file of its weights."""
    directory = tmp_path_factory.mktemp("sound")
    model, _ = build("llama", PackedWeightFiles(directory, BYTES, 0))
    (path,) = directory.iterdir()
    return logprobs(model), path


@each_case(
    "damage",
    [
        lambda stored: b"",
        lambda stored: stored[:1000],
        lambda stored: stored[:-64],
        lambda stored: stored + bytes(64),
        lambda stored: stored[: -(1 << 18)] + bytes(1 << 18),
        flip(0),
        flip(35),  # of the length
        flip(50),  # of the digest
        flip(200),  # of the header
        flip(LARGE_PAGE),  # of the first tensor
    ],
)
def test_a_damaged_file_is_removed_and_never_used(
    damage: Callable[[bytes], bytes], sound: tuple[torch.Tensor, Path], tmp_path: Path
) -> None:
    expected, stored = sound[0], sound[1].read_bytes()
    path = tmp_path / sound[1].name
    path.write_bytes(damage(stored))
    found, packs = build("llama", PackedWeightFiles(tmp_path, BYTES, 0))
    assert packs
    assert path.read_bytes() == stored
    assert torch.equal(logprobs(found), expected)


def test_the_files_are_bounded(tmp_path: Path) -> None:
    for age, kind in enumerate(("llama", "qwen2", "gemma2")):
        known = set(tmp_path.iterdir())
        build(kind, PackedWeightFiles(tmp_path, BYTES, 0))
        (path,) = set(tmp_path.iterdir()) - known
        os.utime(path, (age, age))
    by_age = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
    assert not build("llama", PackedWeightFiles(tmp_path, BYTES, 0))[1]  # which is the latest use now
    (tmp_path / "0.part").write_bytes(b"of a writer that has ended")
    most = sum(path.stat().st_size for path in by_age)
    assert build("mistral", PackedWeightFiles(tmp_path, most, 0))[1]
    left = set(tmp_path.iterdir())
    assert by_age[0] in left
    assert by_age[1] not in left
    assert not list(tmp_path.glob("*.part"))
    # Neither weights that are too large nor those that are packed in no time.
    for files in (PackedWeightFiles(tmp_path, 1000, 0), PackedWeightFiles(tmp_path, BYTES)):
        assert build("qwen3", files)[1]
    assert set(tmp_path.iterdir()) == left


# Weights of 4 GB that take no memory, and files that take no time: the writer is in torch almost all the time.
ENDS_WHILE_IT_WRITES = """
import time
from pathlib import Path
import torch
from tgi.worker.models import packed_weights

packed_weights._write_all = lambda file, data: None
packed_weights.MOST_OF_FREE = 1e9
files = packed_weights.PackedWeightFiles(Path("."), 1 << 40, 0)
files._kept.append(("weights", [torch.empty(1 << 28, dtype=torch.uint8) for _ in range(16)]))
files.write_behind()
while not list(Path(".").iterdir()):
    time.sleep(0.01)
print("writes")
"""


def test_a_process_may_end_while_it_writes(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-P", "-c", ENDS_WHILE_IT_WRITES]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "writes\n", "")
