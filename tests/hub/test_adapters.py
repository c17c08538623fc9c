"""LoRA adapters from directories and from the Hub, and adapters that are given as the model."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.hub.test_hub_download import COMMIT, ROOT, Hub, fetch, hub, surroundings
from tgi.hub.model_config import read_model_config
from tgi.hub.resolver import adapter_directory
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.lora_adapters import NamedAdapter

pytestmark = pytest.mark.slow

__all__ = ["hub"]

FILES = {
    "adapter_config.json": json.dumps({"base_model_name_or_path": "owner/base"}).encode(),
    "adapter_model.safetensors": b"weights",
}
FETCH = textwrap.dedent("""
    import sys
    from tgi.hub.resolver import adapter_directory
    from tgi.microkernel.settings.lora_adapters import named_adapters
    from tgi.microkernel.errors import UserError
    try:
        print(*(adapter_directory(adapter) for adapter in named_adapters(sys.argv[1])))
    except UserError as error:
        print("refused:", error)
""")


@pytest.fixture
def lora(hub: Hub) -> Hub:
    """A Hub whose owner/tiny is an adapter, with files that must not be downloaded."""
    hub.files = FILES | {"README.md": b"words", "optimizer.pt": b"pickled", "tokenizer.json": b"{}"}
    return hub


def find(hub: Hub, home: Path, item: str, **environment: str) -> str:
    env = surroundings(hub, home) | environment
    command = [sys.executable, "-c", FETCH, item]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_adapter_files_are_downloaded_once_and_found_offline(lora: Hub, tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" in find(lora, tmp_path, "owner/tiny", HF_HUB_OFFLINE="1")
    directory = find(lora, tmp_path, f" owner/tiny@{COMMIT} ")
    assert {path.name: path.read_bytes() for path in Path(directory).iterdir()} == FILES
    lora.requests.clear()
    assert find(lora, tmp_path, f"owner/tiny@{COMMIT}") == directory
    assert lora.requests == []
    assert find(lora, tmp_path, "owner/tiny") == directory
    assert find(lora, tmp_path, "owner/tiny", HF_HUB_OFFLINE="1") == directory
    (Path(directory) / "adapter_model.safetensors").unlink()
    assert "HF_HUB_OFFLINE" in find(lora, tmp_path, "owner/tiny", HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    ("item", "without", "message"),
    [
        ("owner/none", "", "neither a directory here nor an adapter on the Hub"),
        ("owner/tiny@nonsense", "", "no revision 'nonsense'"),
        ("owner/tiny", "adapter_config.json", "owner/tiny has no adapter_config.json, so it is no LoRA adapter"),
        ("owner/tiny", "adapter_model.safetensors", "only as optimizer.pt, a format that can run code"),
        ("name=owner/tiny", "", "There is no directory owner/tiny for the LoRA adapter name"),
        ("/no/where", "", "There is no directory /no/where for"),
    ],
)
def test_missing_adapters_are_reported_before_any_download(
    lora: Hub, tmp_path: Path, item: str, without: str, message: str
) -> None:
    lora.files.pop(without, None)
    output = find(lora, tmp_path, item)
    assert output.startswith("refused:")
    assert message in output
    assert not [path for path in lora.requests if "resolve" in path]


def test_an_adapter_directory_is_used_as_it_is(tmp_path: Path) -> None:
    named = NamedAdapter("poems", str(tmp_path), None)
    with pytest.raises(UserError, match=r"has no adapter_config\.json"):
        adapter_directory(named)
    (tmp_path / "adapter_config.json").write_bytes(FILES["adapter_config.json"])
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        adapter_directory(named)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert adapter_directory(named) == adapter_directory(NamedAdapter(str(tmp_path), None, None)) == tmp_path


def test_an_adapter_given_as_model_is_rejected_with_the_right_flags(lora: Hub, tmp_path: Path) -> None:
    said = fetch(lora, tmp_path)
    assert said[0] == "refused"
    assert "owner/tiny is a LoRA adapter, not a model." in said[1]
    assert said[1].endswith("--model-id owner/base --lora-adapters owner/tiny")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match=f"--model-id BASE --lora-adapters NAME={tmp_path}"):
        read_model_config(tmp_path)
