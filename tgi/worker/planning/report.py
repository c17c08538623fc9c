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
    *("device", "ranks", "replicas", "weights GB", "reserve GB", "KV B/token", "KV tokens", "longest"),
    *("longest at once", "typical at once"),
)


def describe(plan: Plan) -> str:
    """The whole text, without a line break at the end."""
    head = (
        f"{plan.model}: {plan.parameters / 1e9:.2f} billion parameters, {plan.dtype}, weights {plan.weights}, context "
        f"{plan.context:,} tokens"
    )
    table = [HEADINGS, *(_row(split) for split in plan.splits)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_line(row, widths) for row in table]
    explained = (
        "Bytes are of each device, tokens of each replica, requests at once of all replicas together: of the longest "
        f"possible length, and of {plan.typical_tokens:,} tokens. {NOTE}"
    )
    problems = [f"{split.device} does not fit: {split.problem.rstrip('.')}." for split in plan.splits if not split.fits]
    told = [fill(text, WIDTH, break_long_words=False) for text in (explained, *problems, plan.recommendation)]
    return "\n".join([head, "", *lines, "", *told[:-1], "", told[-1]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _row(split: Split) -> Sequence[str]:
    size = (f"{split.weight_bytes / 1e9:.2f}", f"{split.reserve_bytes / 1e9:.2f}", f"{split.kv_token_bytes:,}")
    first = (split.device, str(split.ranks), str(split.replicas), *size)
    if not split.fits:
        return (*first, "-", "-", "-", "-")
    counts = split.kv_tokens, split.longest, split.longest_requests, split.typical_requests
    return (*first, *(f"{count:,}" for count in counts))
