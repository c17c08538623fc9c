"""Damaged and hostile GGUF files: one error message, no traceback, and no directory left behind."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.make_gguf import write_gguf
from tests.models import model
from tgi.hub.gguf import reader
from tgi.hub.gguf.convert import convert
from tgi.hub.gguf_import import new_directory
from tgi.hub.model_config import read_model_config
from tgi.hub.resolver import import_gguf
from tgi.microkernel.errors import UserError

pytestmark = pytest.mark.fuzz


def quiet(stage: str, percent: float, size: int = 0) -> None:
    pass


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    return write_gguf(model("llama", layers=1, vocab=300), path, "Q8_0").read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


def attempt(content: bytes, place: Path) -> str | None:
    """Imports the bytes in this process and removes the result. Returns the error message, or None if accepted."""
    source, result = place / "x.gguf", place / "out"
    source.write_bytes(content)
    error_message = None
    try:
        with new_directory(result) as temporary:
            convert(source, temporary, quiet, packed=True)
    except UserError as error:
        error_message = str(error)
        assert sorted(path.name for path in place.iterdir()) == ["x.gguf"]
        assert "Traceback" not in error_message
    else:
        read_model_config(result)
        for path in result.iterdir():
            path.unlink()
        result.rmdir()
    return error_message


def test_the_undamaged_file_is_accepted(sound: bytes, place: Path) -> None:
    assert attempt(sound, place) is None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_is_rejected(data: st.DataObject, sound: bytes, place: Path) -> None:
    length = data.draw(st.integers(0, len(sound) - 32))  # the last bytes may be padding
    assert attempt(sound[:length], place)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_rejected_or_harmless(data: st.DataObject, sound: bytes, place: Path) -> None:
    damaged = bytearray(sound)
    header = sound.rindex(b"output_norm.weight") + 64
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header) | st.integers(0, len(sound) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    attempt(bytes(damaged), place)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), magic=st.booleans())
def test_arbitrary_bytes_are_rejected(content: bytes, magic: bool, place: Path) -> None:
    assert attempt((b"GGUF" + struct.pack("<I", 3) if magic else b"") + content, place)


HYBRID = (("layers_block_type", ["mlp", "mamba", "attention", "mlp"]),)


def header(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(100), "letters GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (header(2**60, 0), "claims 1152921504606846976 tensors"),
        (header(0, 2**63), "metadata keys"),
        (header(0, 1, struct.pack("<Q", 2**40)), "length of 1099511627776"),
        (header(0, 1, key("a", 9, struct.pack("<IQ", 8, 2**50))), "items in the array"),
        (header(0, 1, key("a", 9, struct.pack("<IQ", 4, 2**21))), "ends inside"),
        (header(0, 1, key("a", 9, struct.pack("<IQ", 9, 1))), "unknown type 9"),
        (header(0, 1, key("a", 77, b"")), "unknown type 77"),
        (header(0, 2, key("a", 4, bytes(4)) + key("a", 4, bytes(4))), "twice"),
        (header(0, 1, key("general.alignment", 4, struct.pack("<I", 0))), "alignment"),
        (header(0, 1, key("a", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
        (header(0, 0), "'general.architecture' is missing"),
        (header(1, 0, key("t", 1, struct.pack("<QIQ", 32, 99, 0))), "unknown block type 99"),
        (header(1, 0, key("t", 1, struct.pack("<QIQ", 33, 8, 0))), "does not divide"),
        (header(1, 0, key("t", 1, struct.pack("<QIQ", 32, 0, 2**62))), "truncated"),
        (header(1, 0, key("t", 9, b"")), "9 dimensions"),
        (header(0, 1, key("split.count", 8, struct.pack("<Q", 1) + b"2")), "'2' parts, where a number"),
        (header(2, 0, b"".join(key(name, 1, struct.pack("<QIQ", 96, 0, 0)) for name in "tu") + bytes(500)), "overlap"),
        (header(1, 0, key("t", 4, struct.pack("<QQQQIQ", *[2**63] * 4, 0, 0))), "truncated"),
    ],
)
def test_the_message_names_the_damage(content: bytes, words: str, place: Path) -> None:
    rejection = attempt(content, place)
    assert rejection is not None
    assert words in rejection
    assert str(place / "x.gguf") in rejection


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.embedding_length": 128}, "shape"),
        ({"llama.block_count": 2}, "lacks the tensor 'blk.1.attn_q.weight'"),
        ({"llama.block_count": 4_000_000_000}, "at most 1024"),
        ({"llama.attention.head_count": 0}, "positive"),
        ({"llama.attention.head_count_kv": 3}, "divisor"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "positive number"),
        ({"llama.attention.sliding_window": 512}, "does not know"),
        ({"llama.expert_count": 8}, "expert_used_count"),
        ({"split.count": 3}, "is one of 3 parts, but its name says 1"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "none, linear or yarn"),
        ({"llama.context_length": "long"}, "whole number"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "made-up"}, "'made-up'"),
        ({"tokenizer.ggml.pre": [1.5]}, "'[1.5]'"),
        ({"tokenizer.ggml.tokens": None}, "vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "b", "c", "a"]}, "twice"),
        ({"tokenizer.ggml.merges": ["no-pair"]}, "not pairs"),
        ({"tokenizer.ggml.merges": ["quite unknown"]}, "tokenizer"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.token_type": [1, 2, 3]}, "one entry for each token"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "not in the vocabulary"),
        ({"nemotron_h.attention.head_count_kv": 2}, "a list of 4 whole numbers"),
        ({"nemotron_h.attention.head_count_kv": [2, 0, 0, 1]}, "one positive number, or 0, for each layer"),
        ({"nemotron_h.feed_forward_length": [0, 0, 0, 0]}, "one positive number, or 0, for each layer"),
        ({"nemotron_h.feed_forward_length": [0, 128, 0, 128]}, "lacks the tensor 'blk.0.ssm_in.weight'"),
        ({"nemotron_h.ssm.inner_size": 7}, "a multiple of 2 and 6"),
        ({"nemotron_h.ssm.group_count": None}, "is missing"),
    ],
)
def test_inconsistent_metadata_is_rejected(metadata: dict[str, Any], words: str, place: Path) -> None:
    hybrid = any(name.startswith("nemotron_h.") for name in metadata)
    made = model("nemotron_h", vocab=300, more=HYBRID) if hybrid else model("llama", layers=1, vocab=300)
    write_gguf(made, place / "m.gguf", metadata=metadata)
    content = (place / "m.gguf").read_bytes()
    (place / "m.gguf").unlink()
    rejection = attempt(content, place)
    assert rejection is not None
    assert words in rejection


def test_another_architecture_is_rejected_by_name(place: Path) -> None:
    content = header(0, 1, key("general.architecture", 8, struct.pack("<Q", 5) + b"mamba"))
    assert "'mamba'" in (attempt(content, place) or "")


def test_unused_tensors_are_rejected(place: Path) -> None:
    extra = {"blk.0.mystery.weight": np.zeros(4, np.float32)}
    write_gguf(model("llama", layers=1, vocab=300), place / "m.gguf", extra=extra)
    content = (place / "m.gguf").read_bytes()
    (place / "m.gguf").unlink()
    assert "blk.0.mystery.weight" in (attempt(content, place) or "")


def test_weights_that_are_not_numbers_are_rejected(sound: bytes, place: Path) -> None:
    (place / "x.gguf").write_bytes(sound)
    data = reader.read_gguf(place / "x.gguf").tensors["output_norm.weight"].data
    at = sound.index(bytes(data))
    damaged = sound[:at] + struct.pack("<f", float("nan")) + sound[at + 4 :]
    assert "not finite" in (attempt(damaged, place) or "")


def test_decays_that_are_no_logarithms_are_rejected(place: Path) -> None:
    """A file holds -exp of them."""
    source = write_gguf(model("nemotron_h", vocab=300, more=HYBRID), place / "m.gguf")
    content, data = source.read_bytes(), bytes(reader.read_gguf(source).tensors["blk.1.ssm_a"].data)
    source.unlink()
    assert "not negative" in (attempt(content.replace(data, struct.pack("<f", 0.5) + data[4:]), place) or "")


def test_scales_that_are_not_numbers_are_rejected(sound: bytes, place: Path) -> None:
    (place / "x.gguf").write_bytes(sound)
    at = sound.index(bytes(reader.read_gguf(place / "x.gguf").tensors["blk.0.attn_q.weight"].data))
    damaged = sound[:at] + struct.pack("<e", float("inf")) + sound[at + 2 :]
    assert "not finite" in (attempt(damaged, place) or "")


def test_the_child_process_reports_one_message(sound: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(sound[: len(sound) // 2])
    with pytest.raises(UserError, match="truncated") as caught:
        import_gguf(tmp_path / "x.gguf", tmp_path / "out", quiet)
    assert "Traceback" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gguf"]


def test_a_name_of_no_parts_is_that_of_a_file(sound: bytes, tmp_path: Path) -> None:
    source = tmp_path / "x-00001-of-00000.gguf"
    source.write_bytes(sound)
    assert reader.read_gguf(source).tensors


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out", quiet)
    assert list(tmp_path.iterdir()) == []
