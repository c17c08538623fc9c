"""Vectors (simd.h, vector_math.h) on each instruction set of this machine and, in the emulator, on those of Arm."""

import os
import subprocess
from ctypes import CDLL, c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.emulation.library import COMPILER, PROCESSORS, EmulatedLibrary, missing_tools
from tgi.worker.cpu_kernels import build
from tgi.worker.cpu_kernels.build import KernelsUnavailable
from tgi.worker.host_cpu import cpu_features
from tgi.worker.instruction_sets import BY_NAME, INSTRUCTION_SETS

pytestmark = pytest.mark.slow

LANES = 16
# Each function of vectors, as an expression of x, y and z, with what torch computes.
EXACT = {  # rounded as IEEE 754 says
    "x + y": lambda x, y, z: x + y,
    "x - y": lambda x, y, z: x - y,
    "x * y": lambda x, y, z: x * y,
    "x / y": lambda x, y, z: x / y,
    "min(x, y)": torch.minimum,
    "max(x, y)": torch.maximum,
    "floor(x)": lambda x, y, z: x.floor(),
    "round_to_even(x)": lambda x, y, z: x.round(),
    "fma(x, y, z)": lambda x, y, z: torch.addcmul(z.double(), x.double(), y.double()).float(),
    "fms(x, y, z)": lambda x, y, z: torch.addcmul(-z.double(), x.double(), y.double()).float(),
    "fnma(x, y, z)": lambda x, y, z: torch.addcmul(z.double(), -x.double(), y.double()).float(),
    "select(x > y, x, z)": lambda x, y, z: torch.where(x > y, x, z),
    "select(x == broadcast(0.f), y, z)": lambda x, y, z: torch.where(x == 0, y, z),
    "to_float(to_int(floor(x)))": lambda x, y, z: x.floor(),
    "to_float(to_int(floor(x)) * to_int(floor(y)))": lambda x, y, z: x.floor() * y.floor(),
    "as_float(shift_left(as_int(x), 3))": lambda x, y, z: (x.view(torch.int32) << 3).view(torch.float32),
    "as_float(as_int(x) & as_int(y))": lambda x, y, z: (x.view(torch.int32) & y.view(torch.int32)).view(torch.float32),
    "as_float(as_int(x) ^ as_int(y))": lambda x, y, z: (x.view(torch.int32) ^ y.view(torch.int32)).view(torch.float32),
    "to_float(shift_right(as_int(x), 20))": lambda x, y, z: ((x.view(torch.int32) >> 20) & 0xFFF).float(),
}
CLOSE = {  # with a relative error below 1e-6
    "exp2(x)": lambda x, y, z: x.double().exp2(),
    "sigmoid(x)": lambda x, y, z: x.double().sigmoid(),
    "reciprocal(max(x, broadcast(1.f)))": lambda x, y, z: 1 / x.double().clamp(1),
}
TYPES = {"float": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SOURCE = """
#include "vector_math.h"
using namespace tgi;

template <class T>
static void convert(const T* from, T* to, float* wide, int64_t count) {
    const Float x = load_first(from, count);
    store(wide, x), store_first(to, x, count);
}

#pragma GCC visibility push(default)
extern "C" {
void compute(int function, const float* from_x, const float* from_y, const float* from_z, float* to, int64_t vectors) {
    for (int64_t n = 0; n < vectors; n++) {
        const Float x = load(from_x + LANES * n), y = load(from_y + LANES * n), z = load(from_z + LANES * n);
        Float found = zeros();
        switch (function) {
            CASES
        }
        store(to + LANES * n, found);
    }
}
void round_to_bf16(const float* from, bf16* to) { store(to, load(from), load(from + LANES)); }
void round_to_f16(const float* from, f16* to) { store(to, load(from), load(from + LANES)); }
void convert_float(const float* from, float* to, float* wide, int64_t count) { convert(from, to, wide, count); }
void convert_bf16(const bf16* from, bf16* to, float* wide, int64_t count) { convert(from, to, wide, count); }
void convert_f16(const f16* from, f16* to, float* wide, int64_t count) { convert(from, to, wide, count); }
void load_bytes(const int8_t* from, int32_t* to) { store(to, load(from)); }
void load_unsigned_bytes(const uint8_t* from, int32_t* to) { store(to, load(from)); }
int mask_bits(int64_t count) { return bits_of(first_lanes(count)); }
void reduce_all(const float* from, float* to) { to[0] = reduce_add(load(from)), to[1] = reduce_max(load(from)); }
void maxima(const float* from, float* to) {
    Float x[16];
    for (int n = 0; n < 16; n++) x[n] = load(from + LANES * n);
    store(to, horizontal_maxima(x));
}
}
"""
HERE = [one.name for one in INSTRUCTION_SETS if one.features <= cpu_features()]


@pytest.fixture(scope="module", params=[*HERE, *PROCESSORS])
def vectors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "CDLL | EmulatedLibrary":
    emulated = request.param in PROCESSORS
    if emulated and (reason := missing_tools()):
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    try:
        compiler = [COMPILER] if emulated else build.compiler_command()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    source = tmp_path_factory.mktemp("vectors") / "vectors.cpp"
    cases = (f"case {number}: found = {name}; break;" for number, name in enumerate((*EXACT, *CLOSE)))
    source.write_text(SOURCE.replace("CASES", "\n".join(cases)))
    path = source.with_suffix(".so")
    flags = [*build.FLAGS, *BY_NAME[request.param].flags, "-DTGI_ELEMENT_F32", f"-I{build.SOURCES}"]
    subprocess.run([*compiler, *flags, "-shared", str(source), "-o", str(path)], check=True)
    return loaded(path, request.param)


def loaded(path: Path, name: str) -> "CDLL | EmulatedLibrary":
    found = EmulatedLibrary(str(path), PROCESSORS[name]) if name in PROCESSORS else CDLL(str(path))
    found.compute.argtypes, found.compute.restype = (c_int, *[c_void_p] * 4, c_int64), None
    for name in TYPES:
        convert = getattr(found, f"convert_{name}")
        convert.argtypes, convert.restype = (*[c_void_p] * 3, c_int64), None
    for name in ("round_to_bf16", "round_to_f16", "load_bytes", "load_unsigned_bytes", "reduce_all", "maxima"):
        function = getattr(found, name)
        function.argtypes, function.restype = (c_void_p, c_void_p), None
    found.mask_bits.argtypes, found.mask_bits.restype = (c_int64,), c_int
    return found


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 30


def compute(vectors: "CDLL | EmulatedLibrary", name: str, *columns: Tensor) -> Tensor:
    found = torch.empty_like(columns[0])
    addresses = (column.data_ptr() for column in (*columns, found))
    vectors.compute([*EXACT, *CLOSE].index(name), *addresses, len(found) // LANES)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, except that NaN is NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0), other.nan_to_num(0))


@each_case("name", EXACT)
def test_exact_functions(vectors: "CDLL | EmulatedLibrary", name: str) -> None:
    columns = [numbers(100 * LANES, seed) for seed in range(3)]
    columns[0][:200] = 0
    columns[0][500:600] = columns[1][500:600]
    expected = EXACT[name](*columns[:2]) if name[:3] in ("min", "max") else EXACT[name](*columns)
    assert same(compute(vectors, name, *columns), expected)


@each_case("name", CLOSE)
def test_functions_that_are_close(vectors: "CDLL | EmulatedLibrary", name: str) -> None:
    x = torch.cat((numbers(100 * LANES) / 4, torch.linspace(-9.9, 127.9, 100 * LANES)))
    expected = CLOSE[name](x, x, x)
    assert (compute(vectors, name, x, x, x) / expected - 1).abs().max() < 1e-6
    x = torch.tensor([torch.nan, 1, *[0.0] * 14])
    found = compute(vectors, name, x, x, x)
    assert name.startswith("reciprocal") or found[0].isnan()
    assert found[1:].isfinite().all()


def test_the_larger_and_the_smaller_number_with_nan_is_the_second_one(vectors: "CDLL | EmulatedLibrary") -> None:
    x, y = torch.ones(LANES), torch.full((LANES,), 2.0)
    x[3], y[5] = torch.nan, torch.nan
    for name in ("max(x, y)", "min(x, y)"):
        found = compute(vectors, name, x, y, y)
        assert found[3] == 2
        assert found[5].isnan()


def test_stores_round_to_even(vectors: "CDLL | EmulatedLibrary") -> None:
    """Of every 16-bit pattern the number itself, the middle to the next one, and numbers on both sides of it."""
    for name, half in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        patterns = torch.arange(-(1 << 15), 1 << 15, 7, dtype=torch.int32).to(torch.int16)
        below = patterns.view(half).float()
        middle = (below + (patterns + 1).view(half).float()) / 2
        x = torch.cat((below, middle, middle * (1 + 2**-20), middle * (1 - 2**-20)))
        if name == "bf16":  # an instruction of some processors takes subnormal float32 numbers as 0
            x = x[~((x.abs() < 2**-126) & (x != 0))]
        x = x[: len(x) // 32 * 32].contiguous()
        found = torch.empty(len(x), dtype=half)
        for at in range(0, len(x), 32):
            getattr(vectors, f"round_to_{name}")(x[at:].data_ptr(), found[at:].data_ptr())
        assert same(found, x.to(half))


@each_case("name", TYPES)
def test_partial_loads_and_stores(vectors: "CDLL | EmulatedLibrary", name: str) -> None:
    x = numbers(LANES).to(TYPES[name])
    for count in range(LANES + 1):
        y, wide = torch.full((LANES,), 7, dtype=TYPES[name]), torch.empty(LANES)
        getattr(vectors, f"convert_{name}")(x.data_ptr(), y.data_ptr(), wide.data_ptr(), count)
        assert torch.equal(wide[:count], x[:count].float())
        assert not wide[count:].any()
        assert torch.equal(y[:count], x[:count])
        assert (y[count:] == 7).all()


def test_bytes_and_masks(vectors: "CDLL | EmulatedLibrary") -> None:
    signed = torch.arange(-128, 128).to(torch.int8)
    for function, x in ((vectors.load_bytes, signed), (vectors.load_unsigned_bytes, signed.view(torch.uint8))):
        found = torch.empty(256, dtype=torch.int32)
        for at in range(0, 256, LANES):
            function(x[at:].data_ptr(), found[at:].data_ptr())
        assert torch.equal(found, x.int())
    assert [vectors.mask_bits(count) for count in range(20)] == [min((1 << count) - 1, 0xFFFF) for count in range(20)]


def test_reductions_have_one_order_everywhere(vectors: "CDLL | EmulatedLibrary") -> None:
    for seed in range(50):
        x, found = numbers(LANES, seed), torch.empty(2)
        vectors.reduce_all(x.data_ptr(), found.data_ptr())
        lanes = x
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        assert found.tolist() == [lanes.item(), x.max().item()]


def test_maxima_of_several_vectors(vectors: "CDLL | EmulatedLibrary") -> None:
    x, found = numbers(16 * LANES), torch.empty(LANES)
    vectors.maxima(x.data_ptr(), found.data_ptr())
    assert torch.equal(found, x.view(16, LANES).amax(1))
