"""Adapters in an engine: mixed rows, adapters unloaded while in use, and missing adapters."""

from pathlib import Path

import pytest

from tests.models import model as make
from tests.worker.driving import drive, make_engine
from tests.worker.loras import make_adapter
from tests.worker.test_fake_worker import slot, step
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.lora.registry import load_adapters
from tgi.worker.models.loader import build_model

PROMPTS = [[7, 9, 30, 41, 5], [8] * 20, [7, 9, 30, 41, 5], [100, 3]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    directory = make("llama", dtype="bfloat16")
    made = make_engine(build_model(directory, "auto", "cpu", lambda stage, percent: None))
    folder = tmp_path_factory.mktemp("adapters")
    for name, rank in (("a", 4), ("b", 9)):
        load_adapters(made.adapters, ((name, str(make_adapter(folder / name, directory, rank, seed=rank))),))
    return made


def asking(engine: TorchEngine, name: str, **values: float) -> SamplingParams:
    (digest,) = (one.digest for one in engine.adapters.loaded_adapters if one.name == name)
    return SamplingParams(3, adapter=name, adapter_digest=digest, **values)  # type: ignore[arg-type]


def test_mixed_requests_get_the_tokens_that_they_get_alone(engine: TorchEngine) -> None:
    samplings = [asking(engine, "a"), asking(engine, "b", temperature=0.8), SamplingParams(3), asking(engine, "b")]
    alone = [drive(engine, [one], 6, [how])[0] for one, how in zip(PROMPTS, samplings, strict=True)]
    assert drive(engine, PROMPTS, 6, samplings) == alone
    assert drive(engine, PROMPTS, 6, samplings, chunk=3, stagger=2) == alone
    assert alone[0].ids != alone[2].ids


def test_running_rows_keep_replaced_and_unloaded_adapters(engine: TorchEngine, tmp_path: Path) -> None:
    how = asking(engine, "a")
    ids, logprobs, _ = drive(engine, PROMPTS[:1], 4, [how])[0]
    engine.reset()
    first = step(1, [(0, 0, 5, 1)], [slot(0, PROMPTS[0], encode(how))], [(0, 0)])
    found = [engine.collect(engine.launch(first))]
    other = make_adapter(tmp_path / "other", make("llama", dtype="bfloat16"), seed=77)
    assert engine.adapters.add_adapter(engine.adapters.fetch_adapter("a", other))
    found.append(engine.collect(engine.launch(step(2, [(0, 5, 1, 1)]))))
    engine.adapters.remove_adapter("a")
    rows = [(0, 6, 1, 1), (1, 0, 5, 0)]
    found.append(engine.collect(engine.launch(step(3, rows, [slot(1, PROMPTS[0], encode(how))], [(1, 1)]))))
    assert [token for result in found for token in unpack_int32(result.token_ids)] == ids[:3]
    assert [value for result in found for value in unpack_float32(result.logprobs)] == logprobs[:3]
    # The adapter is removed when no slot uses it any more. A later row that asks for it fails; other rows do not.
    engine.reset()
    news = [slot(0, PROMPTS[0], encode(how)), slot(1, PROMPTS[0])]
    result = engine.collect(engine.launch(step(4, [(0, 0, 5, 1), (1, 0, 5, 1)], news, [(0, 0), (1, 1)])))
    assert result.row_errors == ["the adapter a is not loaded any more", ""]
    assert len(unpack_int32(result.token_ids)) == 2
    assert result.error == ""
