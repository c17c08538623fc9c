"""Holds the peers of a comparison to the instruction set of `--cpu` (TGI_CPU), as this server holds itself."""

import os
import shutil
from pathlib import Path

from scripts.benchmarks.servers import Failed
from scripts.benchmarks.workloads import PEERS_DIRECTORY, run, whole
from tgi.worker.host_cpu import CPU_VARIABLE, CPUINFO
from tgi.worker.instruction_sets import BY_NAME

HIDING = Path(__file__).parent / "hide_avx512.c"
# GGML's options at build for each instruction set; "": all that the processor has.
_AVX2 = ("NATIVE=OFF", "AVX2=ON", "FMA=ON", "F16C=ON")
_AVX512 = (*_AVX2, "AVX512=ON")
GGML = {
    "": ("NATIVE=ON",),
    "amx": ("NATIVE=ON",),
    "avx512_bf16": (*_AVX512, "AVX512_VBMI=ON", "AVX512_VNNI=ON", "AVX512_BF16=ON"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}


def limit() -> str:
    """The instruction set that servers are held to; "": none. Raises Failed for one that peers cannot be held to."""
    name = os.environ.get(CPU_VARIABLE, "")
    if name not in GGML:
        raise Failed(f"peers cannot be held to {name}; known are {', '.join(filter(None, GGML))}")
    return name


def environ() -> dict[str, str]:
    """The variables that hold a peer to the limit. Raises Failed.

    OpenVINO needs oneDNN's variable and its own with the same value. Libraries that ask CPUID alone ignore all of them
    (MLAS, with which OpenVINO computes products in float32), so AVX-512 is hidden from CPUID too where that is possible
    (`hides_avx512`)."""
    if not limit():
        return {}
    found = dict(BY_NAME[limit()].environment)
    found["OV_CPU_MAX_ISA"] = found["ONEDNN_MAX_CPU_ISA"]
    return found | ({"LD_PRELOAD": str(_hiding())} if hides_avx512() else {})


def hides_avx512() -> bool:
    """Whether AVX-512 is hidden from peers: on a processor that has it and can fault at CPUID, under the limit AVX2."""
    return limit() == "avx2" and {"avx512f", "cpuid_fault"} <= set(CPUINFO.read_text().split())


def in_words() -> str:
    """How peers that are not built for an instruction set are held."""
    if not limit():
        return ""
    return f"{limit()} by {'CPUID' if hides_avx512() else 'variables'}"


def _hiding() -> Path:
    """The library that hides AVX-512, compiled if necessary. Raises Failed."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Failed("there is no C compiler, which is needed to hide AVX-512 from peers")
    library = PEERS_DIRECTORY / "hide_avx512.so"
    if library.exists() and library.stat().st_mtime < HIDING.stat().st_mtime:
        library.unlink()
    return whole(library, lambda path: run(compiler, "-O2", "-shared", "-fPIC", HIDING, "-o", path))
