"""Downloads from the Hub, with a local server that implements its protocol."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.models import model
from tgi.hub.model_config import read_model_config
from tgi.microkernel.host.rundir import read_states

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

FETCH = textwrap.dedent("""
    import json, sys
    from tgi.hub.resolver import model_directory
    from tgi.microkernel.errors import UserError
    stages = []
    try:
        wanted = json.loads(sys.argv[3])
        directory = model_directory(sys.argv[1], sys.argv[2] or None, progress=lambda *s: stages.append(s), **wanted)
        print(json.dumps([str(directory), stages]))
    except UserError as error:
        print(json.dumps(["refused", str(error)]))
""")


class Hub(ThreadingHTTPServer):
    """Serves `files` as the repository owner/tiny."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.requests: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[2:4] == ["owner", "tiny"]:
            if parts[4:] not in (["revision", "main"], ["revision", COMMIT], []):
                return self.refuse(404, "RevisionNotFound")
            siblings = [{"rfilename": name, "size": len(body)} for name, body in self.server.files.items()]
            body = json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            return self.answer(body, {"Content-Type": "application/json"})
        if parts[:3] == ["owner", "tiny", "resolve"] and "/".join(parts[4:]) in self.server.files:
            body = self.server.files["/".join(parts[4:])]
            return self.answer(body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT})
        if "gated" in self.path:
            return self.refuse(403, "GatedRepo")
        return self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in model("llama").iterdir()}
    files |= {"README.md": b"words", "onnx/model.onnx": b"of another program", "pytorch_model.bin": b"pickled"}
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def surroundings(hub: Hub, home: Path) -> dict[str, str]:
    """An environment that makes `hub` the Hub."""
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))} | settings


def fetch(
    hub: Hub,
    home: Path,
    name: str = "owner/tiny",
    revision: str = "",
    *,
    wanted: dict | None = None,
    **environment: str,
) -> list:
    """The result of model_directory in a new process: [directory, stages] or ["refused", message]."""
    command = [sys.executable, "-c", FETCH, name, revision, json.dumps(wanted or {})]
    env = surroundings(hub, home) | environment
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_configuration_tokenizer_and_safetensors_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    directory, stages = fetch(hub, tmp_path)
    assert read_model_config(Path(directory)).content_hash == read_model_config(model("llama")).content_hash
    assert {path.name for path in Path(directory).iterdir()} == {p.name for p in model("llama").iterdir()} | {
        "README.md"
    }
    assert Path(directory).name == COMMIT
    size = sum(len(body) for name, body in hub.files.items() if name.endswith(".safetensors"))
    assert [stages[-2], stages[-1]] == [["downloading weights", 99.0, size], ["downloading weights", 100, size]]
    assert not [path for path in hub.requests if "onnx" in path or ".bin" in path]


def test_offline_mode_finds_cached_models(hub: Hub, tmp_path: Path) -> None:
    said = fetch(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert said[0] == "refused"
    assert "HF_HUB_OFFLINE" in said[1]
    directory, _ = fetch(hub, tmp_path)
    hub.requests.clear()
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1") == [directory, []]
    assert fetch(hub, tmp_path, revision=COMMIT) == [directory, []]
    assert hub.requests == []


def test_an_unreachable_hub_is_reported(hub: Hub, tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    said = fetch(hub, tmp_path, **nowhere)
    assert said[0] == "refused"
    assert "Check the network" in said[1]
    directory, _ = fetch(hub, tmp_path)
    assert fetch(hub, tmp_path, **nowhere)[0] == directory


def test_an_interrupted_download_is_not_used_as_a_model(hub: Hub, tmp_path: Path) -> None:
    directory, _ = fetch(hub, tmp_path)
    (Path(directory) / "model.safetensors").unlink()
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1")[0] == "refused"
    assert fetch(hub, tmp_path)[0] == directory
    read_model_config(Path(directory))


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("owner/none", "", "neither a directory here nor a model on the Hub"),
        ("owner/tiny", "nonsense", "no revision 'nonsense'"),
        ("owner/gated", "", "accept its conditions"),
    ],
)
def test_errors_of_the_hub_are_reported(hub: Hub, tmp_path: Path, name: str, revision: str, words: str) -> None:
    said = fetch(hub, tmp_path, name, revision)
    assert said[0] == "refused"
    assert words in said[1]


def test_a_repository_without_safetensors_is_rejected_before_the_download(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    said = fetch(hub, tmp_path)
    assert said[0] == "refused"
    assert "only as pytorch_model.bin" in said[1]
    assert not [path for path in hub.requests if "resolve" in path]


def test_only_shards_in_the_index_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    weights = hub.files.pop("model.safetensors")
    hub.files |= {"model-1.safetensors": weights, "consolidated.safetensors": weights, "stray.safetensors": weights}
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    directory, _ = fetch(hub, tmp_path)
    assert [path.name for path in Path(directory).glob("*.safetensors")] == ["model-1.safetensors"]


def test_weights_are_not_downloaded_with_a_weights_override(hub: Hub, tmp_path: Path) -> None:
    directory, stages = fetch(hub, tmp_path, wanted={"weights": False})
    assert (Path(directory) / "tokenizer.json").is_file()
    assert not list(Path(directory).glob("*.safetensors"))
    assert "downloading weights" not in [stage for stage, *_ in stages]
    assert fetch(hub, tmp_path, wanted={"weights": False}, HF_HUB_OFFLINE="1")[0] == directory


def test_weights_are_not_downloaded_where_no_worker_runs(hub: Hub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tgi", "tokenizer", "--model-id", "owner/tiny"]
    environment = surroundings(hub, tmp_path) | {"TGI_RUN": str(run)}
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as tokenizer:
        while not (run.is_dir() and read_states(run)) and tokenizer.poll() is None:
            time.sleep(0.02)
        tokenizer.terminate()
        _, told = tokenizer.communicate()
    assert tokenizer.returncode == 0, told
    assert any(path.endswith("/tokenizer.json") for path in hub.requests)
    assert not [path for path in hub.requests if path.endswith(".safetensors")]


def test_code_is_downloaded_only_with_trust_remote_code(hub: Hub, tmp_path: Path) -> None:
    config = json.loads(hub.files["config.json"]) | {"auto_map": {"AutoConfig": "own.Config"}}
    hub.files |= {"config.json": json.dumps(config).encode(), "own.py": b"pass", "tools/other.py": b"pass"}
    directory, _ = fetch(hub, tmp_path)
    assert not list(Path(directory).rglob("*.py"))
    assert fetch(hub, tmp_path, wanted={"code": True}, HF_HUB_OFFLINE="1")[0] == "refused"
    assert fetch(hub, tmp_path, wanted={"code": True})[0] == directory
    assert [path.name for path in Path(directory).rglob("*.py")] == ["own.py"]


def test_download_weights_downloads_once_and_prints_the_directory(hub: Hub, tmp_path: Path) -> None:
    def download(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "tgi", "download-weights", "owner/tiny", *arguments]
        return subprocess.run(command, env=surroundings(hub, tmp_path), cwd=ROOT, capture_output=True, text=True)

    first = download("--revision", COMMIT)
    assert (first.returncode, Path(first.stdout.strip()).name) == (0, COMMIT), first.stderr
    assert "HTTP Request" not in first.stderr, "log lines of the HTTP client"
    read_model_config(Path(first.stdout.strip()))
    hub.requests.clear()
    assert download("--revision", COMMIT).stdout == first.stdout
    assert hub.requests == []
    (Path(first.stdout.strip()) / "model.safetensors").unlink()
    del hub.files["model.safetensors"]
    refused = download()
    assert refused.returncode == 1
    assert "only as pytorch_model.bin" in refused.stderr
    assert "Convert them" in refused.stderr
    assert "Traceback" not in refused.stderr
