"""What benchmarks cannot take is told in one sentence."""

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("script", "flag", "given", "said"),
    [
        ("bench_lora", "--ranks", "a,b", "invalid counts value: 'a,b'"),
        ("bench_lora", "--ranks", "-1", "invalid counts value: '-1'"),
        ("bench_lora", "--ranks", "", "invalid counts value: ''"),
        (
            "bench_lora",
            "--adapters",
            "1,5",
            "'5' is not a number of adapters from 1 to 4, or a division of the 16 rows",
        ),
        ("bench_lora", "--adapters", "12+5", "'12+5' is not a number"),
        ("bench_lora", "--adapters", "", "'' is not a number"),
        ("bench_step", "--rows", "8,", "invalid counts value: '8,'"),
        ("bench_front_ends", "--share", "0.01", "'0.01' is not a share from 0.1 to 1"),
        ("bench_front_ends", "--share", "half", "'half' is not a share from 0.1 to 1"),
        ("bench_gpu", "--rows", "0", "invalid counts value: '0'"),
        ("bench_gpu", "--quantize", "int3", "'int3' is not one of int8, int4"),
        ("bench_gpu", "--cuda-graphs", "0,1", "'0' is not above 0; give numbers above 0"),
        ("bench_gpu", "--trace", "nowhere/trace.json", "'nowhere/trace.json' is not a file in a directory"),
        ("bench_kernels", "--shape", "4864", "invalid shape value: '4864'"),
    ],
)
def test_nonsense_is_refused(
    script: str,
    flag: str,
    given: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, f"{flag}={given}"])
    with pytest.raises(SystemExit) as refused:
        import_module(f"scripts.{script}").main()
    assert refused.value.code == 2
    assert f"argument {flag}: {said}" in capsys.readouterr().err
