"""Progress of a start or a download, and the summary of a ready server.

On a terminal progress is a bar, elsewhere lines of text. The summary says which model is served, with which kernels and
limits, and how to send a request. Facts come from the state files: the worker publishes WorkerFacts, the tokenizer
whether the model has a chat template. Imported by scripts/install.py before any package is installed.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from tgi.microkernel.host import rundir
from tgi.microkernel.host.terminal import writable
from tgi.microkernel.settings.table import Settings

if TYPE_CHECKING:  # scripts/install.py imports this module before any package is installed
    from tgi.microkernel.messages.protocol import DeploymentLimits

log = logging.getLogger(__name__)

BAR_CELLS = 24

# Without a terminal: interval of the lines of one stage.
LINE_SECONDS = 10.0

# After this time the rate of a stage is used to predict the time left.
RATE_SECONDS = 1.0

CHAT_TEMPLATE, TASK = "chat_template", "task"  # names of the tokenizer's facts
TOKENIZERS = "tokenizers"  # name of the scheduler's fact: how many are connected

EXAMPLE_QUESTION = "Name three primary colors."  # the demo model answers it with any seed


class Progress:
    """Shows stages on standard error and, when all processes are ready, the URL on standard output and the summary.

    `title` names what starts: a role, or "tgi" for all of them.
    """

    def __init__(self, settings: Settings | None, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._title = title
        self._clock = clock
        self._began = clock()
        self._shown = ""
        self._stage = ""
        self._stage_began = self._line_at = 0.0  # by the clock: start and latest line of the stage
        self._first = 0.0  # percent at its start: not 0 for a resumed download
        self._done = False
        self._logs = settings is not None and settings.json_output  # with JSON logs all output is JSON

    def show_stage(self, stage: str, percent: float, size: int = 0) -> None:
        """Shows the progress of a stage, `percent` from 0 to 100. With its total `size` in bytes shows MB and time."""
        now = self._clock()
        begins = stage != self._stage
        if begins:
            self._stage, self._stage_began, self._first = stage, now, percent
        text = f"{stage}, {self._bytes_and_time(percent, size, now - self._stage_began)}" if size else stage
        if sys.stderr.isatty() and not self._logs:
            full = int(BAR_CELLS * percent / 100)
            cells = writable(sys.stderr, "━╌", "#-")
            bar = cells[0] * full + cells[1] * (BAR_CELLS - full)
            line = f"{self._title} {bar} {int(percent):3d} % {text}"[: shutil.get_terminal_size().columns - 1]
            # The cursor returns to the start of the line, so that a log line overwrites the bar.
            self._show(f"\x1b[K{line}\r")
        elif begins or (size and percent >= 100) or (percent > self._first and now - self._line_at >= LINE_SECONDS):
            self._line_at = now
            self._show(f"{self._title}: {text if begins or size else f'{stage}, {int(percent)} %'}\n")

    def _bytes_and_time(self, percent: float, size: int, seconds: float) -> str:
        """The bytes of a stage so far, and the time left at the current rate."""
        if percent >= 100:
            return f"{format_megabytes(size)} in {format_duration(seconds)}"
        if not percent:
            return format_megabytes(size)
        gained = percent - self._first
        left = (
            f", {format_duration(seconds * (100 - percent) / gained)} left" if gained and seconds > RATE_SECONDS else ""
        )
        return f"{format_megabytes(size * percent / 100)} of {format_megabytes(size)}{left}"

    def _show(self, shown: str) -> None:
        if shown == self._shown:
            return
        self._shown = shown
        if self._logs:
            log.info("%s", shown.strip())
        else:
            sys.stderr.write(shown)
            sys.stderr.flush()

    def show_process_states(self, expected: Iterable[str], failed: Sequence[str] = ()) -> None:
        """Shows the stage of the processes that start; called periodically by the supervisor.

        `expected` are the names of its own processes. A supervisor of the api waits for the processes of all roles,
        others for their own. `failed`: those of several models that could not be loaded.
        """
        if self._done or self.settings is None:
            return
        own = set(expected)
        serves_api = any(name.startswith("api-") for name in own)
        states = [state for state in rundir.read_states(self.settings.run_dir) if state.state != "draining"]
        states = [state for state in states if serves_api or state.name in own]
        waiting = [state for state in states if state.state != "ready"]
        if waiting or not own <= {state.name for state in states}:
            # The last by name (the worker before others), since the others wait for it.
            last = next((state for state in reversed(waiting) if state.stage), None)
            if last:
                prefix = "" if last.role == self._title else f"{last.role}: "
                self.show_stage(prefix + last.stage, last.percent)
            return
        self._done = True
        self._finish(self.settings, states, server_url(self.settings) if serves_api else "", failed)

    def _finish(
        self, settings: Settings, states: Iterable[rundir.ProcessState], url: str, failed: Sequence[str]
    ) -> None:
        """Prints that the server is ready, with the summary as text on a terminal and as log fields elsewhere."""
        what = f"{settings.model_id} on {url}" if url else self._title
        ready = f"Ready in {self._clock() - self._began:.1f} s: {what}"
        if failed:
            ready += f", but without {', '.join(failed)}: a request tries again to load it, the reason is above"
        own = [] if settings.models else states  # those of several models differ
        facts = {name: value for state in own for name, value in state.facts.items()}
        watched = sys.stderr.isatty() and not self._logs
        if watched:
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()
        else:
            log.info("%s", ready, extra=summary_fields(settings, facts, url))
        if watched or not (self._logs or (log.isEnabledFor(logging.INFO) and _same_file(sys.stdout, sys.stderr))):
            print(ready, flush=True)
        if watched:
            sys.stderr.writelines(f"{line}\n" for line in summary_lines(settings, facts, url))


def server_url(settings: Settings) -> str:
    """The address of the front ends for clients on this host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.hostname, settings.hostname)
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


class StageReport(Progress):
    """Reports stages in words instead of showing them."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(None, "")
        self._report = report

    def show_stage(self, stage: str, percent: float, size: int = 0) -> None:
        """Reports the stage, and its percentage if it has a size."""
        self._report(f"{stage} {percent:.0f}%" if size else stage)


def format_megabytes(size: float) -> str:
    """Bytes as text in MB (10^6), without decimals from 10 MB on."""
    return f"{size / 1e6:.{0 if size >= 10e6 else 1}f} MB"


def format_duration(seconds: float) -> str:
    """Seconds as text: "12 s", "2 min 5 s", "1 h 3 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# --- the summary that is shown when the server is ready ---


class WorkerFacts(NamedTuple):
    """What a worker publishes in its state file when it is ready, for the summary."""

    source: str  # origin of the model
    device: str  # "cpu", or the name of the GPU
    kernels: str  # which kernels compute, and why if not our own
    dtype: str  # of activations
    weight_bytes: int  # weight matrices in memory
    weight_bits: float  # average bits per weight
    kv_cache_bytes: int  # maximum
    kv_cache_tokens: int
    max_total_tokens: int  # per request
    max_batch_size: int  # concurrent requests

    @classmethod
    def of(
        cls,
        settings: Settings,
        limits: "DeploymentLimits",
        device: str,
        kernels: str,
        weight_bytes: int = 0,
        weight_bits: float = 0.0,
        kv_cache_bytes: int = 0,
    ) -> "WorkerFacts":
        """Combines settings, limits and what only the worker knows."""
        return cls(
            source=settings.model_source,
            device=device,
            kernels=kernels,
            dtype=limits.dtype,
            weight_bytes=weight_bytes,
            weight_bits=weight_bits,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_tokens=limits.max_batch_total_tokens,
            max_total_tokens=limits.max_total_tokens,
            max_batch_size=limits.max_batch_size,
        )


def summary_fields(settings: Settings, facts: dict[str, Any], url: str) -> dict[str, Any]:
    """The summary as log fields. `facts` are those of all processes; `url` is "" if the api runs elsewhere."""
    found = {"model": settings.model_id} | {name: facts[name] for name in WorkerFacts._fields if name in facts}
    if not url:
        return found
    network = {"network": text} if (text := exposure(settings)) else {}
    page = {"page": f"{url}/ui"} if settings.ui else {}
    return found | network | {"url": url} | page | {"docs": f"{url}/docs"}


def summary_lines(settings: Settings, facts: dict[str, Any], url: str) -> list[str]:
    """The summary as lines of text, with a curl command as an example."""
    rows = []
    if set(WorkerFacts._fields) <= facts.keys():
        served = WorkerFacts(**{name: facts[name] for name in WorkerFacts._fields})
        bits = f", {served.weight_bits:.1f} bits each" if served.weight_bytes else ""
        rows += [
            ("from", served.source),
            ("weights", f"{_size(served.weight_bytes)}{bits}; computed in {served.dtype} on {served.device}"),
            ("kernels", served.kernels),
            ("context", f"{served.max_total_tokens:,} tokens a request, {served.max_batch_size:,} requests at once"),
            ("KV cache", f"{served.kv_cache_tokens:,} tokens, {_size(served.kv_cache_bytes)} at most"),
        ]
    if url:
        chats = bool(facts.get(CHAT_TEMPLATE))
        rows += [("network", text)] if (text := exposure(settings)) else []
        rows += [("page", f"{url}/ui")] if settings.ui else []
        rows += [("models", f"curl {url}/v1/models")] if settings.models else []
        rows += [("docs", f"{url}/docs"), ("ask", example_request(settings, chats, url, facts.get(TASK, "")))]
    return [f"  {name:<9} {value}" for name, value in rows]


def exposure(settings: Settings) -> str:
    """A warning if hosts other than this one can send requests without a key, else ""."""
    with contextlib.suppress(ValueError):  # a name
        if ip_address(settings.hostname).is_loopback:
            return ""
    if settings.api_key or settings.hostname == "localhost":
        return ""
    return "open to every host that reaches this one, without a key (see --hostname 127.0.0.1, --api-key-file)"


def _same_file(one: TextIO, other: TextIO) -> bool:
    """Whether both are written to the same place, such as a log file or journald's socket."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # closed, or not a file
        return False


def _size(count: int) -> str:
    """Bytes as text in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# Of models that end in a vector, by their task (protocol.ModelTask): path and body.
EXAMPLES_OF_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("/v1/embeddings", {"input": "The capital of France is Paris."}),
    "classify": ("/predict", {"inputs": "The capital of France is Paris."}),
}


def example_request(settings: Settings, chats: bool, url: str, task: str = "") -> str:
    """A curl command that sends a chat if the model `chats`, else a prompt; to a model with a `task` of
    EXAMPLES_OF_TASKS that example. It never contains a key."""
    if task in EXAMPLES_OF_TASKS:
        path, body = EXAMPLES_OF_TASKS[task]
    elif chats:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": EXAMPLE_QUESTION}], "max_tokens": 50}
    else:
        path, body = "/generate", {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


def abbreviated_path(path: Path) -> str:
    """The path with ~ for the home directory."""
    try:
        return str("~" / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # not in the home directory, or there is none
        return str(path)
