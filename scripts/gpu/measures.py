"""Decode steps and long prompts, measured on the worker's engine."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.driving import Alone, Flow, Requests, flow
from scripts.shapes import matrices, stored
from tgi.worker.attention import page_bytes
from tgi.worker.engine import TorchEngine
from tgi.worker.models.decoder import Decoder

WARM = 4  # steps before any is measured
SPARE = 32  # tokens that requests have room for beyond those that are measured


def longest(context: int, rounds: int) -> int:
    """How many tokens a request comes to, at most, that begins with `context`."""
    return context + 2 * rounds + SPARE


class Decode(NamedTuple):
    """Decode steps of so many rows, in milliseconds."""

    rows: int
    recorded: bool
    read: float  # bytes
    device: float
    held: bool  # whether the GPU was kept asleep meanwhile
    flow: Flow


def _decode(engine: TorchEngine, rows: int, recorded: bool, context: int, rounds: int) -> Decode:
    """Half of the steps that are measured alone come before the others and half behind them, so that the contexts of
    both are as long in the middle."""
    model = engine._model
    assert isinstance(model, Decoder)
    engine.reset()
    requests, alone = Requests(engine, range(rows), context, longest(0, rounds)), Alone(engine)
    flow(engine, requests.prompts())
    flow(engine, requests.steps(WARM))
    before = alone.measure(requests, -(-rounds // 2))
    flowing = flow(engine, requests.steps(rounds))
    measured = before + alone.measure(requests, -(-rounds // 2))
    kept: Any = engine._attention  # which knows in which type it keeps keys and values
    token = page_bytes(kept._kv, model.device) / kept.page_size
    read = stored((model._weights.layers, model._weights.head)) + rows * (context + WARM + rounds) * token
    return Decode(rows, recorded, read, statistics.median(measured), alone.works, flowing)


def decodes(engine: TorchEngine, numbers: Sequence[int], context: int, rounds: int) -> list[Decode]:
    """Of each number of rows: recorded, where there is a recording for them, and computed plainly."""
    found, recordings = [], engine._recorded
    most = longest(context, rounds)
    for rows in numbers:
        if recordings and any(take.rows >= rows and take.bound >= most for take in recordings._takes):
            found.append(_decode(engine, rows, True, context, rounds))
        engine._recorded = None
        found.append(_decode(engine, rows, False, context, rounds))
        engine._recorded = recordings
    return found


def prefill(engine: TorchEngine, tokens: int, rounds: int) -> float:
    """Milliseconds from the begin of a prompt's first step to the end of its last."""
    found: list[float] = []
    for _ in range(rounds + 1):
        engine.reset()
        found.append(flow(engine, Requests(engine, range(1), tokens, 1).prompts()).whole)
    return statistics.median(found[1:])


def prefill_flop(config: dict[str, Any], tokens: int) -> float:
    """Floating point operations of a prompt: two for each token and weight, twice as many for each query and each
    number of a key before it, whose value is added up too, and those that score what comes behind."""
    layers: int = config["num_hidden_layers"]
    hidden: int = config["hidden_size"]
    scored: int = hidden * config["vocab_size"]
    weights = layers * sum(outputs * inputs for outputs, inputs in matrices(config).values())
    return 2.0 * (weights * tokens + layers * hidden * tokens * (tokens + 1) + scored)
