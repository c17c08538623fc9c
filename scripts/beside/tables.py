"""The tables of a comparison, in Markdown: a row for each workload, a column for each server."""

from collections.abc import Callable

from scripts.beside.models import Model
from scripts.beside.streams import median
from scripts.beside.turns import Measured, Record

NOTHING = "–"


def tables(model: Model, records: dict[str, Record]) -> str:
    """All that is told of one model. The first of the records is ours; a ratio is ours to the best peer's."""
    names = list(records)
    rows = [name for name in model.workloads if any(name in record.workloads for record in records.values())]
    if not rows:
        return f"## {model.name}\n\n{complaints(records)}"
    speed = _figures(rows, records, lambda measured: measured.tokens_s)
    wait = _figures(rows, records, lambda measured: measured.ttft_ms)
    spent = _figures(rows, records, lambda measured: measured.cpu_us)
    peers = names[1:]
    heads = ["", *(f"{name} tokens/s" for name in names), "ours/best", *(f"{name} TTFT ms" for name in names)]
    lines = [
        [
            f"{row}: {model.workloads[row]}",
            *_cells(speed[row]),
            ratio(speed[row], max),
            *_cells(wait[row]),
            ratio(wait[row], min),
        ]
        for row in rows
    ]
    text = f"## {model.name}\n\n{table([*heads, 'ours/best'], lines)}\n\n"
    lines = [[f"{row}: CPU µs/token", *_cells(spent[row])] for row in rows]
    lines.append(["start to first token, s", *(_number(median(record.first_s)) for record in records.values())])
    lines.append(["memory, MB", *(_number(median(record.memory_mb)) for record in records.values())])
    text += table(["", names[0], *peers], lines)
    return f"{text}\n\n{said}" if (said := complaints(records)) else text


def complaints(records: dict[str, Record]) -> str:
    """Who failed, and why."""
    return "\n".join(
        f"- {name}{f', {workload}' if workload else ''}: {why}"
        for name, record in records.items()
        for workload, why in record.failed.items()
    )


def ratio(values: list[float], best: Callable[[list[float]], float]) -> str:
    """Ours, the first, to the best of the peers that have a figure."""
    ours, peers = values[0], [value for value in values[1:] if value == value]
    return f"{ours / best(peers):.2f}" if peers and ours == ours else NOTHING


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, aligned for readers of the plain text."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(_padded(line, widths))} |" for line in lines)


def _padded(line: list[str], widths: list[int]) -> list[str]:
    return [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]


def _figures(
    rows: list[str], records: dict[str, Record], figure: Callable[[Measured], float]
) -> dict[str, list[float]]:
    """The medians of a figure over the repetitions, for each workload and server; nan where there is none."""
    return {
        row: [median([figure(one) for one in record.workloads.get(row, [])]) for record in records.values()]
        for row in rows
    }


def _cells(values: list[float]) -> list[str]:
    return [_number(value) for value in values]


def _number(value: float) -> str:
    if value != value:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
