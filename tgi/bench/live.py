"""What the terminal shows while a level is measured: a progress bar, or nothing where standard error is no terminal."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class View:
    """A line per level on standard error."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._began = 0.0
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description:>14}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> "View":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, level: str, requests: int) -> None:
        """A level of this many requests begins."""
        self._began = time.perf_counter()
        if self._progress is not None:
            self._task = self._progress.add_task(level, total=requests, rate="")

    def update(self, ended: int, failed: int, events: int) -> None:
        """Numbers of the requests of the level that have ended or failed, and of the events that were received."""
        if self._progress is not None:
            rate = f"{events / max(time.perf_counter() - self._began, 1e-9):,.0f} events/s"
            text = f"{rate}, {failed} failed" if failed else rate
            self._progress.update(self._task, completed=ended, rate=text)

    def end(self, figures: dict[str, Any]) -> None:
        """The level has ended with these figures."""
        if self._progress is not None:
            text = f"{figures['tokens_per_s']:,.0f} tokens/s"
            self._progress.update(self._task, completed=figures["requests"], rate=text)
