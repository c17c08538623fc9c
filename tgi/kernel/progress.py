"""What the terminal shows while a server starts or something is fetched: one bar, or without a terminal lines of text,
then one line with the URL."""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable

from tgi.kernel import rundir, summary
from tgi.kernel.settings import Settings

log = logging.getLogger(__name__)

BAR_CELLS = 24
# Without a terminal a stage that goes on has a line this often.
LINE_SECONDS = 10.0
# From this time on a stage's rate says how long it will go on.
RATE_SECONDS = 1.0


class Progress:
    """Shows stages on standard error and, once every process is ready, the URL on standard output, and what is served.

    `title` is what starts: a role, or "tgi" for all of them.
    """

    def __init__(self, settings: Settings | None, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._title = title
        self._clock = clock
        self._began = clock()
        self._shown = ""
        self._stage = ""
        self._stage_began = self._line_at = 0.0  # by the clock, the stage's begin and its latest line
        self._first = 0.0  # percent at its begin: a download that goes on has some
        self._done = False
        self._logs = settings is not None and settings.json_output  # whoever reads JSON reads nothing else

    def stage(self, stage: str, percent: float, size: int = 0) -> None:
        """Shows how far a stage is. Percent is 0 to 100; of a stage that moves `size` bytes MB and time are shown."""
        now = self._clock()
        begins = stage != self._stage
        if begins:
            self._stage, self._stage_began, self._first = stage, now, percent
        text = f"{stage}, {self._moved(percent, size, now - self._stage_began)}" if size else stage
        if sys.stderr.isatty() and not self._logs:
            full = int(BAR_CELLS * percent / 100)
            bar = "━" * full + "╌" * (BAR_CELLS - full)
            line = f"{self._title} {bar} {int(percent):3d} % {text}"[: shutil.get_terminal_size().columns - 1]
            # The cursor returns to the line's start, so that a log line takes the bar's place.
            self._show(f"\x1b[K{line}\r")
        elif begins or (size and percent >= 100) or (percent > self._first and now - self._line_at >= LINE_SECONDS):
            self._line_at = now
            self._show(f"{self._title}: {text if begins or size else f'{stage}, {int(percent)} %'}\n")

    def _moved(self, percent: float, size: int, seconds: float) -> str:
        """How much of a stage's bytes there is, and the time left at the rate so far."""
        if percent >= 100:
            return f"{megabytes(size)} in {duration(seconds)}"
        if not percent:
            return megabytes(size)
        gained = percent - self._first
        left = f", {duration(seconds * (100 - percent) / gained)} left" if gained and seconds > RATE_SECONDS else ""
        return f"{megabytes(size * percent / 100)} of {megabytes(size)}{left}"

    def _show(self, shown: str) -> None:
        if shown == self._shown:
            return
        self._shown = shown
        if self._logs:
            log.info("%s", shown.strip())
        else:
            sys.stderr.write(shown)
            sys.stderr.flush()

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
        ready = f"Ready in {self._clock() - self._began:.1f} s: {what}"
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


def megabytes(size: float) -> str:
    """A number of bytes in MB (millions), whole ones from 10 on."""
    return f"{size / 1e6:.{0 if size >= 10e6 else 1}f} MB"


def duration(seconds: float) -> str:
    """12 s, 2 min 5 s, 1 h 3 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _url(settings: Settings) -> str:
    host = settings.hostname.replace("0.0.0.0", "127.0.0.1")
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
