"""Cases of one test: as pytest.mark.parametrize, for cases that take milliseconds. Thousands of them would cost each
process of a run more time to collect than they take.

    @each_case("bits", [8, 4])
    @each_case(("size", "window"), [(64, None), (32, 40)])
    def test_products(bits: int, size: int, window: int | None) -> None: ...

All cases run; those that fail are reported together, each with its values.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def each_case(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Calls the test once for each value of the parameter, or for each tuple of values of the parameters."""
    parameters = (names,) if isinstance(names, str) else names
    cases = [(value,) if isinstance(names, str) else tuple(value) for value in values]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            failures: list[Exception] = []
            for case in cases:
                given = dict(zip(parameters, case, strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as failure:
                    failure.add_note(f"in the case {given}")
                    failures.append(failure)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases failed", failures)

        signature = inspect.signature(test)
        rest = [one for name, one in signature.parameters.items() if name not in parameters]
        every.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]  # what pytest reads
        return every

    return decorate
