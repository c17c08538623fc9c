"""scripts/beside with this server as its own peer: rounds, failures of peers, and the printed tables."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.benchmarks import comparison, peers, serving, workloads
from scripts.benchmarks.comparison import Records, compare, tables
from scripts.benchmarks.peers import PEERS, Peer, our_body, ours
from scripts.benchmarks.servers import Failed, cpu_seconds
from scripts.benchmarks.workloads import Model, Words, Workload, whole
from tests.models import model

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted")
WORKLOADS = {"one": Workload(1, 20, 5), "shared": Workload(3, 4, 6, shared=32)}


def peer(name: str, **changes: Any) -> Peer:
    return replace(ours(name, SCRIPTED), **changes)


def refused() -> Any:
    raise Failed("no such package")


def short(prompt: str, tokens: int) -> dict[str, Any]:
    """Requests fewer tokens than given, for the workload "shared" only."""
    return our_body(prompt, 5 if tokens == WORKLOADS["shared"].tokens_out else tokens)


@pytest.fixture(scope="module")
def small() -> Model:
    return Model("small", model("llama", vocab=2000), WORKLOADS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def earlier_children() -> set[int]:
    """The pids of processes that other modules' tests have started (tests/live/server.py)."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def records(small: Model, logs: Path, earlier_children: set[int]) -> Records:
    servers = [
        peer("ours"),
        peer("ended", command=lambda model, port: ["false"]),
        peer("refused", command=lambda model, port: refused()),
        peer("short", body=short),
    ]
    return compare([small], servers, 2, 1, logs)


def test_every_round_measures_every_server_on_every_workload(records: Records) -> None:
    record = records["small"]["ours"]
    assert not record.failed
    assert {workload: len(found) for workload, found in record.workloads.items()} == {"one": 2, "shared": 2}
    assert len(records["small"]["short"].workloads["one"]) == 2
    assert len(record.first_s) == len(record.memory_mb) == 2
    assert min(*record.first_s, *record.memory_mb) > 0
    # The last two may be 0: if all tokens arrive at once, and if the CPU time is below the system's resolution.
    assert all(min(one[:2]) > 0 and min(one) >= 0 for found in record.workloads.values() for one in found)


def test_a_peer_that_cannot_start_is_reported_and_skipped(records: Records, logs: Path) -> None:
    assert records["small"]["ended"].failed[""].startswith("it ended with code 1")
    assert str(logs / "ended-small.log") in records["small"]["ended"].failed[""]
    assert records["small"]["refused"].failed == {"": "no such package"}
    assert not records["small"]["ended"].workloads


def test_a_stream_of_another_length_is_not_measured(records: Records) -> None:
    record = records["small"]["short"]
    assert list(record.workloads) == ["one"]
    assert record.failed["shared"].startswith("36 tokens in, 5 out; asked for were (36, 6)")


def test_the_table_has_figures_and_reasons(small: Model, records: Records) -> None:
    text = tables(small, records["small"])
    row = next(line for line in text.splitlines() if line.startswith("| shared: 3 x 32 shared + 4 in, 6 out"))
    cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
    assert len(cells) == 10  # four servers and a ratio, twice
    assert [cell == "–" for cell in cells[:5]] == [False, True, True, True, True]
    assert "- refused: no such package" in text


def test_the_json_document_has_figures_and_failures(small: Model, records: Records) -> None:
    arguments = argparse.Namespace(rounds=2)
    sets, missing = {"ours": "avx2"}, {"vllm": "not installed"}
    told = json.loads(json.dumps(comparison.document(arguments, {"ours": "1"}, sets, missing, records)))
    assert told["instruction_sets"] == sets
    assert len(told["models"]["small"]["ours"]["workloads"]["shared"]) == 2
    assert told["models"]["small"]["refused"]["failed"] == {"": "no such package"}


def run_bench(monkeypatch: pytest.MonkeyPatch, small: Model, logs: Path, *arguments: str) -> int:
    """The exit code of `scripts/bench --against`, with a small model and an unavailable peer."""
    monkeypatch.setattr(comparison, "wanted", lambda arguments: [small._replace(workloads={"one": WORKLOADS["one"]})])
    monkeypatch.setattr(workloads, "PEERS_DIRECTORY", logs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(PEERS, "openvino", peer("openvino", version=refused))
    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "1", "--repetitions", "1", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving.main()
    return ended.value.code  # type: ignore[return-value]


def test_bench_continues_without_unavailable_peers(
    monkeypatch: pytest.MonkeyPatch, small: Model, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(monkeypatch, small, logs, "--against", "openvino", "--", *SCRIPTED) == 0
    printed = capsys.readouterr().out
    assert "- openvino: not installed: no such package" in printed
    assert "| one: 1 x 20 in, 5 out" in printed


def test_bench_fails_if_our_server_fails(
    monkeypatch: pytest.MonkeyPatch, small: Model, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(monkeypatch, small, logs, "--against", "openvino", "--", "--worker", "none") == 1
    assert "- ours: it ended with code " in capsys.readouterr().out


def test_an_unknown_peer_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch, small: Model, logs: Path) -> None:
    code: Any = run_bench(monkeypatch, small, logs, "--against", "vlm")
    assert code == "'vlm' is not known; there are vllm, llama.cpp, openvino, transformers."


@pytest.fixture
def a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine with a GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho A GPU\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("a_gpu")
def test_with_a_gpu_all_peers_must_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison.need_alike([PEERS["transformers"]])
    with pytest.raises(SystemExit, match="on the GPU, and vllm, openvino on CPU"):
        comparison.need_alike([PEERS[name] for name in ("vllm", "transformers", "openvino")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    comparison.need_alike([PEERS["vllm"]])


@pytest.mark.usefixtures("a_gpu")
def test_transformers_uses_the_same_device_as_this_server(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this clone's transformers, which has no Flash Attention: then its cache is limited, because of its masks."""
    asked: list[str] = []

    def environment(name: str) -> Path:
        asked.append(name)
        return Path(sys.executable)

    monkeypatch.setattr(peers, "environment", environment)
    transformers = PEERS["transformers"]
    command = list(map(str, transformers.command(small, 80)))
    assert command[command.index("--device") + 1] == "cuda"
    assert "--attn-implementation" not in command
    assert command[command.index("--cb-num-blocks") + 1] == "3"
    assert transformers.environ() == {"HF_HUB_OFFLINE": "0"}
    assert transformers.version().endswith("SDPA on the GPU")
    monkeypatch.setattr(peers, "flash", lambda python: True)
    assert "--cb-num-blocks" not in transformers.command(small, 80)
    assert set(asked) == {"transformers-gpu"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = list(map(str, transformers.command(small, 80)))
    assert command[command.index("--device") + 1] == "cpu"
    assert asked[-1] == "transformers"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--model-id", "somewhere", "--scripted"), "--model-id, --scripted cannot go with --against"),
        (("--rounds", "0"), "argument --rounds: invalid count value: '0'"),
    ],
)
def test_conflicting_arguments_of_a_comparison_are_rejected(
    more: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--against", "llama.cpp", *more])
    with pytest.raises(SystemExit) as ended:
        serving.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missing_file_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--against", "llama.cpp", "--gguf", "nowhere.gguf"])
    with pytest.raises(SystemExit, match=r"The models could not be made: .*nowhere\.gguf does not exist"):
        serving.main()


def test_prompts_have_the_right_length_and_are_distinct(small: Model) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(small.tokenizer))
    words = Words(small.tokenizer)
    prompts, before = words.prompts(WORKLOADS["shared"], "a")
    assert before is not None
    assert {len(tokenizer.encode(text).ids) for text in (*prompts, before)} == {36}
    assert len({*prompts, before}) == 4
    shared = tokenizer.decode(tokenizer.encode(before).ids[:32])
    assert all(prompt.startswith(shared) for prompt in prompts)
    assert words.prompts(WORKLOADS["shared"], "a") == (prompts, before)
    assert not {*prompts, before} & {*words.prompts(WORKLOADS["shared"], "b")[0]}


def test_created_files_appear_complete_or_not_at_all(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        path.write_text("half")
        raise Failed("no")

    with pytest.raises(Failed, match="no"):
        whole(tmp_path / "file", broken)
    assert list(tmp_path.iterdir()) == []
    assert whole(tmp_path / "file", lambda path: path.write_text("all")).read_text() == "all"
    assert whole(tmp_path / "file", broken).read_text() == "all"


def test_a_process_that_has_ended_uses_no_processor() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        process = psutil.Process(ended.pid)
    assert cpu_seconds(process) == 0.0
    assert cpu_seconds(psutil.Process()) > 0.0


def test_servers_are_ended(records: Records, earlier_children: set[int]) -> None:
    assert records["small"]["ours"].first_s
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in earlier_children]
    assert not [line for line in (" ".join(child.cmdline()) for child in children) if "tgi" in line]
