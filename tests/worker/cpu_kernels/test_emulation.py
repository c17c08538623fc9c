"""The emulation of other processors: arguments, memory of this process, errors."""

import ctypes
import os
import subprocess
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from tests.worker.cpu_kernels.emulation.library import COMPILER, EmulatedLibrary, missing_tools

SOURCE = """
#include <cstdint>
#include <thread>
#include <vector>

extern "C" {
int64_t mixed(int64_t a, float x, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h,
              int64_t i, float y, int j) {
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + int64_t(1000 * x + 10000 * y);
}

float* made(int64_t size) { return new float[size]; }
void keep(float* to, const float* from, int64_t size) { for (int64_t i = 0; i < size; i++) to[i] = from[i]; }
void swap_pointers(int64_t** both) { std::swap(both[0], both[1]); }

void square(const float* x, float* y, int64_t size, int64_t threads) {
    std::vector<std::thread> all;
    for (int64_t n = 0; n < threads; n++)
        all.emplace_back([=] { for (int64_t i = n; i < size; i += threads) y[i] = x[i] * x[i]; });
    for (auto& one : all) one.join();
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLibrary:
    if reason := missing_tools():
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    source = tmp_path_factory.mktemp("emulation") / "small.cpp"
    source.write_text(SOURCE)
    path = source.with_suffix(".so")
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(path)], check=True)
    return EmulatedLibrary(str(path))


def test_integers_and_floats_arrive_in_any_order(library: EmulatedLibrary) -> None:
    library.mixed.argtypes = c_int64, c_float, *[c_int64] * 8, c_float, c_int
    library.mixed.restype = c_int64
    assert library.mixed(1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, -0.25, -10) == sum(n * n for n in range(1, 10)) - 100 - 1000


@pytest.mark.parametrize("size", [1, 1000, 5_000_000])
def test_threads_read_and_write_tensors_of_this_process(library: EmulatedLibrary, size: int) -> None:
    library.square.argtypes, library.square.restype = (c_void_p, c_void_p, c_int64, c_int64), None
    memory = torch.full((size + 2,), 7.0)
    for seed in range(2):
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        library.square(x.data_ptr(), memory[1:].data_ptr(), size, 3)
        assert torch.equal(memory[1:-1], x * x)
        assert memory[0] == memory[-1] == 7


def test_addresses_in_memory_and_memory_of_the_library_are_kept(library: EmulatedLibrary) -> None:
    library.swap_pointers.argtypes, library.swap_pointers.restype = (c_void_p,), None
    pair = (c_int64 * 2)(3, 1 << 62)
    library.swap_pointers(pair)
    library.swap_pointers(ctypes.byref(pair))
    library.swap_pointers(ctypes.addressof(pair))
    assert list(pair) == [1 << 62, 3]
    library.made.argtypes, library.made.restype = (c_int64,), c_void_p
    library.keep.argtypes, library.keep.restype = (c_void_p, c_void_p, c_int64), None
    x, y, made = torch.arange(3000.0), torch.zeros(3000), library.made(3000)
    library.keep(made, x.data_ptr(), 3000)
    library.keep(y.data_ptr(), made, 3000)
    assert torch.equal(x, y)


def test_a_wrong_address_is_an_error_and_ends_the_library(library: EmulatedLibrary, tmp_path: Path) -> None:
    other = EmulatedLibrary(library.path)
    other.keep.argtypes, other.keep.restype = (c_void_p, c_void_p, c_int64), None
    with pytest.raises(MemoryError, match="keep accesses the page at 0x10000,"):
        other.keep(0x10010, torch.ones(1).data_ptr(), 1)
    with pytest.raises(RuntimeError, match="ended with code 1"):
        other.keep(0x10010, torch.ones(1).data_ptr(), 1)
    with pytest.raises(OSError, match="ended with code 1"):
        EmulatedLibrary(str(tmp_path / "none.so"))


def test_a_function_that_is_missing_is_no_attribute(library: EmulatedLibrary) -> None:
    assert hasattr(library, "made")
    assert not hasattr(library, "unmade")
