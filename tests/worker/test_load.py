import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import model as make
from tests.worker.batches import prefill
from tgi.microkernel.errors import UserError
from tgi.worker.attention import build_attention
from tgi.worker.checkpoint import INDEX_FILE, SINGLE_FILE
from tgi.worker.models import dtype as dtype_module
from tgi.worker.models.dtype import DTYPES
from tgi.worker.models.loader import build_model

pytestmark = pytest.mark.slow

IDS = list(range(3, 60))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a model, for tests that damage it."""
    return Path(shutil.copytree(make("llama", layers=2), tmp_path / "model"))


def logits(directory: Path, dtype: str = "auto") -> torch.Tensor:
    model = build_model(directory, dtype, "cpu", lambda stage, percent: None)
    return prefill(model, build_attention(model.kv, 8, torch.device("cpu")), IDS, range(8))


def error_message(directory: Path, dtype: str = "auto") -> str:
    with pytest.raises(UserError) as caught:
        build_model(directory, dtype, "cpu", lambda stage, percent: None)
    return str(caught.value)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), directory / SINGLE_FILE)


def shard(directory: Path) -> dict[str, str]:
    """Moves the weights to two files with an index; returns its weight map."""
    tensors = load_file(directory / SINGLE_FILE)
    names = sorted(tensors)
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, directory / file)
    (directory / SINGLE_FILE).unlink()
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    return places


def test_a_sharded_checkpoint(directory: Path) -> None:
    whole = logits(directory)
    shard(directory)
    assert torch.equal(logits(directory), whole)


def test_progress_increases_to_the_end(directory: Path) -> None:
    seen: list[tuple[str, int]] = []
    build_model(directory, "auto", "cpu", lambda stage, percent: seen.append((stage, percent)))
    percents = [percent for _, percent in seen]
    assert percents == sorted(percents)
    assert {"loading weights", "measuring kernels"} == {stage for stage, _ in seen}
    assert all(0 <= percent <= 100 for percent in percents)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(directory: Path, dtype: str) -> None:
    model = build_model(directory, dtype, "cpu", lambda stage, percent: None)
    assert str(model.kv.dtype) == f"torch.{dtype}"
    tolerance = {"float32": 0.0, "bfloat16": 0.4, "float16": 0.05}[dtype]
    torch.testing.assert_close(logits(directory, dtype), logits(directory, "float32"), rtol=0, atol=tolerance)


def test_an_emulated_dtype_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dtype_module, "has_arithmetic", lambda name: name == "float32")
    saved = make("llama", dtype="bfloat16")
    for dtype, expected in (("float32", []), ("bfloat16", ["this CPU has no arithmetic for bfloat16 and emulates it"])):
        caplog.clear()
        assert build_model(saved, dtype, "cpu", lambda stage, percent: None).kv.dtype is DTYPES[dtype]
        assert [message.partition(":")[0] for message in caplog.messages if "arithmetic" in message] == expected


def test_a_loaded_model_does_not_need_its_file(directory: Path) -> None:
    model = build_model(directory, "auto", "cpu", lambda stage, percent: None)
    expected = logits(directory)
    (directory / SINGLE_FILE).unlink()
    found = prefill(model, build_attention(model.kv, 8, torch.device("cpu")), IDS, range(8))
    assert torch.equal(found, expected)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change_tensors(directory, "model.layers.1.mlp.up_proj.weight", None)
    assert "model.layers.1.mlp.up_proj.weight" in error_message(directory)


def test_a_wrong_shape_is_named(directory: Path) -> None:
    change_tensors(directory, "model.layers.0.self_attn.k_proj.weight", torch.zeros(5, 64))
    message = error_message(directory)
    assert "model.layers.0.self_attn.k_proj.weight" in message
    assert "[5, 64]" in message
    assert "[32, 64]" in message
    assert str(directory / SINGLE_FILE) in message


def test_an_unsupported_dtype_is_named(directory: Path) -> None:
    change_tensors(directory, "model.norm.weight", torch.zeros(64, dtype=torch.int8))
    assert "int8" in error_message(directory)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_truncated_file_is_named(directory: Path, keep: int) -> None:
    path = directory / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in error_message(directory)


@pytest.mark.parametrize("head", [b"\xff" * 8, b"\x10" + b"\0" * 7 + b"not json at all!"])
def test_a_corrupt_file_is_named(directory: Path, head: bytes) -> None:
    path = directory / SINGLE_FILE
    path.write_bytes(head + path.read_bytes()[len(head) :])
    assert str(path) in error_message(directory)


def test_a_missing_shard_is_named(directory: Path) -> None:
    file = min(shard(directory).values())
    (directory / file).unlink()
    assert file in error_message(directory)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}', "{}"])
def test_a_bad_index_is_named(directory: Path, content: str) -> None:
    (directory / INDEX_FILE).write_text(content)
    assert INDEX_FILE in error_message(directory)


def test_no_weights(directory: Path) -> None:
    (directory / SINGLE_FILE).unlink()
    assert SINGLE_FILE in error_message(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in error_message(directory)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": 3}'])
def test_a_bad_config_is_named(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    assert "config.json" in error_message(directory)


def test_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "config.json" in error_message(directory)


def test_a_missing_config_value_is_named(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["hidden_size"]
    path.write_text(json.dumps(config))
    assert "hidden_size" in error_message(directory)


def test_an_unknown_architecture_is_rejected(directory: Path) -> None:
    change_config(directory, model_type="no-such-model", architectures=["NoSuchModel"])
    assert "no-such-model" in error_message(directory)


def test_unsupported_configs_run_through_transformers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tgi.worker.models import transformers_model

    change_config(directory, hidden_act="tanh")
    seen: list[Path] = []
    monkeypatch.setattr(transformers_model, "build_transformers_model", lambda path, *rest: seen.append(path))
    build_model(directory, "auto", "cpu", lambda stage, percent: None)
    assert seen == [directory]


def test_dummy_weights_need_no_files_and_are_the_same_again(directory: Path) -> None:
    """A worker that replaces another one computes the same tokens."""
    (directory / SINGLE_FILE).unlink()
    models = [build_model(directory, "auto", "cpu", lambda stage, percent: None, dummy=True) for _ in range(2)]
    found = [prefill(model, build_attention(model.kv, 8, torch.device("cpu")), IDS, range(8)) for model in models]
    assert torch.equal(*found)
    assert 0.1 < float(found[0].std()) < 10
    with pytest.raises(UserError, match="runs through transformers"):
        build_model(make("persimmon"), "auto", "cpu", lambda stage, percent: None, dummy=True)
