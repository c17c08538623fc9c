"""Counts the operations that a GPU would execute, on torch's device "meta", which computes nothing.

Operations that only look at memory in another way, or ask for some, cost a GPU nothing and are left out.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

# One launch on CUDA, several operations elsewhere.
FUSED = {F.rms_norm: "rms_norm", torch.rms_norm: "rms_norm"}
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view", "alias", "lift_fresh"}


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FUSED:
            return func(*args, **(kwargs or {}))
        self._found[FUSED[func]] += 1
        return torch.empty_like(args[0])


def counted(work: Callable[[], object]) -> Counter[str]:
    """The operations of some work on "meta": torch's names of operations, and our names of kernels."""
    found: Counter[str] = Counter()

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        found[kernel.fn.__name__] += 1

    with pytest.MonkeyPatch.context() as patch, _Functions(found), _Operations(found):
        patch.setattr(InterpretedFunction, "run", launch)
        work()
    return found
