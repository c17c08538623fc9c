"""Our own kernels: right beside float64, the same bits for a row whatever else is computed, and built with care."""

import errno
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.layers.rotary import Rope, Rotary
from tgi.worker.native import build
from tgi.worker.native.build import Unavailable, library
from tgi.worker.native.kernels import THEN, Kernels

CPU = torch.device("cpu")
# Without AMX the same numbers come from AVX-512. Where a processor has no AMX these are the same kernels twice.
VARIANTS = {"best": (), "without AMX": ("-mno-amx-tile", "-mno-amx-bf16")}
PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda y, _: y,
    "silu": lambda y, _: F.silu(y),
    "gelu": lambda y, _: F.gelu(y),
    "gelu_tanh": lambda y, _: F.gelu(y, approximate="tanh"),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
}


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(library(*VARIANTS[request.param]), 2)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (200, 64), (960, 576), (7, 1536)])
def test_products_are_right_and_do_not_depend_on_the_other_rows(kernels: Kernels, outputs: int, inputs: int) -> None:
    weight, x, bias = numbers(outputs, inputs), numbers(300, inputs, seed=1), torch.randn(outputs)
    packed = kernels.pack(weight)
    y = kernels.linear(x, packed, bias, wide=True)
    expected = x.double() @ weight.double().T + bias
    assert (y - expected).abs().max() < 1e-5 * inputs
    for count, first in itertools.product((0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 257), (0, 41)):
        some = kernels.linear(x[first : first + count], packed, bias, wide=True)
        assert torch.equal(some, y[first : first + count])


def test_a_weight_that_is_not_in_order_is_packed_from_memory_that_stays(kernels: Kernels) -> None:
    # A copy of so much memory goes back to the system as soon as nobody has it.
    weight = torch.arange(32 * 600_000).bfloat16().view(32, -1).t()
    assert torch.equal(kernels.pack(weight).memory, kernels.pack(weight.contiguous()).memory)


@pytest.mark.parametrize("then", THEN)
def test_what_follows_a_product_is_computed_on_its_float32_sums(kernels: Kernels, then: str) -> None:
    weight, x, other = numbers(100, 64), 0.3 * numbers(40, 64, seed=1), numbers(40, 100, seed=2)
    packed = kernels.pack(weight)
    plus = torch.randn(40, 100)
    sums = kernels.linear(x, packed, plus=plus, wide=True)
    y = kernels.linear(x, packed, None, THEN[then], other, plus)
    expected = PLAIN[then](sums.double(), other.double())
    assert (y.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("then", ["silu", "gelu", "gelu_tanh"])
def test_what_follows_a_product_is_right_for_numbers_of_any_size(kernels: Kernels, then: str) -> None:
    sizes = torch.logspace(-30, 38, 64)
    x = torch.cat((sizes, -sizes)).bfloat16()[:, None] * torch.eye(1, 64, dtype=torch.bfloat16)
    packed = kernels.pack(torch.ones(1, 64, dtype=torch.bfloat16))
    y = kernels.linear(x, packed, None, THEN[then])
    expected = PLAIN[then](x[:, :1].double(), x[:, :1].double())
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-35).all()
    assert kernels.linear(x[:1] * torch.nan, packed, None, THEN[then]).isnan().all()


def test_nothing_added_changes_no_bit(kernels: Kernels) -> None:
    packed, x = kernels.pack(numbers(64, 64)), numbers(5, 64, seed=1)
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, packed, plus=torch.zeros(5, 64)))


@pytest.mark.parametrize(("centred", "size"), [(False, 576), (True, 576), (False, 37), (True, 16)])
def test_norms(kernels: Kernels, centred: bool, size: int) -> None:
    x, weight, bias = 3 * numbers(50, size) + 1, torch.randn(size), torch.randn(size)
    y = kernels.norm(x, weight, bias, 1e-5, centred)
    wide = x.double()
    if centred:
        expected = F.layer_norm(wide, (size,), weight.double(), bias.double(), 1e-5)
    else:
        expected = F.rms_norm(wide, (size,), weight.double(), 1e-5) + bias
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()
    assert all(torch.equal(kernels.norm(x[n : n + 1], weight, bias, 1e-5, centred), y[n : n + 1]) for n in range(9))


@pytest.mark.parametrize(("neighbours", "dim"), [(False, 64), (False, 48), (True, 64), (True, 20)])
def test_turning_is_torchs(kernels: Kernels, neighbours: bool, dim: int) -> None:
    rope = Rope(dim, {"rope_theta": 10000.0}, neighbours)
    ours, torchs = Rotary(rope, CPU, kernels), Rotary(rope, CPU)
    positions = torch.arange(0, 4000, 37)
    x = numbers(len(positions), 5, 64)
    y, expected = x.clone(), x.clone()
    ours.rotate(y, 4, ours.angles(positions, 4000, 4))
    torchs.rotate(expected, 4, torchs.angles(positions, 4000, 4))
    assert (y.float() - expected.float()).abs().max() < 0.04  # the last bit of a bfloat16
    assert torch.equal(y[:, 4], x[:, 4])
    assert torch.equal(y[..., dim:], x[..., dim:])


def test_all_memory_is_read(kernels: Kernels) -> None:
    memory = torch.randint(-100, 100, (200, 1000), generator=torch.Generator().manual_seed(1))
    assert kernels.read(memory) == memory.sum()


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that is quick, as it writes down its arguments alone."""
    (compiler := tmp_path / "compiler").write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$@" >>"$0.calls"\ncp "$0" "$last"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = library()
    assert path.read_bytes() == compiler.read_bytes()
    assert library() == path
    (call,) = (tmp_path / "compiler.calls").read_text().splitlines()
    assert call.startswith(" ".join(build.FLAGS))
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert library("-g") != path
    assert len((tmp_path / "compiler.calls").read_text().splitlines()) == 2


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="cannot be run"):
        library()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(Unavailable, match="false failed"):
        library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        library()


def test_a_compiler_may_be_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "env false")
    with pytest.raises(Unavailable, match="env failed"):
        library()


def test_without_a_place_to_write_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(Unavailable, match="No space left"):
        library()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(Unavailable, match="Set XDG_CACHE_HOME"):
        library()


def test_another_processor_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : old\nflags\t\t: sse avx2 avx512f\n")
    monkeypatch.setattr(build, "CPUINFO", cpuinfo)
    with pytest.raises(Unavailable, match="avx512_bf16, avx512_vnni, avx512bw, avx512vbmi"):
        library()


def test_code_that_others_could_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tgi").mkdir()
    os.chmod(tmp_path / "tgi", 0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="others may write"):
        library()


def test_a_broken_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(Unavailable, match="cannot be loaded"):
        Kernels(tmp_path / "broken.so", 1)
