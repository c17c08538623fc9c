"""Invalid arguments of benchmarks are reported with one message."""

import sys
from importlib import import_module

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "flag", "given", "said"),
    [
        ("lora", "--ranks", "a,b", "invalid counts value: 'a,b'"),
        ("lora", "--ranks", "-1", "invalid counts value: '-1'"),
        ("lora", "--ranks", "", "invalid counts value: ''"),
        (
            "lora",
            "--adapters",
            "1,5",
            "'5' is not a number of adapters from 1 to 4, or a division of the 16 rows",
        ),
        ("lora", "--adapters", "12+5", "'12+5' is not a number"),
        ("lora", "--adapters", "", "'' is not a number"),
        ("step", "--rows", "8,", "invalid counts value: '8,'"),
        ("front_ends", "--share", "0.01", "'0.01' is not a share from 0.1 to 1"),
        ("front_ends", "--share", "half", "'half' is not a share from 0.1 to 1"),
        ("gpu", "--rows", "0", "invalid counts value: '0'"),
        ("gpu", "--quantize", "int3", "'int3' is not one of int8, int4"),
        ("gpu", "--cuda-graphs", "0,1", "'0' is not above 0; give numbers above 0"),
        ("gpu", "--trace", "nowhere/trace.json", "'nowhere/trace.json' is not a file in a directory"),
        ("images", "--requests", "0", "invalid counts value: '0'"),
        ("kernels", "--shape", "4864", "invalid shape value: '4864'"),
    ],
)
def test_invalid_arguments_are_rejected(
    script: str,
    flag: str,
    given: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, f"{flag}={given}"])
    with pytest.raises(SystemExit) as refused:
        import_module(f"scripts.benchmarks.{script}").main()
    assert refused.value.code == 2
    assert f"argument {flag}: {said}" in capsys.readouterr().err
