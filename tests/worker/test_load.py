import json
import logging
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import model as make
from tests.worker.batches import prefill
from tgi.kernel.errors import UserError
from tgi.worker import load, processor
from tgi.worker.attention import build_attention
from tgi.worker.checkpoint import INDEX, SINGLE
from tgi.worker.load import DTYPES, build_model, resolve_dtype

IDS = list(range(3, 60))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model that may be spoiled."""
    return Path(shutil.copytree(make("llama", layers=2), tmp_path / "model"))


def logits(directory: Path, dtype: str = "auto") -> torch.Tensor:
    model = build_model(directory, dtype, "cpu", lambda stage, percent: None)
    return prefill(model, build_attention(model.kv, 8, torch.device("cpu")), IDS, range(8))


def refusal(directory: Path, dtype: str = "auto") -> str:
    with pytest.raises(UserError) as caught:
        build_model(directory, dtype, "cpu", lambda stage, percent: None)
    return str(caught.value)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(directory / SINGLE)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), directory / SINGLE)


def shard(directory: Path) -> dict[str, str]:
    """Puts the weights into two files with an index, and returns the index."""
    tensors = load_file(directory / SINGLE)
    names = sorted(tensors)
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, directory / file)
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_are_the_same_model(directory: Path) -> None:
    whole = logits(directory)
    shard(directory)
    assert torch.equal(logits(directory), whole)


def test_progress_goes_up_to_the_end(directory: Path) -> None:
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


@pytest.mark.parametrize(
    ("machine", "line", "taken"),
    [
        ("x86_64", "flags : avx2 avx_vnni avx_ne_convert", []),
        ("x86_64", "flags : avx2 avx512f avx512bw", []),
        ("x86_64", "flags : avx2 avx512f avx512_bf16", ["bfloat16"]),
        ("x86_64", "flags : avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16", ["bfloat16", "float16"]),
        ("aarch64", "Features : fp asimd fphp asimdhp", ["float16"]),
        ("aarch64", "Features : fp asimd fphp asimdhp bf16", ["bfloat16", "float16"]),
        ("ppc64le", "cpu : POWER9", []),
    ],
)
def test_auto_takes_the_dtype_of_the_config_where_the_cpu_computes_in_it(
    machine: str, line: str, taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"{line}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delenv(processor.CPU, raising=False)
    for name, dtype in DTYPES.items():
        assert resolve_dtype({"dtype": name}, "auto", "cuda") is dtype
        assert resolve_dtype({"torch_dtype": name}, "auto", "cpu") is (dtype if name in taken else torch.float32)
        assert resolve_dtype({"dtype": "float32"}, name, "cpu") is dtype
    assert resolve_dtype({}, "auto", "cpu") is torch.float32
    with pytest.raises(UserError, match="float64"):
        resolve_dtype({"dtype": "float64"}, "auto", "cpu")


def test_a_type_that_the_cpu_emulates_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "multiplies", lambda name: name == "float32")
    caplog.set_level(logging.DEBUG)
    saved = make("llama", dtype="bfloat16")
    for dtype, computed, told in (
        ("auto", "float32", "computing in float32: this CPU has no arithmetic for the model's bfloat16"),
        ("bfloat16", "bfloat16", "this CPU has no arithmetic for bfloat16 and emulates it"),
    ):
        caplog.clear()
        assert build_model(saved, dtype, "cpu", lambda stage, percent: None).kv.dtype is DTYPES[computed]
        assert next(record for record in caplog.messages if "arithmetic" in record).startswith(told)


def test_the_model_does_not_need_its_file_any_more(directory: Path) -> None:
    model = build_model(directory, "auto", "cpu", lambda stage, percent: None)
    expected = logits(directory)
    (directory / SINGLE).unlink()
    found = prefill(model, build_attention(model.kv, 8, torch.device("cpu")), IDS, range(8))
    assert torch.equal(found, expected)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change_tensors(directory, "model.layers.1.mlp.up_proj.weight", None)
    assert "model.layers.1.mlp.up_proj.weight" in refusal(directory)


def test_a_wrong_shape_is_named(directory: Path) -> None:
    change_tensors(directory, "model.layers.0.self_attn.k_proj.weight", torch.zeros(5, 64))
    message = refusal(directory)
    assert "model.layers.0.self_attn.k_proj.weight" in message
    assert "[5, 64]" in message
    assert "[32, 64]" in message
    assert str(directory / SINGLE) in message


def test_a_foreign_dtype_is_named(directory: Path) -> None:
    change_tensors(directory, "model.norm.weight", torch.zeros(64, dtype=torch.int8))
    assert "int8" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_truncated_file_is_named(directory: Path, keep: int) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(directory)


@pytest.mark.parametrize("head", [b"\xff" * 8, b"\x10" + b"\0" * 7 + b"not json at all!"])
def test_a_corrupt_file_is_named(directory: Path, head: bytes) -> None:
    path = directory / SINGLE
    path.write_bytes(head + path.read_bytes()[len(head) :])
    assert str(path) in refusal(directory)


def test_a_missing_shard_is_named(directory: Path) -> None:
    file = min(shard(directory).values())
    (directory / file).unlink()
    assert file in refusal(directory)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}', "{}"])
def test_a_bad_index_is_named(directory: Path, content: str) -> None:
    (directory / INDEX).write_text(content)
    assert INDEX in refusal(directory)


def test_no_weights(directory: Path) -> None:
    (directory / SINGLE).unlink()
    assert SINGLE in refusal(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in refusal(directory)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": 3}'])
def test_a_bad_config_is_named(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    assert "config.json" in refusal(directory)


def test_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "config.json" in refusal(directory)


def test_a_value_that_the_config_lacks_is_named(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["hidden_size"]
    path.write_text(json.dumps(config))
    assert "hidden_size" in refusal(directory)


def test_an_unknown_architecture_is_refused(directory: Path) -> None:
    change_config(directory, model_type="no-such-model", architectures=["NoSuchModel"])
    assert "no-such-model" in refusal(directory)


def test_what_the_decoder_does_not_do_goes_to_transformers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tgi.worker.models import fallback

    change_config(directory, hidden_act="relu")
    seen: list[Path] = []
    monkeypatch.setattr(fallback, "build_fallback", lambda path, *rest: seen.append(path))
    build_model(directory, "auto", "cpu", lambda stage, percent: None)
    assert seen == [directory]


def test_loading_imports_nothing_heavy() -> None:
    import subprocess

    heavy = ("transformers", "safetensors.torch", "torch._dynamo", "triton")
    code = f"import sys, tgi.worker.start; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
