"""float32 numbers as JSON: the shortest decimal that parses to the same float32, as Rust's serde_json prints it."""

import math
from fractions import Fraction
from struct import Struct

_SINGLE = Struct("f")
_pack, _unpack = _SINGLE.pack, _SINGLE.unpack


def round_to_float32(value: float) -> float:
    """The float32 nearest to `value`. Raises OverflowError beyond the range of float32."""
    single: float = _unpack(_pack(value))[0]
    return single


def float32_to_json(value: float) -> str:
    """The JSON of a float32 that is held in a Python float: -0.34, 0.0, 1e-10; null for NaN and infinities.

    Nine significant digits always identify a float32. Almost all logprobs need eight or seven, so those are tried
    first.
    """
    if not 1e-4 <= value < 1e5 and not -1e5 < value <= -1e-4:
        return _to_json_any(value)
    if math.frexp(value)[0] in (0.5, -0.5):  # a power of two: see _shortest
        return _to_json_any(value)
    text = f"{value:.8g}"
    if _unpack(_pack(float(text)))[0] != value:
        return f"{value:.9g}"
    shorter = f"{value:.7g}"
    if _unpack(_pack(float(shorter)))[0] == value:
        text = shorter
        shorter = f"{value:.6g}"
        if _unpack(_pack(float(shorter)))[0] == value:
            text = shorter
    return text if "." in text else text + ".0"


def _to_json_any(value: float) -> str:
    """As float32_to_json, for every float32. Source of the layout: the `pretty` format of the ryu crate."""
    if not math.isfinite(value):
        return "null"
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    if value == 0:
        return sign + "0.0"
    digits, point = _shortest(abs(value))
    count = len(digits)
    if count <= point <= 13:
        return f"{sign}{digits}{'0' * (point - count)}.0"
    if 0 < point <= 13:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1}"


def _shortest(value: float) -> tuple[str, int]:
    """The fewest digits d and the position p of the point, with value ~ 0.d * 10**p, for a finite value > 0.

    At a power of two the spacing of float32 numbers below is half of that above. The nearest decimal of some length
    may then parse to another number while the next decimal above parses to the value, so both are tried.
    """
    for length in range(1, 10):
        text = f"{value:.{length - 1}e}"
        mantissa, exponent = text.split("e")
        whole = int(mantissa.replace(".", ""))
        scale = int(exponent) - length + 1
        for candidate in (whole, whole + 1):
            if _parses_to(candidate, scale, value):
                digits = str(candidate)
                return digits.rstrip("0"), scale + len(digits)
    raise AssertionError(f"{value!r} is not a float32")


def _parses_to(whole: int, scale: int, value: float) -> bool:
    """Whether whole * 10**scale rounds to the float32 `value` > 0, computed exactly."""
    mantissa, exponent = math.frexp(value)
    step = Fraction(2) ** (max(exponent, -125) - 24)
    exact = Fraction(value)
    below = step / 2 if mantissa == 0.5 and exponent > -125 else step
    distance = Fraction(whole) * Fraction(10) ** scale - exact
    even = int(exact / step) % 2 == 0
    limit = step / 2 if distance > 0 else below / 2
    return abs(distance) < limit or (even and abs(distance) == limit)
