"""Scales of an 8-bit KV cache, as a checkpoint stores them."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import model
from tgi.microkernel.errors import UserError
from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.models.loader import build_model

NAME = "model.layers.{}.self_attn.{}"


def load_spec(directory: Path, quantized_cache: bool = True, **scales: torch.Tensor) -> KVCacheSpec:
    """The spec of a model of two layers with these scales added; "0_k_scale" is the k_scale of the first layer."""
    there = model("llama", layers=2)
    directory.mkdir()
    (directory / "config.json").symlink_to(there / "config.json")
    weights = load_file(there / "model.safetensors")
    further = {NAME.format(*name.split("_", 1)): scale for name, scale in scales.items()}
    save_file(weights | further, directory / "model.safetensors")
    return build_model(directory, "auto", "cpu", lambda stage, percent: None, quantized_cache=quantized_cache).kv


def test_scales_apply_to_an_8_bit_cache(tmp_path: Path) -> None:
    """One scale each for keys and values, or one for both; 1 where a layer has none."""
    scales = {"0_k_scale": torch.tensor([0.5]), "0_v_scale": torch.tensor(0.25).bfloat16()}
    kv = load_spec(tmp_path / "each", **scales)
    assert [kv.layer_scales(layer) for layer in range(2)] == [(1.0, 1.0)] * 2
    kv = kv._replace(stored_dtype=torch.float8_e4m3fn)
    assert [kv.layer_scales(layer) for layer in range(2)] == [(0.5, 0.25), (1.0, 1.0)]
    kv = load_spec(tmp_path / "both", **{"1_kv_scale": torch.tensor(2.0)})._replace(stored_dtype=torch.float8_e5m2)
    assert [kv.layer_scales(layer) for layer in range(2)] == [(1.0, 1.0), (2.0, 2.0)]
    assert load_spec(tmp_path / "none").cache_scales == ()


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [math.nan], [math.inf], [1.0, 1.0]])
def test_invalid_scales_are_rejected(scale: list[float], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.layers.1.self_attn.v_scale.* one number above 0\. Remove"):
        load_spec(tmp_path / "model", **{"1_v_scale": torch.tensor(scale)})


def test_scales_are_ignored_without_an_8_bit_cache(tmp_path: Path) -> None:
    """So a model whose scales are not supported (one per head, say) can be served with a cache in its own dtype."""
    assert (
        load_spec(tmp_path / "model", quantized_cache=False, **{"1_v_scale": torch.tensor([1.0, 1.0])}).cache_scales
        == ()
    )
