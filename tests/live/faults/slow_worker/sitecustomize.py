"""A model that computes slowly: the scripted worker takes half a second for a step, and 8 ms more for each token."""

import sys

STEP_SECONDS, TOKEN_SECONDS = 0.5, 0.008

if sys.orig_argv[-2:-1] == ["worker"]:
    import time
    from typing import Any

    from tgi.microkernel.messages.codec import unpack_int32
    from tgi.worker.fake_worker.fake_worker import FakeEngine

    launch = FakeEngine.launch

    def launch_slowly(self: FakeEngine, step: Any) -> Any:
        time.sleep(STEP_SECONDS + TOKEN_SECONDS * sum(unpack_int32(step.counts)))
        return launch(self, step)

    FakeEngine.launch = launch_slowly  # type: ignore[method-assign]
