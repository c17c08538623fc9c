"""Progress of starts and downloads, on a terminal, without one, and as JSON; and the summary."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tgi.microkernel.host import rundir
from tgi.microkernel.observability.progress import (
    CHAT_TEMPLATE,
    EXAMPLE_QUESTION,
    TASK,
    Progress,
    WorkerFacts,
    exposure,
    format_duration,
    server_url,
    summary_fields,
    summary_lines,
)
from tgi.microkernel.settings.table import Settings

SERVED = WorkerFacts(
    source="the demo model, imported to ~/x",
    device="cpu",
    kernels="our own for amx, 2 threads",
    dtype="bfloat16",
    kv_cache_tokens=186400,
    max_total_tokens=8192,
    max_batch_size=128,
    weight_bytes=96_000_000,
    weight_bits=5.7,
    kv_cache_bytes=4_290_000_000,
)
URL = "http://127.0.0.1:3001"
OPEN = "open to every host that reaches this one, without a key (see --hostname 127.0.0.1, --api-key-file)"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    rundir.create_run_dir(tmp_path / "run")
    return Settings(run_dir=tmp_path / "run", model_id="some/model", port=3001)


def say(settings: Settings, role: str, state: str, stage: str = "") -> None:
    rundir.write_state(settings.run_dir, rundir.ProcessState(role, 0, 1, "", state, stage))


def test_single_role_shows_its_own_stage_and_no_url(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(settings, "scheduler")
    say(settings, "api", "ready")
    say(settings, "tokenizer", "starting", "loading the tokenizer")
    progress.show_process_states(["scheduler-0"])
    say(settings, "scheduler", "starting", "waiting for the worker")
    progress.show_process_states(["scheduler-0"])
    progress.show_process_states(["scheduler-0"])
    assert capsys.readouterr() == ("", "scheduler: waiting for the worker\n")
    say(settings, "scheduler", "ready")
    progress.show_process_states(["scheduler-0"])
    progress.show_process_states(["scheduler-0"])
    said, err = capsys.readouterr()
    assert (said.startswith("Ready in "), said.endswith(" s: scheduler\n"), err) == (True, True, "")


@pytest.mark.parametrize(("title", "expected"), [("api", ["api-0"]), ("tgi", ["api-0", "tokenizer-0"])])
def test_supervisor_of_api_shows_stages_of_all_roles_then_the_url(
    settings: Settings, capsys: pytest.CaptureFixture[str], title: str, expected: list[str]
) -> None:
    progress = Progress(settings, title)
    say(settings, "api", "ready")
    say(settings, "tokenizer", "starting", "loading the tokenizer")
    progress.show_process_states(expected)
    assert capsys.readouterr() == ("", f"{title}: tokenizer: loading the tokenizer\n")
    say(settings, "tokenizer", "ready")
    progress.show_process_states(expected)
    assert capsys.readouterr().out.endswith(f" s: some/model on {URL}\n")
    progress = Progress(settings, title)
    progress.show_process_states(expected, ["b"])
    assert f" s: some/model on {URL}, but without b: a request tries" in capsys.readouterr().out


def test_summary_as_text_and_as_fields(settings: Settings) -> None:
    facts = SERVED._asdict() | {CHAT_TEMPLATE: True}
    shown = summary_lines(settings, facts, URL)
    assert shown[:-1] == [
        "  from      the demo model, imported to ~/x",
        "  weights   96 MB, 5.7 bits each; computed in bfloat16 on cpu",
        "  kernels   our own for amx, 2 threads",
        "  context   8,192 tokens a request, 128 requests at once",
        "  KV cache  186,400 tokens, 4.29 GB at most",
        f"  network   {OPEN}",
        f"  page      {URL}/ui",
        f"  docs      {URL}/docs",
    ]
    assert f"curl {URL}/v1/chat/completions -H 'Content-Type: application/json' -d" in shown[-1]
    assert EXAMPLE_QUESTION in shown[-1]
    assert summary_fields(settings, facts, URL) == SERVED._asdict() | {
        "model": "some/model",
        "network": OPEN,
        "url": URL,
        "page": f"{URL}/ui",
        "docs": f"{URL}/docs",
    }


def test_summary_without_some_facts(settings: Settings) -> None:
    """A single role knows only some facts. Without a chat template the example is a prompt. Keys are never shown."""
    assert summary_lines(settings, {CHAT_TEMPLATE: True}, "") == []
    assert summary_fields(settings, {}, "") == {"model": "some/model"}
    assert summary_lines(settings, SERVED._asdict(), "")[-1].startswith("  KV cache")
    assert "/ui" not in "".join(summary_lines(replace(settings, ui=False), facts := {CHAT_TEMPLATE: True}, URL))
    assert "page" not in summary_fields(replace(settings, ui=False), facts, URL)
    keyed = replace(settings, api_key=("secret",))
    asked = summary_lines(keyed, {CHAT_TEMPLATE: False}, URL)[-1]
    assert f"{URL}/generate -H 'Content-Type: application/json' -H 'Authorization: Bearer YOUR_KEY' -d" in asked
    assert "secret" not in asked
    facts = {CHAT_TEMPLATE: True, TASK: "embed"}
    assert f"{URL}/v1/embeddings " in summary_lines(settings, facts, URL)[-1]


@pytest.mark.parametrize(
    ("hostname", "key", "text", "url"),
    [
        ("0.0.0.0", (), OPEN, URL),
        ("::", (), OPEN, "http://[::1]:3001"),
        ("192.0.2.1", (), OPEN, "http://192.0.2.1:3001"),
        ("0.0.0.0", ("secret",), "", URL),
        ("127.0.0.1", (), "", URL),
        ("127.8.8.8", (), "", "http://127.8.8.8:3001"),
        ("::1", (), "", "http://[::1]:3001"),
    ],
)
def test_summary_tells_whether_others_can_use_the_server(
    settings: Settings, hostname: str, key: tuple[str, ...], text: str, url: str
) -> None:
    changed = replace(settings, hostname=hostname, api_key=key)
    assert (exposure(changed), server_url(changed)) == (text, url)
    assert (summary_fields(changed, {}, "").get("network"), summary_fields(changed, {}, url).get("network", "")) == (
        None,
        text,
    )


def test_summary_is_logged_without_a_terminal(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """Standard error is not a terminal in this test."""
    caplog.set_level("INFO")
    worker = rundir.ProcessState("worker", 0, 1, "", "ready", facts=SERVED._asdict())
    rundir.write_state(settings.run_dir, worker)
    say(settings, "api", "ready")
    Progress(settings, "tgi").show_process_states(["api-0", "worker-0"])
    (record,) = caplog.records
    assert record.getMessage().endswith(f" s: some/model on {URL}")
    assert SERVED._asdict().items() <= vars(record).items()


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def fetched(progress: Progress, clock: Clock) -> None:
    """250 MB, a fifth of which was downloaded before, at 5 MB/s, reported once a second."""
    progress.show_stage("looking up the model", 0)
    for second in range(41):
        progress.show_stage("downloading weights", 20 + 2 * second, 250_000_000)
        clock.now += 1
    progress.show_stage("downloading configuration", 0)


def test_download_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    fetched(Progress(None, "tgi", clock), clock)
    assert capsys.readouterr().err.splitlines() == [
        "tgi: looking up the model",
        "tgi: downloading weights, 50 MB of 250 MB",
        "tgi: downloading weights, 100 MB of 250 MB, 30 s left",
        "tgi: downloading weights, 150 MB of 250 MB, 20 s left",
        "tgi: downloading weights, 200 MB of 250 MB, 10 s left",
        "tgi: downloading weights, 250 MB in 40 s",
        "tgi: downloading configuration",
    ]


def test_percent_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(None, "tgi", clock)
    for second in range(31):
        progress.show_stage("loading weights", 2 * second)
        progress.show_stage("loading weights", 2 * second)
        clock.now += 1
    progress.show_stage("warming up", 98)
    clock.now += 60
    progress.show_stage("warming up", 98)
    assert capsys.readouterr().err.splitlines() == [
        "tgi: loading weights",
        "tgi: loading weights, 20 %",
        "tgi: loading weights, 40 %",
        "tgi: loading weights, 60 %",
        "tgi: warming up",
    ]


def test_stages_in_a_json_log(
    settings: Settings, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with caplog.at_level("INFO"):
        fetched(Progress(replace(settings, json_output=True), "tgi", clock), clock)
    assert len(caplog.messages) == 7
    assert caplog.messages[2] == "tgi: downloading weights, 100 MB of 250 MB, 30 s left"
    assert capsys.readouterr() == ("", "")


def test_bar_is_redrawn_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    progress = Progress(None, "tgi", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "78")
    fetched(progress, clock)
    drawn = capsys.readouterr().err.split("\r")
    assert drawn[1] == "\x1b[Ktgi ━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  20 % downloading weights, 50 MB of 250 MB"
    assert drawn[11].startswith("\x1b[Ktgi ━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  40 % downloading weights, 100 MB of 250 MB, ")
    assert max(map(len, drawn)) == 77 + len("\x1b[K")  # a longer line would not be drawn over
    assert len(drawn) == 44


def test_bar_of_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", written)
    Progress(None, "tgi").show_stage("loading weights", 50)
    assert b"tgi ############------------  50 % loading weights" in written.buffer.getvalue()  # type: ignore[attr-defined]


def test_ready_is_written_once_where_both_outputs_are_one_file(settings: Settings, tmp_path: Path) -> None:
    say(settings, "api", "ready")
    program = """
import sys
from pathlib import Path
from tgi.microkernel.observability import log, progress
from tgi.microkernel.settings.table import Settings
settings = Settings(run_dir=Path(sys.argv[1]), model_id="m", log_level=sys.argv[2])
log.configure_logging("tgi", settings)
progress.Progress(settings, "tgi").show_process_states(["api-0"])
"""
    for level, error in (("info", subprocess.STDOUT), ("info", subprocess.DEVNULL), ("warn", subprocess.STDOUT)):
        command = [sys.executable, "-c", program, str(settings.run_dir), level]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=error, text=True, check=True)
        assert done.stdout.count("Ready in") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (3599.6, "1 h 0 min"), (11000, "3 h 3 min")]
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
