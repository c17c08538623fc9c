"""A model that computes slowly: the scripted worker takes half a second for a step, and 8 ms more for each token."""

import os
import sys

STEP_SECONDS, TOKEN_SECONDS = 0.5, 0.008


def _in_forked_process() -> None:
    """A fork server has imported the worker when it forks its process, with this function in it."""
    if "tgi.worker.main" not in sys.modules or installed:
        return
    installed.append("worker")
    import time
    from typing import Any

    from tgi.microkernel.messages.codec import unpack_int32
    from tgi.worker.fake_worker.fake_worker import FakeEngine

    launch = FakeEngine.launch

    def launch_slowly(self: FakeEngine, step: Any) -> Any:
        time.sleep(STEP_SECONDS + TOKEN_SECONDS * sum(unpack_int32(step.counts)))
        return launch(self, step)

    FakeEngine.launch = launch_slowly  # type: ignore[method-assign]


installed: list[str] = []
os.register_at_fork(after_in_child=_in_forked_process)
