"""QuantizedWeight: the numbers that its columns represent."""

import pytest
import torch

from tests.worker.quantization.weights import random_floats, random_weight, random_whole
from tgi.worker.quantization.weight import CODEBOOK, concatenate


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_weight_is_scale_times_code_plus_shift(bits: int, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(5, 96, bits, 32, shifted)
    monkeypatch.setattr("tgi.worker.quantization.weight.DEQUANTIZED_AT_ONCE", 200)  # two outputs at a time
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


def test_with_factors_a_weight_is_scale_times_codebook_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random_whole(5, 96, 4)
    assert weight.factors is not None
    monkeypatch.setattr("tgi.worker.quantization.weight.DEQUANTIZED_AT_ONCE", 200)  # two outputs at a time
    found = weight.dequantized(torch.float32)
    assert (weight.bits, weight.shape, weight.group, weight.nbytes) == (4, (5, 96), 96, 5 * (48 + 2 + 3))
    for output, number in ((0, 0), (1, 31), (1, 32), (2, 64), (4, 95)):
        code = int(weight.codes[output, number // 2]) >> (4 if number % 2 else 0) & 15
        whole = int(CODEBOOK[int(weight.factors[output, number // 32]), code])
        assert int(weight.decoded()[output, number]) == whole
        assert float(found[output, number]) == float(weight.scales[output, 0]) * whole
    assert torch.equal(weight.rows(torch.tensor([4, 1, 4])).dequantized(torch.float32), found[[4, 1, 4]])
    assert torch.equal(concatenate(weight.split([2, 3])[::-1]).dequantized(torch.float32), found[[2, 3, 4, 0, 1]])


def test_8_bit_floats_are_multiplied_by_the_scale_of_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_floats(5, 96)
    monkeypatch.setattr("tgi.worker.quantization.weight.DEQUANTIZED_AT_ONCE", 200)  # two outputs at a time
    found = weight.dequantized(torch.float32)
    assert (weight.bits, weight.shape, weight.group, weight.nbytes) == (8, (5, 96), 96, 5 * (96 + 4))
    assert (weight.floating, weight.is_integer) == (True, False)
    for output, number in ((0, 0), (1, 33), (4, 95)):
        assert float(found[output, number]) == float(weight.scales[output, 0] * weight.codes[output, number].float())
    assert torch.equal(weight.rows(torch.tensor([4, 1, 4])).dequantized(torch.float32), found[[4, 1, 4]])
    assert torch.equal(concatenate(weight.split([2, 3])[::-1]).dequantized(torch.float32), found[[2, 3, 4, 0, 1]])
    assert weight.to(torch.device("meta")).floating


def test_code_8_of_the_codebook_is_zero_for_every_factor() -> None:
    """Kernels pad panels with it."""
    assert not CODEBOOK[:, 8].any()
