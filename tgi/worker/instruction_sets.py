"""The table of instruction sets that the CPU kernels are compiled for. Imports only the standard library, so that a
wheel can be built without the other packages.

There is one library of kernels for each instruction set and element type. The type of the elements is that of the
activations and of the KV cache.
"""

from typing import NamedTuple

# Each element type, with the macro that selects it in the C++ sources.
ELEMENTS = {"bfloat16": "TGI_ELEMENT_BF16", "float16": "TGI_ELEMENT_F16", "float32": "TGI_ELEMENT_F32"}

# Prefixes of the features that an instruction set may exclude. All others (such as "fma") stay in use under any limit.
EXTENSIONS = ("amx_", "avx10", "avx512", "avx_", "asimddp", "asimdfhm", "asimdhp", "bf16", "i8mm", "sme", "sve")


class InstructionSet(NamedTuple):
    """An instruction set, as a processor has it and as a compiler is told of it."""

    name: str
    machine: str  # "x86_64" or "aarch64"
    features: frozenset[str]  # that it needs, by Linux's names (/proc/cpuinfo)
    flags: tuple[str, ...]  # of GCC and Clang
    environment: dict[str, str]  # variables that limit torch, oneDNN and MKL to it


_AVX2_FEATURES = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt"))
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd")
_BF16_FEATURES = _AVX512_FEATURES | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")

# Best first, for each kind of machine.
INSTRUCTION_SETS = (
    InstructionSet(
        "amx",
        "x86_64",
        _BF16_FEATURES | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mtune=sapphirerapids"),
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
    ),
    InstructionSet(
        "avx512_bf16",
        "x86_64",
        _BF16_FEATURES,
        (*_BF16_FLAGS, "-mtune=icelake-server"),
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
        },
    ),
    InstructionSet(
        "avx512",
        "x86_64",
        _AVX512_FEATURES,
        (*_AVX512_FLAGS, "-mtune=skylake-avx512"),
        {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    ),
    InstructionSet(
        "avx2",
        "x86_64",
        _AVX2_FEATURES,
        (*_AVX2_FLAGS, "-mtune=haswell"),
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    InstructionSet(
        "neon_bf16",
        "aarch64",
        frozenset(("asimd", "asimddp", "asimdhp", "bf16", "i8mm")),
        ("-march=armv8.2-a+dotprod+fp16+bf16+i8mm",),
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD"},
    ),
    InstructionSet(
        "neon",
        "aarch64",
        frozenset(("asimd",)),
        ("-march=armv8-a",),
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD"},
    ),
)

BY_NAME = {one.name: one for one in INSTRUCTION_SETS}


def best_set(features: frozenset[str]) -> InstructionSet | None:
    """The best instruction set for a processor with these features."""
    return next((one for one in INSTRUCTION_SETS if one.features <= features), None)


def limited_features(features: frozenset[str], limit: InstructionSet) -> frozenset[str]:
    """Those of a processor's features that are left if it is limited to an instruction set."""
    return frozenset(name for name in features if name in limit.features or not name.startswith(EXTENSIONS))
