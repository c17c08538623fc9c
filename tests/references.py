"""What transformers computes for the tiny models, computed once and kept in the temporary directory, as the models are.

    from tests.references import reference
    logits = reference(compute, directory, ids)  # compute(directory, ids)

It follows from the files of the model, the arguments, the source of `compute` and the versions of transformers and
torch, and these are its key: after a change of any of them it is computed again.
"""

import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.models import store

Result = TypeVar("Result")
LIBRARIES = ("torch", "transformers")


@cache
def versions() -> list[tuple[str, str]]:
    """Of LIBRARIES. Each is read from a file of thousands of lines."""
    return [(name, version(name)) for name in LIBRARIES]


def reference(compute: Callable[..., Result], directory: Path, *arguments: Any) -> Result:
    """compute(directory, *arguments), or what an earlier call returned: tensors and numbers, in lists, tuples and
    dictionaries. `compute` calls no code of the tests; the arguments consist of the same types, and of strings."""
    key = hashlib.sha256(inspect.getsource(compute).encode())
    _add(key, versions())
    _add(key, arguments)
    for path in sorted(one for one in directory.iterdir() if one.is_file()):
        _add(key, path.name)
        key.update(path.read_bytes())
    kept = store() / "references"
    kept.mkdir(exist_ok=True)
    path = kept / key.hexdigest()
    if not path.exists():
        found = compute(directory, *arguments)
        descriptor, building = tempfile.mkstemp(dir=kept)
        os.close(descriptor)
        torch.save(found, building)
        Path(building).rename(path)  # other processes never see an incomplete one
    result: Result = torch.load(path, weights_only=True)
    return result


def _add(key: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        key.update(repr((value.dtype, value.shape)).encode())
        key.update(value.numpy().tobytes())
    elif isinstance(value, dict):
        _add(key, list(value.items()))
    elif isinstance(value, list | tuple) and any(isinstance(one, Tensor | dict | list | tuple) for one in value):
        key.update(repr((type(value), len(value))).encode())
        for one in value:
            _add(key, one)
    else:
        key.update(repr(value).encode() + b"\0")
