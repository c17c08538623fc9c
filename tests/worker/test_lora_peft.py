"""An adapter that peft made and merged: its own file format, names, scales and sums."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.models import model as make
from tests.worker.test_lora import load, prompts, run


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_deltas_equal_weights_merged_by_peft(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")  # here, since it takes a second, which each process would need to collect this
    directory = make(kind)
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ranks = {"rank_pattern": {r"layers\.1\..*(o_proj|down_proj)": 3}, "alpha_pattern": {"down_proj": 5}}
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules="all-linear", **ranks)
    theirs = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    theirs.save_pretrained(tmp_path)
    merged = theirs.merge_and_unload()
    ours = load(directory)
    loaded = ours.load_adapter(tmp_path)
    found = run(ours, [(loaded, ids) for ids in prompts()])
    with torch.inference_mode():
        expected = torch.stack([merged(torch.tensor([ids])).logits[0, -1] for ids in prompts()])
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4)
