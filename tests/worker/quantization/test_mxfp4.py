"""MXFP4: the numbers are those that transformers decodes; a gpt-oss checkpoint computes what its plain twin does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models import model as make
from tests.worker import test_planning
from tests.worker.batches import prefill
from tests.worker.test_families import check_against_transformers, load, memory, pages
from tgi.worker.checkpoint import SINGLE_FILE
from tgi.worker.models.loader import read_model_spec
from tgi.worker.models.stacked_experts import open_checkpoint
from tgi.worker.quantization.weight import QuantizedWeight

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS, RANKS = 64, 96, 6, 2


def written(directory: Path) -> tuple[Path, Path]:
    """A checkpoint with random experts in MXFP4, all codes and many exponents among them, and its plain twin."""
    source = make("gpt_oss", hidden=HIDDEN, intermediate=INNER)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / SINGLE_FILE)
    packed, plain = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name in tensors:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        outputs, inputs = (2 * INNER, HIDDEN) if "gate" in name else (HIDDEN, INNER)
        blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 126, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert plain[name].shape == tensors[name].shape
    quantized, twin = directory / "quantized", directory / "twin"
    for place, found in ((quantized, packed), (twin, plain)):
        shutil.copytree(source, place)
        save_file(found, place / SINGLE_FILE, {"format": "pt"})
    described = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (quantized / "config.json").write_text(json.dumps(config | described))
    return quantized, twin


def test_a_checkpoint_in_mxfp4(tmp_path: Path) -> None:
    quantized, twin = written(tmp_path)
    spec = read_model_spec(quantized, "float32")
    assert spec.decoder is not None
    with open_checkpoint(quantized, spec.decoder) as stored, open_checkpoint(twin, spec.decoder) as plain:
        source = spec.scheme.source(stored)
        for part, outputs, inputs in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            name = f"model.layers.1.mlp.experts.2.{part}_proj"
            weight = source.weight(name, outputs, inputs)
            assert isinstance(weight, QuantizedWeight)
            assert (weight.bits, weight.is_float4, weight.factor_group) == (4, True, 32)
            assert torch.equal(weight.dequantized(torch.float32), plain.weight(name, outputs, inputs))
    check_against_transformers(twin)
    ids = torch.arange(3, 80).tolist()
    for native in (False, True):
        models = [load(directory, native=native) for directory in (quantized, twin)]
        found, expected = (prefill(model, memory(model), ids, pages(0)).log_softmax(-1) for model in models)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        test_planning.check(quantized, RANKS, native, "float32")
