"""The figures of a level: percentiles of latencies, throughput, goodput, failures by kind."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tgi.bench.apis import Answer
from tgi.microkernel.errors import UserError

PERCENTILES = (50, 90, 95, 99)
QUANTILES = 100  # points of a distribution that a result keeps, for plots


class Request(NamedTuple):
    """One request: when it was sent and answered, in seconds, and what came; or the kind of its failure."""

    sent: float
    ended: float
    answer: Answer | None
    failure: str = ""

    @property
    def first(self) -> float | None:
        """Seconds to the first token."""
        return self.answer.times[0] - self.sent if self.answer and self.answer.times else None

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first."""
        if self.answer is None or self.answer.output_tokens < 2 or not self.answer.times:
            return None
        return (self.answer.times[-1] - self.answer.times[0]) / (self.answer.output_tokens - 1)


class Objectives(NamedTuple):
    """Service level objectives of one request, in seconds; None: any."""

    ttft: float | None = None
    itl: float | None = None  # the mean per token of the request
    total: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Objectives":
        """Of a text such as "ttft=500ms,itl=50ms,total=20s". Raises UserError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|itl|total)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
            if match is None:
                raise UserError(f"--slo has {part!r}. Give times such as ttft=500ms,itl=50ms,total=20s.")
            found[match[1]] = float(match[2]) * (0.001 if match[3] == "ms" else 1)
        return cls(**found)

    def met(self, request: Request) -> bool:
        """Whether an answered request has met all."""
        measured = (request.first, request.per_token, request.ended - request.sent)
        return all(limit is None or (took or 0.0) <= limit for limit, took in zip(self, measured, strict=True))


def level_figures(
    requests: Sequence[Request], cpu_seconds: float, objectives: Objectives | None = None
) -> dict[str, Any]:
    """What a result keeps of a level, times in milliseconds. `cpu_seconds`: of this program during the level."""
    answered = [one for one in requests if one.answer is not None]
    seconds = max(one.ended for one in requests) - min(one.sent for one in requests) if requests else 0.0
    answers = [one.answer for one in answered if one.answer is not None]
    tokens = sum(one.output_tokens for one in answers)
    told = [one.input_tokens for one in answers if one.input_tokens is not None]
    cached = [one.cached_tokens for one in answers if one.cached_tokens is not None]
    gaps = [later - earlier for one in answers for earlier, later in pairwise(one.times)]
    found: dict[str, Any] = {
        "requests": len(requests),
        "failed": dict(Counter(one.failure for one in requests if one.failure)),
        "seconds": seconds,
        "input_tokens": sum(told) if len(told) == len(answers) else None,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "requests_per_s": len(answered) / seconds if seconds else 0.0,
        "ttft_ms": distribution([one.first for one in answered if one.first is not None]),
        "itl_ms": distribution(gaps),
        "tpot_ms": distribution([each for one in answered if (each := one.per_token) is not None]),
        "total_ms": distribution([one.ended - one.sent for one in answered]),
        "client_us_per_token": 1e6 * cpu_seconds / max(tokens, 1),
        "client_share_of_a_core": cpu_seconds / seconds if seconds else 0.0,
    }
    if objectives is not None:
        met = sum(objectives.met(one) for one in answered)
        found["goodput_per_s"] = met / seconds if seconds else 0.0
        found["goodput_share"] = met / len(requests) if requests else 0.0
    return found


def distribution(seconds: Sequence[float]) -> dict[str, Any] | None:
    """Mean, extremes, percentiles and quantiles in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(1e3 * one for one in seconds)
    found: dict[str, Any] = {"mean": statistics.fmean(ordered), "min": ordered[0], "max": ordered[-1]}
    found |= {f"p{percent}": quantile(ordered, percent / 100) for percent in PERCENTILES}
    found["quantiles"] = [quantile(ordered, number / QUANTILES) for number in range(QUANTILES + 1)]
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, linear between two of them (numpy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
