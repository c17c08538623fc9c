"""What `tgi doctor` tells: what this machine can do, and what to change."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import NamedTuple

from tgi import __version__
from tgi.hub.gguf_import import default_cache
from tgi.microkernel.errors import UserError
from tgi.microkernel.host import rundir
from tgi.microkernel.host.control_groups import available_memory, usable_cpus
from tgi.server import ABSENT, nvidia_smi
from tgi.worker.cpu_kernels.build import (
    PACKAGED,
    KernelsUnavailable,
    cache_directory,
    compiler_command,
    library_name,
    packed_weights_directory,
    require_instruction_set,
)
from tgi.worker.host_cpu import has_arithmetic, usable_cores
from tgi.worker.instruction_sets import ELEMENTS

# Below these the advice is given.
ENOUGH_MEMORY, ENOUGH_DISK = 2 << 30, 2 << 30  # bytes
ENOUGH_FILES = 4096  # a connection takes one
PACKAGES = ("torch", "transformers", "tokenizers", "pyzmq", "falcon", "uvicorn")
TORCH_SECONDS = 60


class Finding(NamedTuple):
    """A line of the report."""

    subject: str
    found: str
    advice: str = ""  # what to change; "": nothing
    prevents: bool = False  # a server cannot start so


def examine(hostname: str, port: int) -> Iterator[Finding]:
    """Looks at this machine, for a server on this port."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("tgi", f"{__version__} on Python {platform.python_version()}, {system}")
    yield _packages()
    yield _bytecode()
    yield _processor()
    yield _kernels()
    yield _packed_weights()
    yield _memory()
    yield _gpu()
    yield _disk()
    yield _files()
    yield _run_directory(port)
    yield _port(hostname, port)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _packages() -> Finding:
    found = {name: metadata.version(name) for name in PACKAGES if find_spec(name.replace("pyzmq", "zmq"))}
    missing = [name for name in PACKAGES if name not in found]
    advice = ""
    if missing:
        advice = f"{', '.join(missing)} missing: only roles that do without can run here (docs/installation.md)."
    return Finding("packages", ", ".join(f"{name} {version}" for name, version in found.items()), advice)


def _bytecode() -> Finding:
    """Whether processes find torch as Python has compiled it: to compile it takes longer than to import it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Finding("bytecode", "torch is missing")
    stored = Path(cache_from_source(spec.origin))
    if stored.exists():
        return Finding("bytecode", "stored")
    directory = next(path for path in stored.parents if path.exists())
    if sys.dont_write_bytecode:
        reason = "PYTHONDONTWRITEBYTECODE is set"
    elif not os.access(directory, os.W_OK):
        reason = f"{directory} cannot be written"
    else:
        return Finding("bytecode", "stored by the first start")
    packages = Path(spec.origin).parents[1]
    return Finding(
        "bytecode",
        "missing",
        f"{reason}, so each start compiles torch's modules. Run `python -m compileall -q {packages}` once.",
    )


def _processor() -> Finding:
    cores = f"{min(usable_cores(), usable_cpus()):g} processors"
    try:
        chosen = require_instruction_set()
    except KernelsUnavailable as reason:
        return Finding("processor", cores, f"torch's kernels compute on it, which are slower: {reason}.")
    native = [name for name in ("bfloat16", "float16") if has_arithmetic(name)]
    return Finding("processor", f"{cores}, {chosen.name}; computes in {', '.join([*native, 'float32'])}")


def _kernels() -> Finding:
    """Whether the CPU kernels are there, or can be compiled."""
    try:
        chosen = require_instruction_set()
    except KernelsUnavailable:
        return Finding("CPU kernels", "none for this processor")
    if any((PACKAGED / library_name(chosen, element)).exists() for element in ELEMENTS):
        return Finding("CPU kernels", "in the package")
    try:
        compiler = compiler_command()
    except KernelsUnavailable as reason:
        return Finding("CPU kernels", "missing", f"{reason}. Without them torch computes, slower.")
    if not shutil.which(compiler[0]):
        return Finding("CPU kernels", "missing", f"{compiler[0]}, which CXX names, is not installed.")
    made = sorted(cache_directory().glob(f"kernels-{chosen.name}-*.so"))
    when = f"{len(made)} in {cache_directory()}" if made else "compiled at the first start, for about a minute"
    return Finding("CPU kernels", f"{when}; compiler {compiler[0]}")


def _packed_weights() -> Finding:
    """What is kept for the next start."""
    try:
        directory = packed_weights_directory()
        sizes = [path.stat().st_size for path in directory.glob("*.weights")]
    except (KernelsUnavailable, OSError) as reason:
        return Finding("packed weights", f"none: {reason}")
    return Finding("packed weights", f"{len(sizes)} of {_gb(sum(sizes))} in {directory}" if sizes else "none yet")


def _memory() -> Finding:
    free = available_memory()
    advice = "Close other programs, raise the limit of the container, or serve a smaller model." * (
        free < ENOUGH_MEMORY
    )
    return Finding("memory", f"{_gb(free)} available", advice)


def _gpu() -> Finding:
    names = nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if names == ABSENT:
        return Finding("GPU", "no NVIDIA driver: the CPU computes")
    listed = "; ".join(line.strip() for line in names.strip().splitlines())
    if find_spec("torch") is None:
        return Finding("GPU", listed, "torch is missing: install it to use the GPU.")
    code = "import torch; print(torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_SECONDS)
        cuda, count = asked.stdout.split()
    except (subprocess.TimeoutExpired, ValueError):
        return Finding("GPU", listed, "torch cannot be imported: run `python -c 'import torch'` to see why.")
    if cuda == "None":
        return Finding("GPU", listed, "This torch is a CPU build: install one for CUDA (docs/installation.md).")
    if count == "0":
        return Finding("GPU", listed, f"torch for CUDA {cuda} sees no GPU: the driver may be older than it needs.")
    return Finding("GPU", f"{listed}; torch for CUDA {cuda} uses {count}")


def _disk() -> Finding:
    directory = default_cache()
    present = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(present).free
    advice = "Free some, or name another place for models with TGI_CACHE."
    return Finding("models", f"{directory}, {_gb(free)} free", advice if free < ENOUGH_DISK else "")


def _files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "no limit")
    advice = "Each connection takes one: raise it with `ulimit -Hn`, or LimitNOFILE in systemd."
    return Finding("open files", f"at most {hard}", advice if hard < ENOUGH_FILES else "")


def _run_directory(port: int) -> Finding:
    directory = rundir.default_run_dir(port)
    try:
        if directory.exists():
            rundir.check_run_dir(directory)
    except (UserError, OSError) as error:
        return Finding("run directory", str(directory), str(error), prevents=True)
    return Finding("run directory", str(directory))


def _port(hostname: str, port: int) -> Finding:
    try:
        with socket.create_server((hostname, port)):
            return Finding("port", f"{port} is free")
    except OSError as error:
        reason = f"{port}: {error.strerror}"
        return Finding("port", reason, "Choose another with --port; `tgi ps` lists your servers.", prevents=True)


def lines(findings: list[Finding]) -> Iterator[str]:
    """The report: a line for each finding, and below it the advice."""
    width = max(len(finding.subject) for finding in findings)
    for subject, found, advice, _ in findings:
        yield f"{subject.ljust(width)}  {found}"
        if advice:
            yield f"{'':{width}}  -> {advice}"
