"""What the terminal shows while a server starts: one bar (or one line per stage), then one line with the URL."""

import logging
import sys
import time
from collections.abc import Iterable

from tgi.kernel import rundir, summary
from tgi.kernel.settings import Settings

log = logging.getLogger(__name__)

BAR_CELLS = 24


class Progress:
    """Shows stages on standard error and, once every process is ready, the URL on standard output, and what is served.

    `title` is what starts: a role, or "tgi" for all of them.
    """

    def __init__(self, settings: Settings | None, title: str) -> None:
        self.settings = settings
        self._title = title
        self._began = time.monotonic()
        self._shown = ""
        self._done = False
        self._logs = settings is not None and settings.json_output  # whoever reads JSON reads nothing else

    def stage(self, stage: str, percent: int) -> None:
        """Shows how far a stage is. Percent is 0 to 100."""
        if self._logs:
            shown = f"{self._title}: {stage}"
            if shown != self._shown:
                log.info("%s", shown)
            self._shown = shown
            return
        if sys.stderr.isatty():
            full = BAR_CELLS * percent // 100
            bar = "━" * full + "╌" * (BAR_CELLS - full)
            # The cursor returns to the line's start, so that a log line takes the bar's place.
            shown = f"\x1b[K{self._title} {bar} {percent:3d} % {stage}\r"
        else:
            shown = f"{self._title}: {stage}\n"
        if shown != self._shown:
            sys.stderr.write(shown)
            sys.stderr.flush()
            self._shown = shown

    def tick(self, expected: Iterable[str]) -> None:
        """Looks at the states of the processes that are to be; called by the supervisor many times a second.

        Who serves the port tells how all floors fare, the others how they fare themselves.
        """
        if self._done or self.settings is None:
            return
        own = set(expected)
        serves = "api-0" in own
        states = [state for state in rundir.read_states(self.settings.run_dir) if state.state != "draining"]
        states = [state for state in states if serves or state.name in own]
        waiting = [state for state in states if state.state != "ready"]
        if waiting or not own <= {state.name for state in states}:
            lowest = next((state for state in reversed(waiting) if state.stage), None)  # what the others wait for
            if lowest:
                floor = "" if lowest.role == self._title else f"{lowest.role}: "
                self.stage(floor + lowest.stage, lowest.percent)
            return
        self._done = True
        self._finish(self.settings, states, _url(self.settings) if serves else "")

    def _finish(self, settings: Settings, states: Iterable[rundir.ProcessState], url: str) -> None:
        """Says that it is ready, and what is served: to people on a terminal, elsewhere to programs."""
        what = f"{settings.model_id} on {url}" if url else self._title
        ready = f"Ready in {time.monotonic() - self._began:.1f} s: {what}"
        facts = {name: value for state in states for name, value in state.facts.items()}
        watched = sys.stderr.isatty() and not self._logs
        if watched:
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()
        else:
            log.info("%s", ready, extra=summary.fields(settings, facts, url))
        if not self._logs:
            print(ready, flush=True)
        if watched:
            sys.stderr.writelines(f"{line}\n" for line in summary.lines(settings, facts, url))


def _url(settings: Settings) -> str:
    host = settings.hostname.replace("0.0.0.0", "127.0.0.1")
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
