"""What a weight in few bits stands for."""

import pytest
import torch

from tests.worker.quantization.weights import random_weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shifted", [False, True])
def test_it_is_scale_times_code_plus_shift(bits: int, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(5, 96, bits, 32, shifted)
    monkeypatch.setattr("tgi.worker.quantization.weight.PIECE", 200)  # two outputs at a time
    found = weight.dequantized(torch.float32)
    assert (weight.bits, weight.shape, weight.group) == (bits, (5, 96), 32)
    for output, number in ((0, 0), (1, 33), (2, 64), (4, 95)):
        code = int(weight.codes[output, number if bits == 8 else number // 2])
        if bits == 4:
            code = (code >> 4 if number % 2 else code & 15) - (0 if shifted else 8)
        expected = float(weight.scales[output, number // 32]) * code
        if weight.shifts is not None:
            expected += float(weight.shifts[output, number // 32])
        assert float(found[output, number]) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(weight.rows(torch.tensor([4, 1, 4])).dequantized(torch.float32), found[[4, 1, 4]])
    assert torch.equal(weight.split([2, 3])[1].dequantized(torch.bfloat16), found[2:].bfloat16())
