"""The table of a result, and the comparison of two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tgi.microkernel.errors import UserError

# Above this share of a core the figures may show the limit of this program instead of the server's; from the other one
# on, on a machine that both share, what it takes from the server is named if it is more than this per token.
BUSY_SHARE, NOTABLE_SHARE = 0.8, 0.05
NOTABLE_MICROSECONDS = 3.0

Read = Callable[[dict[str, Any]], float | None]


def _of(name: str, key: str) -> Read:
    return lambda level: None if level.get(name) is None else float(level[name][key])


# Heading, value of a level, decimals, and whether more is better.
COLUMNS: tuple[tuple[str, Read, int, bool], ...] = (
    ("tokens/s", lambda level: float(level["tokens_per_s"]), 0, True),
    ("requests/s", lambda level: float(level["requests_per_s"]), 2, True),
    ("TTFT p50", _of("ttft_ms", "p50"), 1, False),
    ("TTFT p99", _of("ttft_ms", "p99"), 1, False),
    ("ITL p50", _of("itl_ms", "p50"), 2, False),
    ("ITL p99", _of("itl_ms", "p99"), 2, False),
    ("total p50", _of("total_ms", "p50"), 0, False),
    ("total p99", _of("total_ms", "p99"), 0, False),
)


def level_name(level: dict[str, Any]) -> str:
    """A level in words."""
    return f"{level['concurrency']} at once" if level["concurrency"] else f"{level['rate']:g}/s"


def table(result: dict[str, Any]) -> list[str]:
    """The lines of a result's table; times in milliseconds."""
    with_goodput = any("goodput_per_s" in level for level in result["levels"])
    heads = ["load", "requests", *(head for head, *_ in COLUMNS), *(["goodput/s"] if with_goodput else [])]
    rows = [heads]
    for level in result["levels"]:
        values = [_number(read(level), decimals) for _, read, decimals, _ in COLUMNS]
        good = [f"{level['goodput_per_s']:.2f} ({level['goodput_share']:.0%})"] if with_goodput else []
        rows.append([level_name(level), str(level["requests"]), *values, *good])
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return lines + [f"  {line}" for line in remarks(result)]


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader has to know of the figures."""
    found = [f"note: {note}" for note in result.get("notes", ())]
    for level in result["levels"]:
        for kind, times in sorted(level["failed"].items()):
            found.append(f"{level_name(level)}: {times:,} of {level['requests']:,} requests failed: {kind}")
        share, cost = level["client_share_of_a_core"], level["client_us_per_token"]
        if share > BUSY_SHARE or (share > NOTABLE_SHARE and cost > NOTABLE_MICROSECONDS):
            found.append(
                f"{level_name(level)}: this program took {cost:.1f} us per token, {share:.0%} of a core"
                + (": the figures may be its own limit" if share > BUSY_SHARE else "")
            )
    if result.get("interrupted"):
        found.append("interrupted: only the levels that ended are shown")
    return found


def load(path: Path) -> dict[str, Any]:
    """The result in a file. Raises UserError if it is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(result, dict) or "tgi bench" not in result:
        raise UserError(f"{path} is no result of `tgi bench --json`.")
    return result


def comparison(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The lines of a table of two results: each figure of the second one with its ratio to the first."""
    others = {level_name(level): level for level in second["levels"]}
    lines = [f"A {first['url']} ({first.get('began', '')})", f"B {second['url']} ({second.get('began', '')})", ""]
    if first.get("workload") != second.get("workload"):
        lines.insert(2, "The workloads differ: compare with care.")
    lines.append(f"{'load':>12} {'':>12} {'A':>12} {'B':>12} {'B / A':>8}")
    for level in first["levels"]:
        other = others.get(level_name(level))
        if other is None:
            continue
        for head, read, decimals, more_is_better in COLUMNS:
            a, b = read(level), read(other)
            if a is None or b is None:
                continue
            ratio = b / a if a else float("nan")
            better = "" if abs(ratio - 1) < 0.05 or not a else "+" if (ratio > 1) == more_is_better else "-"
            shown = f"{ratio:>7.2f}x {better}".rstrip()
            lines.append(
                f"{level_name(level):>12} {head:>12} {_number(a, decimals):>12} {_number(b, decimals):>12} {shown}"
            )
    return lines


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
