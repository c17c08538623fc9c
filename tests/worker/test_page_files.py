"""KV pages in files: their bytes come back, and damaged, foreign and surplus files are never used."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.cpu_kernels.available import VARIANTS, load_variant
from tests.worker.driving import make_engine
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import PAGE_KEY_BYTES, PagesTransferred, TransferPages
from tgi.worker.attention import build_attention
from tgi.worker.attention.interface import KVCacheSpec, StorableBackend
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.engine.page_files import SUFFIX, PageFiles
from tgi.worker.models.loader import build_model

PAGES = 8
KEYS = [bytes([number]) * PAGE_KEY_BYTES for number in range(PAGES)]
CPU = torch.device("cpu")


def memory(kernels: CpuKernels | None = None) -> list[Tensor]:
    """The memory of the pages of a backend, with random bytes."""
    spec = KVCacheSpec(layers=3, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32, cpu_kernels=kernels)
    backend = build_attention(spec, PAGES, CPU)
    assert isinstance(backend, StorableBackend)
    for part in backend.page_memory:
        part.view(torch.uint8).random_(0, 255) if part.is_contiguous() else part.normal_()
    return backend.page_memory


class Files(PageFiles):
    """Waits for each transfer."""

    def __init__(self, root: Path, parts: list[Tensor], most: int = 1 << 30, **identity: Any) -> None:
        super().__init__(root, identity, parts, most)

    def transfer(self, pages: list[int], load: bool, keys: list[bytes], removed: bytes = b"") -> int:
        self.submit(TransferPages(7, load, pack_column(INT32, pages), b"".join(keys), removed), lambda: None)
        assert self._running[-1][1].exception() is None
        (answer,) = self.take_answers()
        assert answer == PagesTransferred(7, answer.done)
        return answer.done


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[Tensor]]:
    """A directory with the files of pages 0 to 3 under the first keys, and the memory."""
    parts = memory()
    assert Files(tmp_path, parts).transfer([0, 1, 2, 3], False, KEYS[:4]) == 4
    return tmp_path, parts


@pytest.mark.parametrize("native", [False, True])
def test_bytes_come_back(tmp_path: Path, native: bool) -> None:
    kernels = load_variant(next(name for name, one in VARIANTS.items() if one.element == "float32")) if native else None
    parts, others = memory(kernels), memory(kernels)
    assert Files(tmp_path, parts).transfer([0, 5], False, KEYS[:2]) == 2
    files = Files(tmp_path, others)
    assert files.report().keys == b"".join(KEYS[:2])
    before = [part.clone() for part in others]
    assert files.transfer([3, 2], True, KEYS[:2]) == 2
    for part, other, old in zip(parts, others, before, strict=True):
        assert torch.equal(other[[3, 2]].view(torch.uint8), part[[0, 5]].view(torch.uint8))
        rest = [0, 1, 4, 5, 6, 7]
        assert torch.equal(other[rest].view(torch.uint8), old[rest].view(torch.uint8))


@pytest.mark.parametrize("damage", ["bit", "head", "cut", "longer", "renamed", "gone", "unreadable"])
def test_damaged_files_are_dropped_and_never_used(written: tuple[Path, list[Tensor]], damage: str) -> None:
    root, parts = written
    files = Files(root, parts)
    path = next(root.glob(f"*/{KEYS[1].hex()}{SUFFIX}"))
    data = bytearray(path.read_bytes())
    if damage in ("bit", "head"):
        data[len(data) // 2 if damage == "bit" else 20] ^= 1
    path.write_bytes(data[: -1 if damage == "cut" else None] + b"x" * (damage == "longer"))
    if damage == "renamed":
        path.write_bytes(path.with_name(KEYS[2].hex() + SUFFIX).read_bytes())
    elif damage in ("gone", "unreadable"):
        path.unlink()
    if damage == "unreadable":
        path.mkdir()
    before = [part.clone() for part in parts]
    assert files.transfer([4, 5, 6], True, KEYS[:3]) == 1
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[5:], old[5:])
    if damage != "unreadable":
        assert not path.exists()
        assert Files(root, parts).report().keys == b"".join(KEYS[2:4]) + KEYS[0]  # which was used last


def test_files_of_another_life_that_are_cut_or_unfinished_are_removed(written: tuple[Path, list[Tensor]]) -> None:
    root, parts = written
    (directory,) = root.iterdir()
    paths = [directory / (key.hex() + SUFFIX) for key in KEYS[:4]]
    paths[0].write_bytes(b"cut")
    paths[1].rename(paths[1].with_suffix(".draft"))
    (directory / "notes.txt").write_text("of a person")
    os.utime(paths[2])  # the last one used
    files = Files(root, parts)
    assert files.report().keys == KEYS[3] + KEYS[2]
    assert sorted(path.name for path in directory.iterdir()) == sorted([paths[2].name, paths[3].name, "notes.txt"])


def test_all_files_are_bounded_and_those_of_other_models_go_first(written: tuple[Path, list[Tensor]]) -> None:
    root, parts = written
    size = next(root.glob(f"*/*{SUFFIX}")).stat().st_size
    other = Files(root, parts, 5 * size + 1, dtype="another")
    assert other.most == 5
    assert other.report().keys == b""  # pages of other weights are not its own
    for count, keys in enumerate(KEYS[:5], 1):
        assert other.transfer([count], False, [keys]) == 1
        assert sum(path.stat().st_size for path in root.glob("*/*")) <= 5 * size + 1
    assert other.transfer([0], False, KEYS[5:6], removed=KEYS[0]) == 1
    assert Files(root, parts, 5 * size + 1, dtype="another").report().keys == b"".join(KEYS[1:6])
    assert Files(root, parts, 3 * size, dtype="another").report().keys == b"".join(KEYS[3:6])
    assert Files(root, parts).report().keys == b""
    with pytest.raises(UserError, match="less than the"):
        Files(root, parts, size - 1)


def test_a_disk_that_fails_costs_pages_only(written: tuple[Path, list[Tensor]]) -> None:
    root, parts = written
    files = Files(root, parts)
    (directory,) = root.iterdir()
    (directory / f"{KEYS[5].hex()}.draft").mkdir()
    assert files.transfer([4, 5, 6], False, KEYS[4:7]) == 1
    files.close()
    (root / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        Files(root / "file", parts)


def test_pages_that_were_read_are_not_prefaulted(tiny_llama: Path, tmp_path: Path) -> None:
    """Memory that no request has written to is prefaulted by writing to it."""
    kernels = load_variant(next(name for name, one in VARIANTS.items() if one.element == "float32"))
    engine = make_engine(build_model(tiny_llama, "float32", "cpu", lambda *_: None, kernels=kernels))
    parts = engine.page_memory
    assert parts is not None
    for part in parts:
        part[:4] = 7
    files = engine.page_files = Files(tmp_path, parts)
    assert files.transfer([0, 1, 2, 3], False, KEYS[:4]) == 4
    for part in parts:
        part[:4] = 0
    assert files.transfer([2, 1, 3, 0], True, KEYS[:4]) == 4
    while engine.prefault_memory():
        pass
    assert all(bool((part[:4] == 7).all()) for part in parts)
