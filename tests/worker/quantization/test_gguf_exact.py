"""In float32 a GGUF file is computed as its exact dequantization by the gguf package gives it."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor

from scripts.make_gguf import PERMUTED, SHIFTED, architecture, write_gguf
from tests.models import model as make
from tests.worker.batches import in_chunks, prefill
from tgi.hub.gguf.convert import convert
from tgi.worker.attention import build_attention
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.models.loader import build_model, read_model_spec

pytestmark = pytest.mark.slow

BLOCKS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_XS", "IQ2_XXS", "IQ3_S", "IQ1_S", "TQ2_0", "F32", "F16", "BF16", "mixed"),
)
OPTIONS = {
    "llama": {"tie": True, "layers": 2},
    "qwen2": {},
    "gemma3_text": {
        **{"tie": True, "layers": 6, "head_dim": 64},
        "more": (("sliding_window_pattern", 6), ("query_pre_attn_scalar", 64)),
    },
}


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"


def dequantized(file: Path, original: Path) -> dict[str, Tensor]:
    """The tensors of `original`, in float32, from the GGUF file that was written of it."""
    config = json.loads((original / "config.json").read_text())
    kind, heads = config["model_type"], config["num_attention_heads"]
    names = get_tensor_name_map(architecture(kind), config["num_hidden_layers"])
    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    found = {}
    for name, saved in load_file(original / "model.safetensors").items():
        tensor = stored[names.get_name(name, try_suffixes=(".weight", ".bias")) or ""]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(saved.shape)
        if kind in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            rotated = heads if ".q_proj." in name else config["num_key_value_heads"]
            pairs = values.view(rotated, -1, 2, *values.shape[1:])
            values = pairs.transpose(1, 2).reshape(saved.shape)
        found[name] = values - 1 if kind in SHIFTED and name.endswith("norm.weight") else values
    return found


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        *(("llama", block) for block in BLOCKS),
        ("qwen2", "mixed"),
        *(("gemma3_text", block) for block in ("Q4_K", "Q4_1")),
    ],
)
def test_logprobs_in_float32_equal_those_of_exact_dequantization(kind: str, block: str, tmp_path: Path) -> None:
    """On the kernels that are selected on this machine. Large logits have the error of float32 itself."""
    original = make(kind, hidden=256, intermediate=512, **OPTIONS[kind])
    file = write_gguf(original, tmp_path / "m.gguf", mixed if block == "mixed" else block)
    directory = tmp_path / "packed"
    directory.mkdir()
    convert(file, directory, lambda *told: None, packed=True)
    network = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float64).eval()
    missing, unexpected = network.load_state_dict(dequantized(file, original), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied

    kernels, _ = select_cpu_kernels([read_model_spec(directory, "float32")], "cpu")
    loaded = build_model(directory, "float32", "cpu", lambda stage, percent: None, kernels=kernels)
    generator = torch.Generator().manual_seed(3)
    for length in (1, 90):  # of the longer one also 17 tokens one by one
        ids = torch.randint(3, 512, (length,), generator=generator)
        with torch.inference_mode():
            expected = network(ids[None]).logits[0].log_softmax(-1).float()
        found = prefill(loaded, build_attention(loaded.kv, 20, loaded.device), ids.tolist(), list(range(20)))
        torch.testing.assert_close(found.log_softmax(-1), expected[-1], rtol=4e-6, atol=1e-4)
        sizes = [1] * min(length, 17) + [length - 17] * (length > 17)
        ends = torch.tensor(sizes).cumsum(0) - 1
        steps = in_chunks(loaded, build_attention(loaded.kv, 20, loaded.device), ids.tolist(), list(range(20)), sizes)
        torch.testing.assert_close(steps.log_softmax(-1), expected[ends], rtol=4e-6, atol=1e-4)
