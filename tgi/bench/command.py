"""The command `tgi bench`: a plan from its options, and where the result goes."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import click

from tgi import INTERRUPTED
from tgi.bench import html, report
from tgi.bench.figures import Objectives
from tgi.bench.live import View
from tgi.bench.run import Level, Plan, run
from tgi.bench.workload import SHAPES
from tgi.microkernel.errors import UserError

DEFAULT_CONCURRENCY = (1, 8, 32)
LENGTHS = ("input_tokens", "output_tokens", "shared_tokens", "turns", "spread")


def measure(url: str, json_file: Path | None, html_file: Path | None, **options: Any) -> None:
    """Measures, prints the table, and writes the files. Raises UserError."""
    plan = make_plan(url, **options)
    for file in (json_file, html_file):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{file.parent} is no directory: {file} cannot be written there.")
    with View() as view:
        result = run(plan, view)
    if result["levels"]:
        click.echo("\n".join(report.table(result)))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1))
    if html_file is not None:
        html_file.write_text(html.page(result))
    if result.get("interrupted"):
        sys.exit(INTERRUPTED)
    if not any(level["tokens_per_s"] for level in result["levels"]):
        sys.exit(1)


def compare(first: Path, second: Path) -> None:
    """Prints the second result next to the first. Raises UserError."""
    click.echo("\n".join(report.comparison(report.load(first), report.load(second))))


def make_plan(
    url: str,
    *,
    api: str | None,
    models: tuple[str, ...],
    api_key: str | None,
    workload: str,
    concurrency: tuple[int, ...] | None,
    rates: tuple[float, ...] | None,
    requests: int | None,
    warm_up: int | None,
    timeout: float,
    slo: str | None,
    seed: int | None,
    **lengths: Any,
) -> Plan:
    """The plan of these options, of which `lengths` are those of LENGTHS. Raises UserError."""
    file = None if workload in SHAPES else Path(workload)
    if file is not None and not file.is_file():
        raise UserError(f"--workload is {workload!r}, which is no file. Give one, or one of {', '.join(SHAPES)}.")
    given = {name: lengths[name] for name in LENGTHS if lengths[name] is not None}
    shape = SHAPES[workload if file is None else "random"]
    if "spread" in given:
        shape = shape._replace(exponential=False)
    levels = [Level(concurrency=each) for each in concurrency or (() if rates else DEFAULT_CONCURRENCY)]
    levels += [Level(rate=each) for each in rates or ()]
    return Plan(
        url=url,
        api=api,
        models=models,
        key=api_key,
        shape=shape._replace(**given),
        file=file,
        levels=tuple(levels),
        requests=requests,
        warm_up=warm_up,
        seed=random.randrange(1 << 32) if seed is None else seed,
        timeout=timeout,
        objectives=Objectives.parse(slo) if slo else None,
    )
