"""Encoder-decoder models: tokens against transformers, batch invariance, resumption, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models import t5_model
from tests.worker.driving import Drawn, drive, make_engine
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.encoder_inputs import EncoderInputs
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.models.loader import build_model
from tgi.worker.models.t5 import T5Model
from tgi.worker.models.t5_config import read_t5_config

pytestmark = pytest.mark.slow

START = 0


def quiet(stage: str, percent: int) -> None:
    """Ignores the progress."""


def build(directory: Path, dtype: str = "float32", **options: Any) -> T5Model:
    model = build_model(directory, dtype, "cpu", quiet, **options)
    assert isinstance(model, T5Model)
    return model


def engine_of(model: T5Model) -> TorchEngine:
    return make_engine(model, images=EncoderInputs(model.encode))


def inputs() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 2, 15, 16, 17, 33, 64, 300]
    return [[*torch.randint(3, 320, (length - 1,), generator=generator).tolist(), 1] for length in lengths]


def transformers_model(directory: Path) -> Any:
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)


def is_greedy(got: Drawn, model: Any, ids: list[int]) -> None:
    """Each token is the likeliest one after those before it, which one forward pass shows."""
    before = torch.tensor([[START, *got.ids[:-1]]])
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids]), decoder_input_ids=before).logits[0].log_softmax(-1)
    assert got.ids == rows.argmax(-1).tolist()
    assert got.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["t5", "flan-t5", "mt5"])
def test_tokens_against_transformers(kind: str) -> None:
    """Alone and in a batch, and so far that distances of decoder and encoder are in the last bucket."""
    directory = t5_model(kind)
    model, engine, count = transformers_model(directory), engine_of(build(directory)), 50
    prompts = [[*ids, START] for ids in inputs()]
    found = drive(engine, prompts, count, stagger=1)
    assert len({tuple(one.ids) for one in found}) > 4  # the input matters
    for got, ids in zip([*found, *drive(engine, prompts[-1:], count)], [*inputs(), inputs()[-1]], strict=True):
        is_greedy(got, model, ids)


def test_penalties_see_what_the_decoder_has() -> None:
    directory, ids = t5_model("t5"), inputs()[3]
    params = SamplingParams(0, repetition_penalty=1.7)
    got = drive(engine_of(build(directory)), [[*ids, START]], 20, [params])[0]
    with torch.no_grad():
        want = transformers_model(directory).generate(
            torch.tensor([ids]), max_new_tokens=20, min_new_tokens=20, do_sample=False, num_beams=1,
            eos_token_id=None, use_cache=False, repetition_penalty=1.7,
        )  # fmt: skip
    assert got.ids == want[0, 1:].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_in_any_batch_and_resumed(dtype: str) -> None:
    """With seeds; in chunks that end within and after the input; and resumed after ids that were generated."""
    engine, count = engine_of(build(t5_model("flan-t5"), dtype)), 8
    prompts = [[*ids, START] for ids in inputs()]
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
    samplings = [
        SamplingParams(at, do_sample=at % 2 == 1, top_p=0.9, **penalties if at % 4 > 1 else {})
        for at in range(len(prompts))
    ]
    alone = [drive(engine, [prompt], count, [one])[0] for prompt, one in zip(prompts, samplings, strict=True)]
    for chunk, stagger in ((4096, 0), (16, 0), (64, 1)):
        assert drive(engine, prompts, count, samplings, chunk, stagger) == alone
    resumed = [prompt + one.ids[:3] for prompt, one in zip(prompts, alone, strict=True)]
    for chunk in (4096, 16):
        for got, one in zip(drive(engine, resumed, count - 3, samplings, chunk, generated=3), alone, strict=True):
            assert got == Drawn(one.ids[3:], one.logprobs[3:], one.tops[3:])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float16"}, "cannot be computed in float16.*--dtype bfloat16"),
        ({"quantize": "int8"}, "t5 is an encoder-decoder model.*without --quantize"),
        ({"dummy": True}, "--load-format dummy is not for encoder-decoder models"),
        ({"quantized_cache": True}, "--kv-cache-dtype is not for encoder-decoder models"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(t5_model("t5"), **{"dtype": "float32", **options})


@pytest.mark.parametrize("buckets", [0, 3, 256])
def test_buckets_that_no_formula_has_are_refused(buckets: int) -> None:
    config = json.loads((t5_model("t5") / "config.json").read_text())
    changed = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": 128}
    with pytest.raises(UserError, match=f"asks for {buckets} buckets of distances up to 128"):
        read_t5_config(config | changed)


def test_adapters_are_refused() -> None:
    with pytest.raises(UserError, match="LoRA adapters are for decoder-only models"):
        build(t5_model("t5")).load_adapter(Path("adapter"))
