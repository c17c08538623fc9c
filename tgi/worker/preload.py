"""What the fork server of workers imports. Imports no torch itself: the supervisor uses it, too."""

import ctypes
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from tgi.microkernel.settings.table import Settings
from tgi.worker.host_cpu import configure_thread_waiting, limit_instruction_set, numa_nodes, request_reproducible_mkl

# What is imported while torch's libraries load: of what the worker and torch import, the slowest that need no torch.
IMPORTED_DURING_LOAD = (
    "numpy",
    "asyncio",
    "llguidance",
    "multiprocessing.shared_memory",
    "tokenizers",
    "torchgen.model",
    "tqdm",
    "unittest.mock",
)


class Preload(NamedTuple):
    """Imports for workers with these settings, which torch's libraries read when they are loaded."""

    cpu: str | None

    @classmethod
    def of(cls, settings: Settings) -> "Preload | None":
        """None for workers that do without these libraries, and for those that take a NUMA node for themselves before
        they load them."""
        several = settings.replicas > 1 or settings.replica_index > 0 or (settings.num_shard or 1) > 1
        has_torch = settings.worker == "torch" and settings.ray is None
        return None if not has_torch or (several and len(numa_nodes()) > 1) else cls(settings.cpu)

    def run(self) -> None:
        """Imports the worker with torch in a process that has only one thread, and still has then. Raises UserError
        for a processor that lacks the instruction set."""
        configure_thread_waiting()
        limit_instruction_set(self.cpu)
        request_reproducible_mkl()
        libraries = Thread(target=_load_torch_libraries)
        libraries.start()
        for module in IMPORTED_DURING_LOAD:
            with suppress(ImportError):  # the import where it is needed raises again
                import_module(module)
        libraries.join()  # the fork server has one thread again
        set_number = import_module("torch").set_num_threads
        usual = import_module("torch").get_num_threads()
        set_number(1)  # a parallel operation would start OpenMP's threads, for which it would wait in forked processes
        for module in ("tgi.worker.main", "tgi.worker.engine.startup"):
            import_module(module)
        set_number(usual)


def _load_torch_libraries() -> None:
    """Loads the libraries of torch without its modules: 0.16 s during which other modules are imported."""
    with suppress(ImportError, OSError):  # the import of torch tells what is wrong
        found = find_spec("torch")
        if found is not None and found.origin is not None:
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
