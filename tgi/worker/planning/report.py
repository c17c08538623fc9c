"""A plan as text: a table of the splits and the recommendation."""

from collections.abc import Sequence
from textwrap import fill

from tgi.worker.planning.deployment_plan import Plan, Split

WIDTH = 110  # columns of the explanations
NOTE = (
    "Weights and KV cache follow the worker's own rules. The reserve (activations, CUDA graphs, libraries) is an "
    "estimate, which the worker replaces at start by what it measures."
)
HEADINGS = (
    *("device", "ranks", "replicas", "weights GB", "reserve GB", "KV B/token", "KV tokens", "context"),
    *("longest", "typical", "KV tokens", "longest", "typical"),
)
# Titles above the headings, each with the number of columns that it is for.
TITLES = (("", 3), ("each device", 3), ("each replica: requests", 4), ("all replicas: requests", 3))
GAP = "  "


def describe(plan: Plan) -> str:
    """The whole text, without a line break at the end."""
    head = (
        f"{plan.model}: {plan.parameters / 1e9:.2f} billion parameters, {plan.dtype}, weights {plan.weights}, context "
        f"{plan.context:,} tokens"
    )
    if plan.draft_parameters:
        head += f"; with a draft model of {plan.draft_parameters / 1e9:.2f} billion parameters"
    if plan.adapters:
        head += f"; with {plan.adapters} LoRA adapter{'s' * (plan.adapters != 1)}"
    table = [HEADINGS, *(_row(split) for split in plan.splits)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_titles(widths), *(_line(row, widths) for row in table)]
    explained = (
        "Weights include a draft model and adapters. Requests are those that fit at once: of the whole context, and of "
        f"{plan.typical_tokens:,} tokens. {NOTE}"
    )
    problems = [f"{split.device} does not fit: {split.problem.rstrip('.')}." for split in plan.splits if not split.fits]
    told = [fill(text, WIDTH, break_long_words=False) for text in (explained, *problems, plan.recommendation)]
    return "\n".join([head, "", *lines, "", *told[:-1], "", told[-1], *plan.commands])


def _titles(widths: list[int]) -> str:
    """The line above the headings. Widens columns that are narrower than their title."""
    parts, first = [], 0
    for title, count in TITLES:
        own = widths[first : first + count]
        width = sum(own) + len(GAP) * (count - 1)
        widths[first] += max(0, len(title) - width)
        parts.append(title.rjust(max(width, len(title))))
        first += count
    return GAP.join(parts).rstrip()


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return GAP.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _row(split: Split) -> Sequence[str]:
    weights = split.weight_bytes + split.adapter_bytes
    size = (f"{weights / 1e9:.2f}", f"{split.reserve_bytes / 1e9:.2f}", f"{split.kv_token_bytes:,}")
    first = (split.device, str(split.ranks), str(split.replicas), *size)
    if not split.fits:
        return (*first, *["-"] * (len(HEADINGS) - len(first)))
    counts = (
        *(split.kv_tokens, split.longest, split.longest_requests, split.typical_requests),
        *(split.all_kv_tokens, split.all_longest_requests, split.all_typical_requests),
    )
    return (*first, *(f"{count:,}" for count in counts))
