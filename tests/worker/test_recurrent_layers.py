"""Recurrent layers: what the tests of families (test_families.py) do not reach."""

import json
from pathlib import Path

import pytest
import torch

from tests.models import model as make
from tgi.microkernel.errors import UserError
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.layers import mamba2
from tgi.worker.models.loader import read_model_spec


@pytest.mark.parametrize("tokens", [1, mamba2.CHUNK, 2 * mamba2.CHUNK + 7])
def test_chunks_compute_what_single_tokens_do(tokens: int) -> None:
    """As on a GPU, in float64."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    state, decay = random(2, 3, 5, 4), -random(2, tokens, 3).abs()
    columns = random(2, tokens, 3, 4), random(2, tokens, 3, 5), random(2, tokens, 3, 5)
    for found, expected in zip(
        mamba2.scan_chunks(state, decay, *columns), mamba2.scan_tokens(state, decay, *columns), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def changed(kind: str, directory: Path, **changes: object) -> Path:
    config = json.loads((make(kind) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("lfm2", {"conv_L_cache": 9}, "see 9 tokens, which is over 8"),
        ("qwen3_5_text", {"linear_key_head_dim": 288}, "have 288 columns, which is over 256"),
        ("mamba2", {"state_size": 288}, "have 288 columns, which is over 256"),
    ],
)
def test_sizes_that_our_kernels_lack_are_told(kind: str, changes: dict[str, int], words: str, tmp_path: Path) -> None:
    """Torch's kernels compute them."""
    found, reason = select_cpu_kernels([read_model_spec(changed(kind, tmp_path, **changes), "float32")], "cpu")
    assert found is None
    assert words in reason


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("nemotron_h", {"moe_latent_size": 16}, "has moe_latent_size, which is not served of nemotron_h"),
        ("nemotron_h", {"layers_block_type": ["mamba", "swiglu"]}, "has layers of kind 'swiglu', which is not served"),
        ("falcon_h1", {"projectors_bias": True}, "has projectors_bias different from mamba_proj_bias, which"),
    ],
)
def test_configurations_that_are_not_served_are_named(
    kind: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    """Such a model cannot run through transformers, whose caches keep states of their own."""
    with pytest.raises(UserError, match=words):
        read_model_spec(changed(kind, tmp_path, **changes), "float32")
