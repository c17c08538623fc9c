"""Parts of torch that are loaded when something uses them, each in a process without torch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BEGIN = """
import sys
from tgi.worker import deferred_imports
deferred_imports.defer_imports()
import torch
def waiting():
    return [name for name in deferred_imports.DEFERRED if type(sys.modules.get(name)).__name__ == "_DeferredModule"]
assert waiting() == list(deferred_imports.DEFERRED), waiting()
"""


def run(code: str) -> None:
    """Runs code in a process in which torch is imported and all that can be deferred is."""
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_deferred_module_is_loaded_when_it_is_used() -> None:
    run("""
from torch.distributions import Categorical
assert Categorical(torch.tensor([0.0, 1.0])).sample() == 1
import torch.utils.data.distributed
assert issubclass(torch.utils.data.TensorDataset, torch.utils.data.Dataset)
assert not {"torch.distributions", "torch.utils.data"} & set(waiting())
try:
    torch.masked.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("no error")
""")


def test_all_are_loaded_on_demand() -> None:
    """What needs them does not always use them by name."""
    run("""
deferred_imports.load_deferred()
assert waiting() == []
torch.Generator().manual_seed(1)
empty = torch.nn.Linear(3, 5, device="meta")
assert torch.special.erfcx(empty(torch.empty(2, 3, device="meta"))).shape == (2, 5)
""")
