"""Log lines in text and JSON, levels, and limits on client input."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.observability import log
from tgi.microkernel.settings.table import Settings

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Restores the logging configuration."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for target in ("tgi", "tgi.api", "other", *log.NOISY):
        logging.getLogger(target).setLevel(logging.NOTSET)


def lines(capsys: pytest.CaptureFixture[str], **settings: object) -> list[str]:
    log.configure_logging("api-0", Settings(**settings))  # type: ignore[arg-type]
    logging.getLogger("tgi.api.x").info("hello %s", "there", extra={"total_time": "1.23s", "parameters": {"seed": 1}})
    logging.getLogger("other").warning("careful")
    return capsys.readouterr().err.splitlines()


def test_complaints_become_rare_until_there_is_no_cause_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 1e6
    monkeypatch.setattr(log.time, "monotonic", lambda: seconds)
    limit = log.ComplaintLimit(1.0)
    times = []
    for _ in range(400):
        if limit.allows_one():
            times.append(seconds - 1e6)
        seconds += 0.5
    assert times == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    seconds += 200
    assert [limit.allows_one() for _ in range(2)] == [True, False]
    seconds += 1
    assert limit.allows_one()


def test_text_has_time_level_process_location_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = lines(capsys)
    parts = first.split()
    assert parts[1:3] == ["INFO", "api-0"]
    assert parts[3].startswith("tgi.api.x:")
    assert first.endswith(": hello there total_time=1.23s parameters={'seed': 1}")
    assert second.split()[1] == "WARNING"


def test_json_is_one_object_per_line_with_fields(capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = map(json.loads, lines(capsys, json_output=True, log_colorize=True))
    assert first["level"] == "INFO"
    assert (first["target"], first["filename"]) == ("tgi.api.x", "test_log.py")
    assert (first["message"], first["total_time"], first["parameters"]) == ("hello there", "1.23s", {"seed": 1})
    assert isinstance(first["line_number"], int)


def test_log_colorize_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "\x1b[32mINFO" in lines(capsys, log_colorize=True)[0]
    assert "\x1b" not in lines(capsys, log_colorize=False)[0]
    assert "\x1b" not in lines(capsys)[0]


@pytest.mark.parametrize(
    ("level", "shown"),
    [("info", 2), ("WARN", 1), ("error", 0), ("off", 0), ("error,tgi.api=info", 1), ("other=error,tgi=debug", 1),
     ("error,text_generation_router=info", 1)],
)  # fmt: skip
def test_levels_of_all_or_one_target(capsys: pytest.CaptureFixture[str], level: str, shown: int) -> None:
    assert len(lines(capsys, log_level=level)) == shown


def test_invalid_level_is_rejected() -> None:
    with pytest.raises(UserError, match="Unknown log level 'loud'"):
        log.configure_logging("api-0", Settings(log_level="info,tgi=loud"))


def record(message: str, *args: object, error: Exception | None = None, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("tgi.x", logging.ERROR, __file__, 1, message, args, None)
    if error is not None:
        made.exc_info = (type(error), error, error.__traceback__)
    vars(made).update(fields)
    return made


def text(made: logging.LogRecord, terminal: bool = False) -> str:
    return log._Text("api-0", coloured=False, terminal=terminal).format(made)


def parsed(made: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log._Json("api-0").format(made))
    return found


MANY = 200_000  # characters, several times the limits of log.py


@pytest.mark.parametrize(
    "made",
    [
        record("said: %s", "x" * MANY),
        record("Success", inputs="x" * MANY),
        record("Success", parameters={"stop": ["x" * MANY], "seed": 1}),
        record("Success", parameters={"stop": {"a": {"b": "x" * MANY}}, "seed": 1}),
        record("Success", parameters={f"key {n}": n for n in range(MANY // 10)}),
        record("Success", ids=list(range(MANY // 5))),
        record("Success", **{f"field_{n}": "x" * 1000 for n in range(100)}),
        record("failed", error=ValueError("x" * MANY)),
    ],
    ids=["message", "field", "stop string", "deep", "many keys", "list", "many fields", "exception"],
)
def test_long_lines_are_cut_with_a_note(made: logging.LogRecord) -> None:
    assert len(text(made)) < 40_000
    assert len(json.dumps(parsed(made))) < 40_000
    assert re.search(r"\[\d+ characters cut\]", text(made))
    assert re.search(r"\[\d+ characters cut\]", json.dumps(parsed(made)))


def test_cut_lengths_add_up_and_objects_keep_their_keys() -> None:
    found = parsed(record("%s", "x" * MANY, parameters={"stop": ["y" * MANY], "seed": 1}, time="1ms"))
    for value, character in ((found["message"], "x"), (found["parameters"]["stop"], "y")):
        cut = re.search(r"\[(\d+) characters cut\]$", value)
        assert cut
        assert 0 <= value.count(character) + int(cut[1]) - MANY <= len('["') + len('"]')
    assert (found["parameters"]["seed"], found["time"]) == (1, "1ms")


FORGED = "2026-01-01T00:00:00.000Z ERROR   tgi         tgi.server:1: forged"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"], ids=repr)
def test_control_characters_cannot_forge_a_line(end: str) -> None:
    sent = f"a{end}{FORGED}{end}\x1b[2J\x9b2J\x07"
    for made in (record("refused: %s", sent), record("Success", parameters=sent), record("x", error=ValueError(sent))):
        said = text(made)
        assert not [line for line in said.splitlines() if line.startswith("2026-01-01")]
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", said)
        assert log.CONTROL.search(log._Json("api-0").format(made)) is None
    assert parsed(record("refused: %s", sent))["message"] == f"refused: {sent}"


def test_a_brief_record_is_one_short_line_unless_its_target_is_debugged() -> None:
    fields = {"client": "::1", "request_id": "7"}
    shown = []

    def details() -> dict[str, Any]:
        shown.append(True)
        return {"parameters": {"seed": 1}}

    brief = log.Brief("POST /\x1b 200 35+13 tokens 240 ms", ("request_id",), details)
    made = record("%s", "Success", brief=brief, **fields)
    line = r"POST /\x1b 200 35+13 tokens 240 ms"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d ERROR   {re.escape(line)}", text(made, terminal=True))
    assert text(made).endswith(f" api-0       tgi.x:1: {line} request_id=7")
    assert not shown
    assert parsed(made) | fields | {"message": "Success", "parameters": {"seed": 1}} == parsed(made)
    assert "brief" not in parsed(made)
    logging.getLogger("tgi").setLevel(logging.DEBUG)
    for terminal in (False, True):
        assert text(made, terminal).endswith(f"{line} client=::1 request_id=7 parameters={{'seed': 1}}")


def test_constant_message_may_have_several_lines() -> None:
    assert text(record("Runtime environment:\nTarget: x")).endswith("Runtime environment:\nTarget: x")


def test_long_traceback_keeps_both_ends() -> None:
    try:
        try:
            raise KeyError("y" * MANY)
        except KeyError as cause:
            raise ValueError("the last line") from cause
    except ValueError as error:
        lines = text(record("failed", error=error)).splitlines()
    assert "Traceback" in lines[1]
    assert lines[-1] == "    ValueError: the last line"
    assert any("characters cut" in line for line in lines)
