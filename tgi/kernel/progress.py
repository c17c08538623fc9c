"""What the terminal shows while a server starts: one bar (or one line per stage), then one line with the URL."""

import sys
import time
from collections.abc import Iterable

from tgi.kernel import rundir
from tgi.kernel.settings import Settings

BAR_CELLS = 24


class Progress:
    """Shows stages on standard error and, once every process is ready, the URL on standard output."""

    def __init__(self, settings: Settings | None, title: str) -> None:
        self.settings = settings
        self._title = title
        self._began = time.monotonic()
        self._shown = ""
        self._done = False

    def stage(self, stage: str, percent: int) -> None:
        """Shows how far a stage is. Percent is 0 to 100."""
        if sys.stderr.isatty():
            full = BAR_CELLS * percent // 100
            bar = "━" * full + "╌" * (BAR_CELLS - full)
            sys.stderr.write(f"\r\x1b[K{self._title} {bar} {percent:3d} % {stage}")
            sys.stderr.flush()
        elif stage != self._shown:
            print(f"{self._title}: {stage}", file=sys.stderr, flush=True)
        self._shown = stage

    def tick(self, expected: Iterable[str]) -> None:
        """Looks at the states of the processes that are to be; called by the supervisor many times a second."""
        if self._done or self.settings is None:
            return
        states = [state for state in rundir.read_states(self.settings.run_dir) if state.state != "draining"]
        waiting = [state for state in states if state.state != "ready"]
        if waiting or not set(expected) <= {state.name for state in states}:
            slowest = next((state for state in waiting if state.stage), None)
            if slowest:
                self.stage(f"{slowest.role}: {slowest.stage}", slowest.percent)
            return
        self._done = True
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        if any(state.role == "api" for state in states):
            host = self.settings.hostname.replace("0.0.0.0", "127.0.0.1")
            url = f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"
            took = time.monotonic() - self._began
            print(f"Ready in {took:.1f} s: {self.settings.model_id} on {url}", flush=True)
