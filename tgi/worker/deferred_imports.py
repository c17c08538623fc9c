"""Defers parts of torch that serving does not use until something does: `import torch` imports almost all of torch,
which takes memory and time in each worker."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from threading import RLock
from types import ModuleType
from typing import Any

# Modules that `import torch` of this version imports without using them. They take 29 MB, of which the first takes 18:
# it describes operations on tensors without data, for compilers.
TORCH_VERSION = "2.13"
DEFERRED = (
    "torch._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
    "unittest.mock",
)
_lock = RLock()  # held while the code of a deferred module runs, which may use the module itself


def defer_imports() -> None:
    """Makes further imports of DEFERRED modules return at once; their code runs at the first use of an attribute. No
    effect with another version of torch. Call before torch is imported."""
    if version("torch").startswith(f"{TORCH_VERSION}."):
        sys.meta_path.insert(0, _Finder())


def load_deferred() -> None:
    """Runs the code of modules that are deferred now. It also registers functions with torch, which new generators of
    random numbers and tensors of the device "meta" need."""
    for name in DEFERRED:
        module = sys.modules.get(name)
        if isinstance(module, _DeferredModule):
            module.load()


class _Finder(MetaPathFinder):
    """Finds DEFERRED modules, with a loader that defers them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    """Turns a new module into a _DeferredModule instead of running its code."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader  # of the module's code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _DeferredModule


class _DeferredModule(ModuleType):
    """A module without the names that its code defines. Unlike that of importlib's LazyLoader, its code does not run
    when a second import statement or `inspect` asks for its file."""

    _loading = False

    def __getattr__(self, name: str) -> Any:
        self.load()
        return ModuleType.__getattribute__(self, name)  # `super` requires the class that `load` has replaced

    def load(self) -> None:
        """Runs the module's code, once."""
        with _lock:
            if isinstance(self, _DeferredModule) and not self._loading:
                self._loading = True
                assert self.__spec__ is not None
                assert isinstance(self.__spec__.loader, _DeferringLoader)
                self.__spec__.loader.loader.exec_module(self)
                del self._loading
                self.__class__ = ModuleType  # type: ignore[assignment]
