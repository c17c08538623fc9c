"""The computation of an image by a vision tower in slices, between which the worker does other work."""

import threading
from collections.abc import Callable

from tgi.worker.vision.features import ImageFeatures


class Abandoned(Exception):
    """Ends the thread of a run whose result is not wanted."""


class TowerRun:
    """Runs `compute`, the code of a tower, which calls `pause` between its slices.

    It has a thread of its own, since that code does not know of slices. Either that thread runs or the one that calls
    `advance`, never both: a run is a coroutine, and computes what one call of `compute` would.
    """

    def __init__(self, compute: Callable[[], ImageFeatures]) -> None:
        self._compute = compute
        self._slices = 0  # that it may still compute before it pauses
        self._abandoned = False
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._features: ImageFeatures | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def advance(self, slices: int) -> ImageFeatures | None:
        """Computes the next `slices` slices. Returns the result if it is complete. Raises what `compute` raises."""
        if self._features is not None:
            return self._features
        self._slices = slices
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vision tower", daemon=True)
            self._thread.start()
        else:
            self._resumed.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error
        return self._features

    def pause(self) -> None:
        """Called by the computation after each slice."""
        self._slices -= 1
        if self._slices <= 0:
            self._paused.release()
            self._resumed.acquire()
            if self._abandoned:
                raise Abandoned

    def abandon(self) -> None:
        """Ends the thread, and gives its memory back."""
        self._abandoned = True
        self._resumed.release()

    def _run(self) -> None:
        try:
            self._features = self._compute()
        except Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._paused.release()
