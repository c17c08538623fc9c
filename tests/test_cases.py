"""Cases and references of tests, on which what other tests report depends."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.references import reference


def test_every_case_runs_and_those_that_fail_are_reported_together() -> None:
    seen = []

    @each_case("base", [2, 3])
    @each_case(("factor", "right"), [(1, 2), (2, 4), (5, 10)])
    def multiply(base: int, factor: int, right: int, given: str) -> None:
        seen.append((given, base, factor))
        assert base * factor == right

    assert [*inspect.signature(multiply).parameters] == ["given"]
    with pytest.raises(ExceptionGroup, match="1 of 2 cases failed") as caught:
        multiply(given="a")
    assert seen == [("a", base, factor) for base in (2, 3) for factor in (1, 2, 5)]
    (failed,) = caught.value.exceptions
    assert isinstance(failed, ExceptionGroup)
    assert failed.__notes__ == ["in the case {'base': 3}"]
    assert [one.__notes__ for one in failed.exceptions] == [
        [f"in the case {{'factor': {factor}, 'right': {2 * factor}}}"] for factor in (1, 2, 5)
    ]


CALLS = []


def scaled(directory: Path, columns: list[Tensor], factor: int) -> list[Tensor]:
    CALLS.append(factor)
    return [column * factor + len((directory / "file").read_text()) for column in columns]


def test_a_reference_is_computed_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.references.store", lambda: tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "file").write_text("abc")
    columns = [torch.tensor([1, 2]), torch.tensor([3.0])]
    for _ in range(2):
        found = reference(scaled, model, columns, 5)
        assert [column.tolist() for column in found] == [[8, 13], [18.0]]
    assert CALLS == [5]
    reference(scaled, model, columns, 6)
    reference(scaled, model, [columns[0], columns[1] + 1], 5)
    reference(scaled, model, [columns[0].float(), columns[1]], 5)
    (model / "file").write_text("abcd")
    assert reference(scaled, model, columns, 5)[0].tolist() == [9, 14]
    assert CALLS == [5, 6, 5, 5, 5]
