"""Log lines: what stands in them, in text and in JSON, and who decides what is shown."""

import json
import logging
from collections.abc import Iterator

import pytest

from tgi.kernel import log
from tgi.kernel.errors import UserError
from tgi.kernel.settings import Settings


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaves logging as it was."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for target in ("tgi", "tgi.api", "other", *log.NOISY):
        logging.getLogger(target).setLevel(logging.NOTSET)


def lines(capsys: pytest.CaptureFixture[str], **settings: object) -> list[str]:
    log.configure("api-0", Settings(**settings))  # type: ignore[arg-type]
    logging.getLogger("tgi.api.x").info("hello %s", "there", extra={"total_time": "1.23s", "parameters": {"seed": 1}})
    logging.getLogger("other").warning("careful")
    return capsys.readouterr().err.splitlines()


def test_text_has_time_level_process_place_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = lines(capsys)
    parts = first.split()
    assert parts[1:3] == ["INFO", "api-0"]
    assert parts[3].startswith("tgi.api.x:")
    assert first.endswith(": hello there total_time=1.23s parameters={'seed': 1}")
    assert second.split()[1] == "WARNING"


def test_json_is_one_object_per_line_with_the_fields_beside_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = map(json.loads, lines(capsys, json_output=True, log_colorize=True))
    assert first["level"] == "INFO"
    assert (first["target"], first["filename"]) == ("tgi.api.x", "test_log.py")
    assert (first["message"], first["total_time"], first["parameters"]) == ("hello there", "1.23s", {"seed": 1})
    assert isinstance(first["line_number"], int)


def test_log_colorize_turns_colour_on_and_only_on_a_terminal_is_it_the_default(
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
def test_levels_are_for_all_or_for_one_target(capsys: pytest.CaptureFixture[str], level: str, shown: int) -> None:
    assert len(lines(capsys, log_level=level)) == shown


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown log level 'loud'"):
        log.configure("api-0", Settings(log_level="info,tgi=loud"))
