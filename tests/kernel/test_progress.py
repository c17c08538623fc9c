"""What a terminal shows while processes start: each role its own, and whoever serves the port all floors."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tgi.kernel import rundir
from tgi.kernel.progress import Progress, duration
from tgi.kernel.settings import Settings
from tgi.kernel.summary import CHAT_TEMPLATE, QUESTION, Served, fields, lines

SERVED = Served(
    source="the demo model, imported to ~/x",
    device="cpu",
    kernels="our own, 2 threads",
    dtype="bfloat16",
    kv_cache_tokens=186400,
    max_total_tokens=8192,
    max_batch_size=128,
    weight_bytes=96_000_000,
    weight_bits=5.7,
    kv_cache_bytes=4_290_000_000,
)
URL = "http://127.0.0.1:3001"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    rundir.create(tmp_path / "run")
    return Settings(run_dir=tmp_path / "run", model_id="some/model", port=3001)


def say(settings: Settings, role: str, state: str, stage: str = "") -> None:
    rundir.write_state(settings.run_dir, rundir.ProcessState(role, 0, 1, "", state, stage))


def test_a_role_tells_of_itself_and_has_no_address(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(settings, "scheduler")
    say(settings, "api", "ready")
    say(settings, "tokenizer", "starting", "loading the tokenizer")
    progress.tick(["scheduler-0"])
    say(settings, "scheduler", "starting", "waiting for the worker")
    progress.tick(["scheduler-0"])
    progress.tick(["scheduler-0"])
    assert capsys.readouterr() == ("", "scheduler: waiting for the worker\n")
    say(settings, "scheduler", "ready")
    progress.tick(["scheduler-0"])
    progress.tick(["scheduler-0"])
    said, err = capsys.readouterr()
    assert (said.startswith("Ready in "), said.endswith(" s: scheduler\n"), err) == (True, True, "")


@pytest.mark.parametrize(("title", "expected"), [("api", ["api-0"]), ("tgi", ["api-0", "tokenizer-0"])])
def test_who_serves_the_port_tells_what_it_waits_for_and_then_the_address(
    settings: Settings, capsys: pytest.CaptureFixture[str], title: str, expected: list[str]
) -> None:
    progress = Progress(settings, title)
    say(settings, "api", "ready")
    say(settings, "tokenizer", "starting", "loading the tokenizer")
    progress.tick(expected)
    assert capsys.readouterr() == ("", f"{title}: tokenizer: loading the tokenizer\n")
    say(settings, "tokenizer", "ready")
    progress.tick(expected)
    assert capsys.readouterr().out.endswith(f" s: some/model on {URL}\n")


def test_the_summary_is_the_same_for_people_and_programs(settings: Settings) -> None:
    facts = SERVED._asdict() | {CHAT_TEMPLATE: True}
    shown = lines(settings, facts, URL)
    assert shown[:-1] == [
        "  from      the demo model, imported to ~/x",
        "  weights   96 MB, 5.7 bits each; computed in bfloat16 on cpu",
        "  kernels   our own, 2 threads",
        "  context   8,192 tokens a request, 128 requests at once",
        "  KV cache  186,400 tokens, 4.29 GB at most",
        f"  docs      {URL}/docs",
    ]
    assert f"curl {URL}/v1/chat/completions -H 'Content-Type: application/json' -d" in shown[-1]
    assert QUESTION in shown[-1]
    assert fields(settings, facts, URL) == SERVED._asdict() | {"model": "some/model", "url": URL, "docs": f"{URL}/docs"}


def test_what_is_not_known_is_left_out(settings: Settings) -> None:
    """Roles alone know a part of it; without a chat template a chat would be refused; a key is never shown."""
    assert lines(settings, {CHAT_TEMPLATE: True}, "") == []
    assert fields(settings, {}, "") == {"model": "some/model"}
    assert lines(settings, SERVED._asdict(), "")[-1].startswith("  KV cache")
    keyed = replace(settings, api_key=("secret",))
    asked = lines(keyed, {CHAT_TEMPLATE: False}, URL)[-1]
    assert f"{URL}/generate -H 'Content-Type: application/json' -H 'Authorization: Bearer YOUR_KEY' -d" in asked
    assert "secret" not in asked


def test_programs_get_a_log_record(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """Where standard error is no terminal, as in this test."""
    caplog.set_level("INFO")
    worker = rundir.ProcessState("worker", 0, 1, "", "ready", facts=SERVED._asdict())
    rundir.write_state(settings.run_dir, worker)
    say(settings, "api", "ready")
    Progress(settings, "tgi").tick(["api-0", "worker-0"])
    (record,) = caplog.records
    assert record.getMessage().endswith(f" s: some/model on {URL}")
    assert SERVED._asdict().items() <= vars(record).items()


class Clock:
    """Seconds that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def fetched(progress: Progress, clock: Clock) -> None:
    """250 MB, of which a fifth was there before, at 5 MB/s; told once a second."""
    progress.stage("looking up the model", 0)
    for second in range(41):
        progress.stage("downloading weights", 20 + 2 * second, 250_000_000)
        clock.now += 1
    progress.stage("downloading configuration", 0)


def test_without_a_terminal_megabytes_and_time_have_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_without_a_terminal_percents_have_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(None, "tgi", clock)
    for second in range(31):
        progress.stage("loading weights", 2 * second)
        progress.stage("loading weights", 2 * second)
        clock.now += 1
    progress.stage("warming up", 98)
    clock.now += 60
    progress.stage("warming up", 98)
    assert capsys.readouterr().err.splitlines() == [
        "tgi: loading weights",
        "tgi: loading weights, 20 %",
        "tgi: loading weights, 40 %",
        "tgi: loading weights, 60 %",
        "tgi: warming up",
    ]


def test_in_a_json_log_they_have_the_same_lines(
    settings: Settings, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with caplog.at_level("INFO"):
        fetched(Progress(replace(settings, json_output=True), "tgi", clock), clock)
    assert len(caplog.messages) == 7
    assert caplog.messages[2] == "tgi: downloading weights, 100 MB of 250 MB, 30 s left"
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_one_line_is_drawn_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (3599.6, "1 h 0 min"), (11000, "3 h 3 min")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
