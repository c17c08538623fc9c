"""`tgi plan`: its sizes are those of models that are loaded, for every family; its answers for known shapes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from tests.models import model as make
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.quantization.checkpoints import Awq, Compressed, Form, Fp8, Gptq, write
from tgi.cli import main
from tgi.microkernel.settings import Settings
from tgi.worker.attention import page_size
from tgi.worker.checkpoint import SINGLE_FILE, Checkpoint
from tgi.worker.cpu_kernels.quantizer import CpuQuantizer
from tgi.worker.distributed.sharding import shard_decoder, whole_model
from tgi.worker.kv_cache_sizes import CPU_PAGE_SIZE, GPU_PAGE_SIZE
from tgi.worker.layers.mlp import MixtureOfExperts, Mlp
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.decoder_layer import DecoderWeights
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.loader import read_model_spec
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.models.weight_shapes import matrices, vectors
from tgi.worker.planning.deployment_plan import matrix_sizes, rank_memory, read_planned_model
from tgi.worker.planning.devices import Devices, parse_devices
from tgi.worker.quantization.quantize import quantize_weight

RANKS = (1, 2, 4)
CPU, GPU = Devices(4, "cpu", 1 << 36, False, is_cpu=True), Devices(4, "gpu", 1 << 36, True)
# Tensors of this device have shapes and types only. The loader treats it as it treats a GPU.
META = torch.device("meta")
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_shapes_are_those_of_the_checkpoint(kind: str, tie: bool) -> None:
    directory = make(kind, tie=tie)
    config = read_planned_model(directory, Settings()).config
    found: dict[str, int] = {}
    for matrix in matrices(config, whole_model(config)):
        name = f"{matrix.name}.weight"
        found[name] = found.get(name, 0) + matrix.outputs * matrix.inputs
    for vector in vectors(config, whole_model(config)):
        found[vector.name] = found.get(vector.name, 0) + vector.numbers
    with safe_open(directory / SINGLE_FILE, framework="pt") as file:
        stored = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118  # not a dict
    assert found == stored


class Unconnected:
    """The communicator of a rank that computes no step."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, x: torch.Tensor) -> None:
        raise AssertionError("no step is computed here")

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        raise AssertionError("no step is computed here")

    def minimum(self, *numbers: int) -> list[int]:
        raise AssertionError("no step is computed here")


def load(
    directory: Path, rank: int, ranks: int, device: torch.device, native: bool, dtype: str, quantize: str | None
) -> tuple[DecoderWeights, DecoderModel]:
    """The weights of one rank, and a model of them."""
    spec = read_model_spec(directory, dtype, quantize)
    assert spec.decoder is not None
    kernels = our_kernels(spec) if native else None
    shard = shard_decoder(spec.decoder, rank, ranks)
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        make_weight = quantize_weight if kernels is None else CpuQuantizer(kernels).quantize_weight
        source = spec.scheme.source(checkpoint, make_weight, device == META, exact=spec.dtype is torch.float32)
        loader = DecoderWeightLoader(source, spec.decoder, shard, spec.dtype, device, kernels)
        weights = loader.load(lambda percent: None)
    communicator = None if ranks == 1 else Unconnected(rank, ranks)
    cpu = torch.device("cpu")
    model = DecoderModel(spec.decoder, weights, spec.dtype, cpu, kernels, shard=shard, communicator=communicator)
    return weights, model


def vector_bytes(weights: DecoderWeights) -> int:
    """Bytes of all norms and biases."""
    norms, linears = [weights.norm], [weights.head]
    for layer in weights.layers:
        norms += [layer.attention_before, layer.attention_after, layer.mlp_before, layer.mlp_after]
        norms += layer.query_key_norms
        mlps = [layer.mlp] if isinstance(layer.mlp, Mlp) else layer.mlp.experts
        linears += [layer.qkv, layer.output, *(linear for mlp in mlps for linear in mlp if linear is not None)]
        if isinstance(layer.mlp, MixtureOfExperts):
            linears.append(layer.mlp.router)
    held = [tensor for norm in norms if norm is not None for tensor in (norm.weight, norm.bias)]
    held += [linear._bias for linear in linears]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def check(
    directory: Path,
    ranks: int,
    native: bool,
    dtype: str = "auto",
    quantize: str | None = None,
) -> None:
    """Asserts that each rank of a model has the planned bytes and parameters, on CPU with our own kernels if `native`,
    else where weights are held as on a GPU."""
    settings, device = Settings(dtype=dtype, quantize=quantize), CPU if native else GPU
    planned = read_planned_model(directory, settings)
    for rank in range(ranks):
        shard = shard_decoder(planned.config, rank, ranks)
        place = torch.device("cpu") if native else META
        weights, model = load(directory, rank, ranks, place, native, dtype, quantize)
        sizes = matrix_sizes(planned, shard, device)
        listed = [m for m in matrices(planned.config, shard) if m.name in sizes]
        assert sum(matrix.local_numbers for matrix in listed) == weights.footprint.numbers
        assert sum(sizes.values()) == weights.footprint.bytes
        found = rank_memory(planned, shard, device, settings)
        assert found.weights == weights.footprint.bytes + vector_bytes(weights)
        assert found.kv_token == model.kv.token_bytes


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_as_on_a_gpu(kind: str, ranks: int) -> None:
    check(make(kind), ranks, native=False)
    if ranks == 2:
        check(make(kind, tie=True), ranks, native=False, dtype="auto", quantize="int4")


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_on_our_cpu_kernels(kind: str) -> None:
    check(make(kind), 2, native=True)


@pytest.mark.parametrize(
    ("quantize", "native"),
    [*((name, False) for name in ("int8", "int4", "fp8", None)), *((name, True) for name in ("int8", "int4", None))],
)
def test_quantized_at_load(quantize: str | None, native: bool) -> None:
    uneven = make("llama", dtype="bfloat16", hidden=128, intermediate=192)
    check(uneven, 4, native, quantize=quantize)
    check(uneven, 1, native, dtype="float32", quantize=quantize)
    check(make("phi3", dtype="bfloat16", intermediate=200), 2, native, quantize=quantize)


@pytest.mark.parametrize("native", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("form", "plain"),
    [
        (Gptq(bits=4, size=64), ("lm_head",)),
        (Gptq(bits=8, size=32, symmetric=False), ("lm_head",)),
        (Gptq(bits=4, size=32, scattered=True), ("lm_head",)),
        (Awq(size=32), ("lm_head",)),
        (Compressed(size=64), ("lm_head",)),
        (Compressed("int-quantized", 8, -1), ("lm_head",)),
        (Fp8(), ("lm_head",)),
        (Fp8(outputs=32, inputs=32), ("lm_head",)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, tuple) or hasattr(value, "_fields") else "",
)
def test_quantized_checkpoints(form: Form, plain: tuple[str, ...], native: bool, tmp_path: Path) -> None:
    options = {"hidden": 128, "intermediate": 192, "dtype": "bfloat16"}
    directory = write("llama", form, tmp_path, plain, **options).directory
    check(directory, 4, native)
    check(directory, 1, native, quantize="int8")


def test_types_of_the_kv_cache() -> None:
    directory = make("llama")  # heads of 16 elements, which our CPU kernels pad
    shard = whole_model(read_planned_model(directory, Settings()).config)
    for native, names in ((True, ("bfloat16", "int8", None)), (False, ("fp8_e4m3fn", "fp8_e5m2", None))):
        _, model = load(directory, 0, 1, torch.device("cpu"), native, "auto", None)
        for name in names:
            settings, device = Settings(kv_cache_dtype=name), CPU if native else GPU
            planned = rank_memory(read_planned_model(directory, settings), shard, device, settings)
            stored = None if name is None else getattr(torch, name.replace("fp8", "float8"))
            assert planned.kv_token == model.kv._replace(stored_dtype=stored).token_bytes
        if native:
            assert page_size(model.kv, torch.device("cpu")) == CPU_PAGE_SIZE
    assert page_size(model.kv, torch.device("cuda")) == GPU_PAGE_SIZE


def plan(directory: Path, *arguments: str) -> dict[str, Any]:
    """The plan as JSON."""
    done = CliRunner().invoke(main, ["plan", "--model-id", str(directory), "--json", *arguments])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A directory with nothing but the config.json of a model of the dimensions of Llama 3.1 70B."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def test_large_model_on_eight_devices(large: Path) -> None:
    found = plan(large, "--devices", "8xH100")
    assert found["parameters"] == 70_553_706_496
    splits = {split["ranks"]: split for split in found["splits"]}
    assert {ranks: split["replicas"] for ranks, split in splits.items()} == {1: 8, 2: 4, 4: 2, 8: 1}
    assert "141.1 GB" not in splits[2]["problem"]
    assert "weights and reserve take 144" in splits[1]["problem"]
    # Two bytes for each parameter, and four for each of the 161 norms.
    assert splits[1]["weight_bytes"] == 2 * 70_553_706_496 + 2 * 161 * 8192
    # Keys and values of 80 layers, 8 KV heads and 128 elements, of two bytes each.
    assert [splits[ranks]["kv_token_bytes"] for ranks in (1, 2, 4, 8)] == [327_680 // ranks for ranks in (1, 2, 4, 8)]
    assert splits[4]["longest"] == 131072
    assert splits[8]["kv_tokens"] > 2 * splits[4]["kv_tokens"] > 4 * splits[2]["kv_tokens"] > 0
    assert found["recommendation"].startswith("Recommended: 4 replicas of 2 ranks on H100 (--num-shard 2), the fewest")
    wanting = plan(large, "--devices", "8xH100", "--requests", "100")
    assert wanting["recommendation"].startswith("Recommended: 2 replicas of 4 ranks on H100 (--num-shard 4)")
    shared = plan(large, "--devices", "16xH100")["splits"][-1]
    assert (shared["ranks"], shared["kv_token_bytes"]) == (16, 40_960)  # two ranks have the same KV head


def test_large_model_on_one_device(large: Path) -> None:
    found = plan(large, "--devices", "1xH100")
    (split,) = found["splits"]
    assert split["problem"]
    assert found["recommendation"].endswith("What would fit: --quantize int8 with 1 rank on H100, or 2xH100.")
    smaller = plan(large, "--devices", "1xH100", "--quantize", "int4")
    (split,) = smaller["splits"]
    assert not split["problem"]
    assert split["typical_requests"] > 16
    tight = plan(large, "--devices", "2xL4")["recommendation"]
    assert "What would fit: --quantize int4 with 2 ranks on L4" in tight


def test_devices_of_several_kinds(large: Path) -> None:
    found = plan(large, "--quantize", "int4", "--devices", "2xA100-40GB, 1xL4")
    assert [(split["device"], split["ranks"], bool(split["problem"])) for split in found["splits"]] == [
        ("A100-40GB", 1, True),
        ("A100-40GB", 2, False),
        ("L4", 1, True),
    ]
    assert found["recommendation"].startswith("Recommended: 1 replica of 2 ranks on A100-40GB")
    longer = plan(large, "--devices", "4x80GB", "--kv-cache-dtype", "fp8_e4m3fn", "--max-total-tokens", "4000")
    assert longer["splits"][-1]["longest"] == 4000
    assert plan(large, "--devices", "cpu:256GB")["splits"][0]["kv_tokens"] == 4 * 2**30 // (327_680 * 32) * 32


def test_text_without_torch(large: Path) -> None:
    """In a process of its own, which must not import torch."""
    script = (
        "import sys; from tgi.cli import main\n"
        f"main(['plan', '--model-id', {str(large)!r}, '--devices', '8xH100'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    head, _, titles, *rows = done.stdout.splitlines()
    assert "70.55 billion parameters, bfloat16, weights as stored, context 131,072 tokens" in head
    assert titles.split()[:3] == ["device", "ranks", "replicas"]
    assert [row.split()[:4] for row in rows[:2]] == [["H100", "1", "8", "141.11"], ["H100", "2", "4", "70.56"]]
    assert rows[0].split()[-1] == "-"
    assert "an estimate" in done.stdout


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("8xH1000", "'H1000', which is not a known device: T4, "),
        ("A100", "say A100-40GB or A100-80GB"),
        ("cpu", "give it as cpu:64GB"),
        ("0xH100", "a number of devices from 1 to"),
        ("0GB", "a memory above 0 GB"),
        ("H100,,L4", "not a known device"),
        ("", "not a known device"),
        ("x", "not a known device"),
    ],
)
def test_devices_that_are_not_known(devices: str, said: str, large: Path) -> None:
    done = CliRunner().invoke(main, ["plan", "--model-id", str(large), "--devices", devices])
    assert (done.exit_code, said in done.output) == (2, True), done.output


def test_memory_of_devices() -> None:
    assert [(one.number, one.name, one.bytes) for one in parse_devices("8xH100,2xA100-40GB,L4,4 x 80gb,cpu:1.5GB")] == [
        (8, "H100", 80 * 10**9),
        (2, "A100-40GB", 40 * 10**9),
        (1, "L4", 24 * 10**9),
        (4, "80GB", 80 * 10**9),
        (1, "cpu:1.5GB", 1_500_000_000),
    ]


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        ({"model_type": "gpt2"}, [], "runs through transformers, on one device, and cannot be planned"),
        ({"model_type": None}, [], "names no model_type"),
        ({"hidden_size": "many"}, [], "does not describe a model"),
        ({"vocab_size": "many"}, [], "vocab_size is 'many', but a whole number above 0 is expected"),
        ({"num_attention_heads": 0}, [], "does not describe a model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 64}}, [], "4 and 8 bits are read"),
        ({"torch_dtype": "float64"}, [], "dtype 'float64' is not supported"),
        ({"quantization_config": {"quant_method": "gguf"}}, [], "does not follow from the config"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, [], "does not follow from the config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, [], "group_size is missing"),
        ({}, ["--quantize", "gptq"], "is for weights that are quantized already"),
        ({}, ["--kv-cache-dtype", "int8"], "is not for H100"),
        ({}, ["--quantize", "fp8", "--devices", "A100-80GB"], "which A100-80GB does not multiply"),
        ({}, ["--quantize", "fp8", "--devices", "cpu:64GB"], "which cpu:64GB does not multiply"),
        ({}, ["--max-total-tokens", "200000"], "have at most 131072 tokens"),
    ],
)
def test_models_that_cannot_be_planned(change: Any, arguments: list[str], said: str, large: Path) -> None:
    (large / "config.json").write_text(json.dumps(LLAMA_70B | change))
    (large / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5 * 10**9}}))
    done = CliRunner().invoke(main, ["plan", "--model-id", str(large), "--devices", "8xH100", *arguments])
    assert said in done.output, done.output
    assert "Traceback" not in done.output
    if change.get("model_type") == "gpt2":
        assert "the weights take 5.00 GB as stored" in done.output


@pytest.mark.parametrize(
    ("model_id", "said"),
    [("model.gguf", "Plan with the directory or Hub id"), ("owner/name", "HF_HUB_OFFLINE forbids"), ("/none", "exist")],
)
def test_models_that_are_not_here(model_id: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, ["plan", "--model-id", model_id, "--devices", "L4"])
    assert (done.exit_code, said in done.output) == (1, True), done.output
