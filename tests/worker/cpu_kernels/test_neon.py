"""Tests of the CPU kernels with NEON, with and without its dot products, computed by an emulator: some in bfloat16.
scripts/test-neon runs all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.cpu_kernels.emulation.library import PROCESSORS, missing_tools

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# Those that take the emulator no more than a few seconds. They are compiled for one type.
LINEAR, ATTENTION = "test_linear.py::test_", "test_attention.py::test_"
CLOSE = f"{LINEAR}products_are_close_to_float64_and_do_not_depend_on_the_other_rows"
TESTS = (
    *(f"{CLOSE}[SET bfloat16-{shape}]" for shape in ("200-64", "40-31", "70-100")),
    *(f"{LINEAR}{name}" for name in ("epilogues_are_computed_on_float32_sums", "adding_zeros_changes_no_bit")),
    *(f"{LINEAR}{name}" for name in ("norms_are_close_to_float64", "rope_matches_torch")),
    f"{LINEAR}activations_are_correct_for_any_magnitude",
    "test_quantized_linear.py::test_scales_in_float32[SET bfloat16-4-128-True]",
    "test_integer_linear.py::test_results_are_close_to_the_dequantized_weight",
    "test_mxfp4_linear.py::test_results_have_the_bits_of_the_definition",
    *(
        f"test_integer_linear.py::test_epilogues_match_those_of_other_products[SET bfloat16-none-{bits}]"
        for bits in (4, 8)
    ),
    "test_head.py::test_greedy_tokens_and_their_logprobs",
    "test_head.py::test_nan_is_never_the_greedy_token",
    "test_head.py::test_the_greedy_head_matches_the_greedy_tokens_of_its_logits[SET bfloat16-1.0-30.0-7-64]",
    f"{ATTENTION}a_token_is_correct_and_the_same_in_any_chunk_and_batch[(2, 2, 32, 40, None, True, None)-SET bfloat16]",
)
# What is the same code for both sets, and a whole model: with the set whose instructions the emulator computes fast.
# Products of pairs of bfloat16 numbers take it far longer than fused multiply-adds.
ONCE = (
    f"{CLOSE}[SET bfloat16-7-1536]",
    "test_quantized_linear.py::test_products_match_the_dequantized_weight[SET bfloat16-8-32-True]",
    "test_quantizer.py",
    f"{ATTENTION}results_do_not_depend_on_the_number_of_threads",
    "test_program.py::test_a_program_matches_its_operations[llama]",
)


@pytest.mark.parametrize("instruction_set", PROCESSORS)
@pytest.mark.timeout(3600)  # the emulator takes a minute, and far longer on a busy machine
def test_kernels_pass_their_tests_in_the_emulator(instruction_set: str) -> None:
    if reason := missing_tools():
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    names = TESTS + ONCE if instruction_set == "neon" else TESTS
    tests = (str(HERE / name).replace("SET", instruction_set) for name in names)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "bfloat16 or not float", *tests],
        env=environment | {"TGI_EMULATE": instruction_set}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
