"""The numbers that a checkpoint wants keys and values divided by, before a cache keeps them in 8 bits."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import model
from tgi.kernel.errors import UserError
from tgi.worker.batch import KVShape
from tgi.worker.load import build_model

NAME = "model.layers.{}.self_attn.{}"


def loaded(directory: Path, narrow: bool = True, **scales: torch.Tensor) -> KVShape:
    """Of a model of two layers with these further tensors, "0_k_scale" for one of the first."""
    there = model("llama", layers=2)
    directory.mkdir()
    (directory / "config.json").symlink_to(there / "config.json")
    weights = load_file(there / "model.safetensors")
    further = {NAME.format(*name.split("_", 1)): scale for name, scale in scales.items()}
    save_file(weights | further, directory / "model.safetensors")
    return build_model(directory, "auto", "cpu", lambda stage, percent: None, narrow=narrow).kv


def test_they_count_in_8_bits(tmp_path: Path) -> None:
    """One for each, or one for both; 1 where there is none."""
    scales = {"0_k_scale": torch.tensor([0.5]), "0_v_scale": torch.tensor(0.25).bfloat16()}
    kv = loaded(tmp_path / "each", **scales)
    assert [kv.divisors(layer) for layer in range(2)] == [(1.0, 1.0)] * 2
    kv = kv._replace(stored=torch.float8_e4m3fn)
    assert [kv.divisors(layer) for layer in range(2)] == [(0.5, 0.25), (1.0, 1.0)]
    kv = loaded(tmp_path / "both", **{"1_kv_scale": torch.tensor(2.0)})._replace(stored=torch.float8_e5m2)
    assert [kv.divisors(layer) for layer in range(2)] == [(1.0, 1.0), (2.0, 2.0)]
    assert loaded(tmp_path / "none").scales == ()


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [math.nan], [math.inf], [1.0, 1.0]])
def test_what_cannot_be_one_is_refused(scale: list[float], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.layers.1.self_attn.v_scale.* one number above 0 is expected\. Leave"):
        loaded(tmp_path / "model", **{"1_v_scale": torch.tensor(scale)})


def test_where_they_do_not_count_they_may_be_anything(tmp_path: Path) -> None:
    """One for each head, say: a model is served that nobody wants a cache of 8 bits for."""
    assert loaded(tmp_path / "model", narrow=False, **{"1_v_scale": torch.tensor([1.0, 1.0])}).scales == ()
