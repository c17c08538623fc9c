"""What `tgi ps` and `tgi top` show, and what `tgi top` writes to a terminal."""

import re
from pathlib import Path
from typing import Any

import pytest

from tgi.microkernel.host import rundir
from tgi.process_views import Deployment, _repainted, headline, table


def shown(output: str, width: int, height: int, before: str) -> list[str]:
    """The lines of a terminal full of `before` after this output. As on VT100 the cursor stays on the last column after
    a character there, until the next one."""
    screen = [[before] * width for _ in range(height)]
    y = x = 0
    for part in re.findall(r"\x1b\[[HKJ]|.|\r|\n", output):
        if part == "\x1b[H":
            y = x = 0
        elif part in ("\x1b[K", "\x1b[J"):
            at = min(x, width - 1)
            screen[y][at:] = " " * (width - at)
            if part == "\x1b[J":
                screen[y + 1 :] = [[" "] * width for _ in screen[y + 1 :]]
        elif part == "\r":
            x = 0
        elif part == "\n":
            y += 1
            assert y < height, "it scrolls"
        else:
            assert x < width, "it wraps"
            screen[y][x] = part
            x += 1
    return ["".join(line).rstrip() for line in screen]


@pytest.mark.parametrize("height", [1, 2, 3, 5])
def test_a_frame_replaces_the_previous_one(height: int) -> None:
    lines = ["ten chars!", "", "more-than-ten", "short"]
    expected = [line[:10] for line in lines[: height - 1]]
    output = _repainted(lines, 10, height)
    assert shown(output, 10, height, "x") == expected + [""] * (height - len(expected))


def rows(*names: str) -> list[dict[str, Any]]:
    work = "step 296: 2 decode rows, 0 prompt tokens"
    return [
        {
            "name": name, "model": "m", "pid": 65512, "state": "ready", "stage": "ready", "cpu": 3.2,
            "memory_mb": 33.0, "beat_age": 0.4, "progress_age": 0.0, "work": work,
        }
        for name in names
    ]  # fmt: skip


def test_the_models_of_several_are_named() -> None:
    first, second = rows("worker-0", "worker-1")
    lines = table([first, second | {"model": "other"}], None)
    assert [line.split()[:2] for line in lines] == [["name", "model"], ["worker-0", "m"], ["worker-1", "other"]]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (None, "name pid state stage cpu memory_mb beat_age progress_age work"),
        (130, "name pid state stage cpu memory_mb beat_age progress_age work"),
        (100, "name pid state stage cpu memory_mb beat_age progress_age work"),
        (80, "name pid state cpu memory_mb work"),
        (60, "name pid state work"),
        (40, "name state"),
        (10, "name"),
    ],
)
def test_a_narrow_terminal_lacks_the_less_important_columns(width: int | None, columns: str) -> None:
    heading, *lines = table(rows("scheduler-0", "scheduler-10"), width)
    assert heading.split() == columns.split()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= (width or 200)
    assert lines[0].endswith("…") == (width in (100, 80, 60, 10))  # the others have room for all of the last column


def test_the_text_of_another_host_does_not_control_the_terminal() -> None:
    (row,) = rows("scheduler-0")
    assert table([row | {"work": "\x1b[2J\n\udc80", "beat_age": None}], None)[1].endswith("?[2J??")


def test_the_headline_tells_which_model_serves_now(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rundir.create_run_dir(run)

    def write(role: str, replica: int, state: str, **facts: str) -> None:
        rundir.write_state(run, rundir.ProcessState(role, replica, 1, "", state, facts=facts))

    deployment = Deployment(run)
    assert not deployment.refresh()
    assert headline(deployment, None) == f"no model yet, in {run}"
    write("scheduler", 0, "ready", model="unknown to it", version="1")
    write("worker", 0, "ready", model="org/old", version="1")
    deployment.refresh()
    assert headline(deployment, None) == f"org/old, tgi 1, in {run}"
    write("api", 0, "draining", model="org/old", version="1", url="http://127.0.0.1:1")
    write("api", 1, "starting", model="org/next", version="1", url="http://127.0.0.1:1")
    write("api", 2, "ready", model="org/new", version="1", url="http://127.0.0.1:1")
    write("api", 3, "ready", model="org/new", version="1", url="http://127.0.0.1:2")
    deployment.refresh()
    assert headline(deployment, None) == f"org/new on http://127.0.0.1:1, http://127.0.0.1:2, tgi 1, in {run}"
    assert headline(deployment, 20) == "org/new on http://1…"
