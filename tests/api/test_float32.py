"""float32 as JSON, against numpy's shortest representation."""

import re
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tgi.api.float32 import float32_to_json, round_to_float32


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-0.34, "-0.34"),
        (-1.0703125, "-1.0703125"),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (-2.0, "-2.0"),
        (100000.0, "100000.0"),
        (-0.00001, "-0.00001"),
        (-0.000001, "-0.000001"),
        (-1e-7, "-1e-7"),
        (-1e-10, "-1e-10"),
        (1.5e-7, "1.5e-7"),
        (16777216.0, "16777216.0"),
        (1e12, "1000000000000.0"),
        (1e13, "1e13"),
        (1.25e15, "1.25e15"),
        (3.4028234663852886e38, "3.4028235e38"),
        (1e-45, "1e-45"),
        (2.0**-10, "0.0009765625"),
        (float("nan"), "null"),
        (float("-inf"), "null"),
    ],
)
def test_known_texts(value: float, text: str) -> None:
    assert float32_to_json(round_to_float32(value)) == text


LAYOUT = re.compile(r"-?(0|[1-9]\d*)\.\d+|-?[1-9](\.\d+)?e-?[1-9]\d*")


def same_digits(value: float) -> None:
    text = float32_to_json(value)
    assert LAYOUT.fullmatch(text), text
    assert np.float32(text) == np.float32(value)
    wanted = np.format_float_scientific(np.float32(value), unique=True, trim="-")

    def digits(number: str) -> str:
        return number.lstrip("-").partition("e")[0].replace(".", "").strip("0")

    assert digits(text) == digits(wanted), (text, wanted)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(2.0**-149)
@example(2.0**-126)
@example(9.5367431640625e-07)
@example(8589973504.0)
def test_digits_are_the_shortest(value: float) -> None:
    same_digits(value)


@given(st.integers(-148, 127), st.integers(-2, 2))
def test_digits_around_powers_of_two(exponent: int, offset: int) -> None:
    (bits,) = struct.unpack("I", struct.pack("f", 2.0**exponent))
    (value,) = struct.unpack("f", struct.pack("I", bits + offset))
    same_digits(value)


@given(st.floats(-30, 0, width=32))
def test_digits_of_log_probabilities(value: float) -> None:
    same_digits(value)
