"""The benchmark of the whole stack: its model, its load and its figures; and the headlines of scripts/gpu-check."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from scripts import gpu_check
from scripts.benchmarks.http_load import Generated, Load, loads, prompt, rate
from scripts.benchmarks.shapes import write_tokenizer
from scripts.benchmarks.stack import compare, recovery
from scripts.benchmarks.streams import Event
from scripts.reliability.features import is_close

pytestmark = pytest.mark.slow


def test_the_tokenizer_has_the_vocabulary_and_counts_prompts(tmp_path: Path) -> None:
    write_tokenizer(5000, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    assert all(tokenizer.decode([number]) for number in range(5000))
    for load in loads(20):
        assert len(tokenizer.encode(prompt(load)).ids) == load.inputs
    assert prompt(Load(1, 10, 1)) != prompt(Load(2, 10, 1))
    mean = sum(one.outputs for one in loads(2000)) / 2000
    assert mean == pytest.approx(194, rel=0.1)


def generated(*times: float, ids: str = "", step: float = 0.0) -> Generated:
    tokens = [{"token": {"id": ord(one), "logprob": step}} for one in ids or "a" * len(times)]
    return Generated(0.0, [Event(time, data) for time, data in zip(times, tokens, strict=True)])


def test_figures_of_streams() -> None:
    streams = [generated(1.0, 2.0, 2.5, 8.0, 9.0), generated(1.0, 2.6, 9.0)]
    found = rate(streams)
    assert found.tokens_per_s == pytest.approx(8 / 9)
    assert found.first_ms == 1000
    recovered = recovery(
        streams, 2.2, "... worker-0 has started in 3.0 s: a 1\n... worker-0 has started in 2.0 s: b 2\n"
    )
    assert recovered == (pytest.approx(5.8), pytest.approx(6.8), "2.0 s: b 2")
    same = generated(1, 2, 3, ids="abc"), generated(1, 2, 3, ids="abd", step=0.5)
    compared = compare([same[0], same[0]], [same[0], same[1]])
    assert compared == (2, 1, 2, pytest.approx(5 / 6), 0.5)


def test_answers_that_differ_in_logprobs_only_are_close() -> None:
    def answer(text: str, logprob: float, top: float) -> Any:
        return 200, {"text": text, "tokens": [{"id": 3, "logprob": logprob}], "choices.0.logprobs": {"x": [top]}}

    assert is_close(answer("a", -1.0, -2.0), answer("a", -1.0005, -2.0005), 1e-3)
    assert not is_close(answer("a", -1.0, -2.0), answer("a", -1.002, -2.0), 1e-3)
    assert not is_close(answer("a", -1.0, -2.0), answer("b", -1.0, -2.0), 1e-3)
    assert not is_close({"id": 3.0}, {"id": 3.0005}, 1e-3)


def test_sections_run_in_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section that fails, one that takes too long, and one whose figures become the headline."""
    script = "import sys, time, json, pathlib; exec(sys.argv[1])"
    (tmp_path / "given.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def section(name: str, code: str, headline: Any = str) -> gpu_check.Section:
        return gpu_check.Section(name, ["given", code], 60, headline)

    failed = gpu_check.run(section("one", "print('why'); sys.exit(3)"), tmp_path, 60)
    assert failed.ended == "failed (3)"
    assert failed.headline == "why"
    assert gpu_check.run(section("two", "time.sleep(60)"), tmp_path, 0.5).ended.startswith("stopped after")
    written = f"pathlib.Path({str(tmp_path / 'three.json')!r}).write_text('[7]')"
    passed = gpu_check.run(section("three", written, lambda found: f"figure {found[0]}"), tmp_path, 60)
    assert (passed.ended, passed.headline) == ("passed", "figure 7")
    gpu_check.write_figures([failed, passed], tmp_path)
    assert json.loads((tmp_path / "gpu-check.json").read_text())["three"]["figures"] == [7]
