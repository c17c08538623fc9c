"""What `tgi top` writes to a terminal."""

import re

import pytest

from tgi.process_views import _repainted


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
