"""Puts the compiled CPU kernels into wheels: a library for each instruction set of this kind of machine and for each
element type. Everything else about the build is in pyproject.toml.

The environment variable TGI_WHEEL_KERNELS limits the libraries: SET or SET:ELEMENT with commas between, or "none" for a
wheel whose kernels are compiled at the first start. An editable installation compiles nothing.
"""

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from tgi.worker.cpu_kernels.build import PACKAGED, SOURCES, KernelsUnavailable, build_library, library_name
from tgi.worker.host_cpu import usable_cores
from tgi.worker.instruction_sets import BY_NAME, ELEMENTS, INSTRUCTION_SETS, InstructionSet

VARIABLE = "TGI_WHEEL_KERNELS"
MACHINES = {"arm64": "aarch64"}  # macOS's name -> that of the table


def wanted_libraries() -> list[tuple[InstructionSet, str]]:
    """The instruction set and element type of each library. Ends with a message if the variable has an unknown name."""
    machine = MACHINES.get(platform.machine(), platform.machine())
    libraries = {f"{one.name}:{element}": (one, element) for one in INSTRUCTION_SETS for element in ELEMENTS}
    named = os.environ.get(VARIABLE, "all")
    if named == "none":
        return []
    if named == "all":
        return [library for library in libraries.values() if library[0].machine == machine]
    wanted = []
    for item in (item.strip() for item in named.split(",")):
        found = [library for name, library in libraries.items() if item in (name, library[0].name)]
        if not found:
            sys.exit(f"{VARIABLE} is {named!r}: {item!r} is not one of all, none, {', '.join(BY_NAME)}.")
        wanted += found
    return wanted


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles the kernels or takes them from this user's cache."""

    def run(self) -> None:
        """Ends with a message if a library cannot be compiled."""
        super().run()
        if self.editable_mode:
            return
        libraries = Path(self.build_lib, "tgi", "worker", "cpu_kernels") / PACKAGED.relative_to(SOURCES)
        shutil.rmtree(libraries, ignore_errors=True)  # of an earlier build
        libraries.mkdir(parents=True)

        def make(wanted: tuple[InstructionSet, str]) -> None:
            chosen, element = wanted
            made = build_library(element, instruction_set=chosen, progress=show, jobs=1)
            shutil.copy(made, libraries / library_name(chosen, element))

        try:
            with ThreadPoolExecutor(usable_cores()) as pool:
                list(pool.map(make, wanted_libraries()))
        except KernelsUnavailable as reason:
            sys.exit(f"The CPU kernels cannot be compiled: {reason}. {VARIABLE}=none builds without them.")


class WithLibraries(Distribution):
    """Without libraries the wheel is for every platform."""

    def has_ext_modules(self) -> bool:
        """Whether the package has compiled parts."""
        return bool(wanted_libraries())


class WheelForEveryPython(bdist_wheel):
    """Any Python 3 can load the libraries, since ctypes does."""

    def get_tag(self) -> tuple[str, str, str]:
        """Language, ABI and platform, for the file's name."""
        return "py3", "none", super().get_tag()[2]


def show(stage: str, percent: int) -> None:
    """Prints each stage once."""
    if not percent:
        print(stage, flush=True)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForEveryPython})
