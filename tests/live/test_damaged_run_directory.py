"""Damaged files in the run directory: of an earlier server at a start, and under a running one."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.live.server import Server

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "5000", "--validation-workers", "1")


def files(run: Path) -> Iterator[Path]:
    return (path for path in sorted(run.rglob("*")) if path.is_file())


def test_a_server_starts_in_a_run_directory_with_damaged_files(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Server(run, "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().wait_until_ready()
        server.generate("Hello", max_new_tokens=3)
    (run / "quarantine.json").touch()
    (run / "scheduler-0.successor").touch()
    (run / "pipeline").touch()
    names = {path.name for path in files(run)}
    assert {"site", "permits", "api-0.json", "worker-0.json", "scheduler-0.work", "api-0.beat"} <= names
    for path in files(run):
        path.write_bytes(os.urandom(100))
    with Server(run, "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().wait_until_ready()
        assert server.generate("Hello", max_new_tokens=3)["details"]["generated_tokens"] == 3
        assert "Traceback" not in server.output_text()


def test_processes_that_are_restarted_over_damaged_files_serve(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Server(run, "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().wait_until_ready()
        undisturbed = server.generate("Hello", max_new_tokens=200)
        pids = {name: process.pid for name, process in server.processes().items()}

        def damage() -> None:
            for name in ("quarantine.json", "pipeline", *(f"state/{name}.json" for name in pids)):
                (run / name).write_bytes(b"[[{" + os.urandom(100))
            (run / "scheduler-0.successor").mkdir()
            for pid in pids.values():
                if pid != pids["api-0"]:  # it has the connections of the streams
                    psutil.Process(pid).kill()

        (events,) = server.stream_all([("Hello", {"max_new_tokens": 200})], act=damage, after=5)
        assert events[-1]["generated_text"] == undisturbed["generated_text"]
        psutil.Process(pids["api-0"]).kill()
        server.wait_until(lambda: server.processes().get("api-0"), "the front end is replaced")
        server.wait_until_ready()
        assert server.generate("Hello", max_new_tokens=200)["generated_text"] == undisturbed["generated_text"]
        starts = re.findall(r"restarting it", server.output_text())
        assert len(starts) == len(pids), server.output_text()  # no process ended again
        assert "Traceback" not in server.output_text()
