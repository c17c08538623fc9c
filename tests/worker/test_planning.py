"""`tgi plan`: its sizes are those of models that are loaded, for every family; its answers for known shapes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from scripts.make_gguf import write_gguf, write_t5_gguf, write_vector_gguf
from tests.cases import each_case
from tests.families import STRUCTURES, in_depth, with_variants
from tests.models import model as make
from tests.models import pooling_model, t5_model, vision_model
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.loras import make_adapter
from tests.worker.quantization.checkpoints import Awq, Compressed, Float4, Form, Fp8, Gptq, write
from tests.worker.test_draft_heads import build, small_head, with_mtp
from tgi.cli import main
from tgi.hub.gguf.convert import convert
from tgi.microkernel.settings.table import MTP, Settings
from tgi.worker.attention import page_size
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.quantizer import CpuQuantizer
from tgi.worker.cpu_kernels.recurrent import DeltaRule, GatedNorm, Ssd
from tgi.worker.distributed.sharding import shard_decoder, whole_model
from tgi.worker.kv_cache_sizes import CPU_PAGE_SIZE, GPU_PAGE_SIZE
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import MixtureOfExperts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.lora.launched_deltas import padded_weights
from tgi.worker.lora.packed_deltas import PackedWeights
from tgi.worker.lora.weights import LoraWeights
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.decoder_layer import DecoderWeights
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.models.stacked_experts import open_checkpoint
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.models.weight_shapes import matrices, vectors
from tgi.worker.planning.deployment_plan import (
    PlannedDeployment,
    PlanRequest,
    matrix_sizes,
    rank_memory,
    read_planned_deployment,
    read_planned_model,
)
from tgi.worker.planning.devices import Devices, parse_devices
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.weight_forms import CheckpointForms

pytestmark = pytest.mark.slow

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


@each_case(("kind", "tie"), with_variants(FAMILIES, (False, True)))
def test_shapes_are_those_of_the_checkpoint(kind: str, tie: bool) -> None:
    check_shapes(make(kind, tie=tie))


def test_norms_of_heads_that_are_tensors_of_their_own() -> None:
    check_shapes(make("stablelm", more=(("use_parallel_residual", True), ("qk_layernorm", True))))


def check_shapes(directory: Path) -> None:
    config = read_planned_model(directory, Settings()).config
    found: dict[str, int] = {}
    for matrix in matrices(config, whole_model(config)):
        name = f"{matrix.name}.weight"
        found[name] = found.get(name, 0) + matrix.outputs * matrix.inputs
    for vector in vectors(config, whole_model(config)):
        if vector.numbers:
            found[vector.name] = found.get(vector.name, 0) + vector.numbers
    with open_checkpoint(directory, config) as checkpoint:
        stored = {name: checkpoint.raw_tensor(name).numel() for name in checkpoint}
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
    with open_checkpoint(directory, spec.decoder) as checkpoint, torch.inference_mode():
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
    norms, linears, routers = [weights.norm], [weights.head], []
    norms += [weights.embedding_norm] + ([] if weights.layer_inputs is None else [weights.layer_inputs.norm])
    for layer in weights.layers:
        norms += [layer.attention_before, layer.attention_after, layer.mlp_before, layer.mlp_after]
        mlps = [mlp for mlp in layer.mlps if isinstance(mlp, Mlp)]
        for mixture in layer.mlps:
            if isinstance(mixture, MixtureOfExperts):
                mlps += mixture.experts
                routers.append(mixture.router)
                shared = mixture.shared
                mlps += [] if shared is None else [shared.mlp]
                linears += [] if shared is None or shared.gate is None else [shared.gate]
        if layer.experts is not None:
            norms += [norm for norm in layer.experts if isinstance(norm, Norm)]
        norms += [] if layer.layer_input is None else [layer.layer_input.after]
        norms += [] if layer.residual is None else [layer.residual.after]
        norms += [] if layer.streams is None else [layer.streams.norm]
        if layer.cross is not None:
            norms += [layer.cross.query_norm, layer.cross.key_norm]
        if layer.attention is not None:
            norms += layer.attention.query_key_norms
            linears += [layer.attention.qkv, layer.attention.output]
            if (latent := layer.attention.latent) is not None:
                norms += [latent.query_norm, latent.key_norm]
                linears += [one for one in (latent.query_down, latent.query) if one is not None]
        if layer.recurrence is not None:
            linears += [layer.recurrence.input, layer.recurrence.output]
        linears += [linear for mlp in mlps for linear in mlp if isinstance(linear, Linear)]
    linears += [router.linear for router in routers]
    held = [tensor for norm in norms if norm is not None for tensor in (norm.weight, norm.bias)]
    held += [linear._bias for linear in linears] + [router.bias for router in routers]
    held += [router.expert_scales for router in routers]
    held += [layer.streams.scale for layer in weights.layers if layer.streams is not None]
    held += [layer.attention.sinks for layer in weights.layers if layer.attention is not None]
    mixers = [layer.recurrence.mixer for layer in weights.layers if layer.recurrence is not None]
    parts = [part for mixer in mixers for part in mixer if isinstance(part, DeltaRule | Ssd | GatedNorm)]
    held += [column for one in (*mixers, *parts) for column in one if isinstance(column, torch.Tensor)]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def check(
    directory: Path,
    ranks: int,
    native: bool,
    dtype: str = "auto",
    quantize: str | None = None,
    source: Path | None = None,
) -> None:
    """Asserts that the first and the last rank of a model have the planned bytes and parameters, on CPU with our own
    kernels if `native`, else where weights are held as on a GPU. `source`: what is planned, if it is not the
    directory."""
    settings, device = Settings(dtype=dtype, quantize=quantize), CPU if native else GPU
    planned = read_planned_model(source or directory, settings)
    for rank in {0, ranks - 1}:
        shard = shard_decoder(planned.config, rank, ranks)
        place = torch.device("cpu") if native else META
        weights, model = load(directory, rank, ranks, place, native, dtype, quantize)
        sizes = matrix_sizes(planned, shard, device)
        listed = [m for m in matrices(planned.config, shard) if m.name in sizes]
        assert sum(matrix.local_numbers for matrix in listed) == weights.footprint.numbers
        assert sum(sizes.values()) == weights.footprint.bytes
        found = rank_memory(PlannedDeployment(planned), shard, device, settings)
        assert found.weights == weights.footprint.bytes + vector_bytes(weights) + planned.tower
        assert found.kv_token == model.kv.token_bytes
        assert found.state == (0 if model.kv.state is None else model.kv.state.bytes)


@each_case(("kind", "variant"), with_variants(FAMILIES, ((1, None), (2, None), (4, None), (2, "int4"))))
def test_every_family_as_on_a_gpu(kind: str, variant: tuple[int, str | None]) -> None:
    ranks, quantize = variant
    check(make(kind, tie=quantize is not None), ranks, native=False, quantize=quantize)


@pytest.mark.parametrize(("ranks", "native", "quantize"), [(1, True, None), (2, False, "int4")])
def test_layers_that_attend_to_images(ranks: int, native: bool, quantize: str | None) -> None:
    """And images that are kept as long as their requests run."""
    directory = vision_model("mllama")
    check(directory, ranks, native, quantize=quantize)
    planned, device = read_planned_model(directory, Settings()), CPU if native else GPU
    larger = replace(planned.config, image_states=1 << 20)
    reserves = []
    for config in (planned.config, larger):
        one = PlannedDeployment(planned._replace(config=config))
        reserves.append(rank_memory(one, shard_decoder(config, 0, ranks), device, Settings()).reserve)
    running, pair = (4 if native else 16), 2 * 16 * 4 * 2 // ranks  # key and value of 2 heads of 16 float32 numbers
    assert reserves[1] - reserves[0] == running * 2 * (1 << 20) * pair - (256 << 20)


@pytest.mark.parametrize("kind", in_depth(FAMILIES, (*STRUCTURES, "phi3", "qwen2_moe", "olmo2", "starcoder2")))
def test_families_on_our_cpu_kernels(kind: str) -> None:
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
        (Float4(), ("lm_head",)),
        (Float4("modelopt", "MXFP4"), ("lm_head",)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, tuple) or hasattr(value, "_fields") else "",
)
def test_quantized_checkpoints(form: Form, plain: tuple[str, ...], native: bool, tmp_path: Path) -> None:
    options = {"hidden": 128, "intermediate": 192, "dtype": "bfloat16"}
    directory = write("llama", form, tmp_path, plain, **options).directory
    check(directory, 4, native)
    check(directory, 1, native, quantize="int8")


def test_of_several_schemes_the_most_specific_holds() -> None:
    """As at load: a name before a regular expression, and that before the class of all layers."""
    targets = {"Linear": 4, "re:.*_proj": 8, "model.layers.1.mlp.up_proj": 4}
    groups = {
        str(number): {"targets": [target], "weights": {"num_bits": bits, "group_size": 64}}
        for number, (target, bits) in enumerate(targets.items())
    }
    config = QuantizationConfig(Path("config.json"), {"quant_method": "compressed-tensors", "config_groups": groups})
    forms = CheckpointForms(config, float8=False)
    names = ("model.layers.1.mlp.gate", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    found = [forms.of_layer(name, 128, 256) for name in names]
    assert [form and form.bits for form in found] == [4, 8, 4]


def test_types_of_the_kv_cache() -> None:
    directory = make("llama")  # heads of 16 elements, which our CPU kernels pad
    shard = whole_model(read_planned_model(directory, Settings()).config)
    for native, names in ((True, ("bfloat16", "int8", None)), (False, ("fp8_e4m3fn", "fp8_e5m2", None))):
        _, model = load(directory, 0, 1, torch.device("cpu"), native, "auto", None)
        for name in names:
            settings, device = Settings(kv_cache_dtype=name), CPU if native else GPU
            planned = rank_memory(PlannedDeployment(read_planned_model(directory, settings)), shard, device, settings)
            stored = None if name is None else getattr(torch, name.replace("fp8", "float8"))
            assert planned.kv_token == model.kv._replace(stored_dtype=stored).token_bytes
        if native:
            assert page_size(model.kv, torch.device("cpu")) == CPU_PAGE_SIZE
    assert page_size(model.kv, torch.device("cuda")) == GPU_PAGE_SIZE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def mixed(name: str) -> str:
    """The types of llama.cpp's Q4_K_M, and a plain weight among quantized ones."""
    if name.startswith("blk.1.attn_k"):
        return "F16"
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or "token_embd" in name else "Q4_K"


def without_shifts(name: str) -> str:
    """Types of different bits and groups."""
    return {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q6_K"}.get(name.split(".")[-2], "IQ4_XS")


MIXTURES = {"mixed": mixed, "without shifts": without_shifts}


def imported(files: Path, kind: str, block: str, tie: bool) -> tuple[Path, Path]:
    """A GGUF file of a model, and the directory that the import makes of it."""
    source, directory = files / f"{kind}-{block}-{tie}.gguf", files / f"{kind}-{block}-{tie}"
    if not directory.is_dir():
        model = make(kind, dtype="bfloat16", hidden=256, intermediate=512, tie=tie)
        write_gguf(model, source, MIXTURES.get(block, block))
        directory.mkdir()
        convert(source, directory, lambda *told: None, packed=True)
    return source, directory


@pytest.mark.parametrize("native", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("kind", "block", "tie"),
    [
        ("llama", "Q4_0", True),
        ("llama", "mixed", False),
        ("llama", "without shifts", False),
        ("llama", "F16", False),
        ("phi3", "Q5_1", False),
        ("mixtral", "MXFP4", False),
        ("gemma2", "Q8_0", True),
    ],
)
def test_gguf_files(files: Path, kind: str, block: str, tie: bool, native: bool) -> None:
    if block == "mixed" and not native:
        pytest.skip("whether shifts are finite shows in data, which tensors of the device meta lack")
    source, directory = imported(files, kind, block, tie)
    check(directory, 1, native, source=source)
    check(directory, 4 if kind == "llama" else 2, native, source=source)
    check(directory, 2, native, dtype="float32", source=source)
    check(directory, 2, native, quantize="int8")  # the directory of the import itself


@pytest.mark.parametrize(("kind", "dtype"), [("t5", "bfloat16"), ("flan-t5", "float32"), ("mt5", "auto")])
def test_encoder_decoder_models(kind: str, dtype: str) -> None:
    """The weights of encoder and decoder, and the bytes of a position, of the input or of the answer."""
    directory = t5_model(kind)
    loaded = build_model(directory, dtype, "cpu", lambda stage, percent: None)
    for device in (CPU, GPU):
        deployment = PlannedDeployment(planned := read_planned_model(directory, Settings(dtype=dtype)))
        found = rank_memory(deployment, whole_model(planned.config), device, Settings())
        assert (planned.numbers, found.weights) == (loaded.footprint.numbers, loaded.footprint.bytes)
        assert found.kv_token == loaded.kv.token_bytes
    with Checkpoint(directory) as checkpoint:
        assert planned.numbers == sum(checkpoint.raw_tensor(name).numel() for name in checkpoint)


def test_encoder_decoder_models_from_the_command_line(tmp_path: Path) -> None:
    directory = t5_model("flan-t5", max_distance=128)
    file = write_t5_gguf(directory, tmp_path / "m.gguf", "Q8_0")
    plans = []
    for source in (directory, file):
        command = ["plan", "--model-id", str(source), "--devices", "2xA100-80GB", "--dtype", "bfloat16", "--json"]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.output))
    one, other = ([split | {"command": ""} for split in plan["splits"]] for plan in plans)
    assert one == other
    assert [split["ranks"] for split in one] == [1]
    assert one[0]["longest"] == 4096
    for arguments, said in (
        (["--quantize", "int8"], "--quantize is not for encoder-decoder models"),
        (["--num-shard", "2"], "--num-shard is not for encoder-decoder models"),
        (["--dtype", "float16"], "--dtype float16 is not for encoder-decoder models"),
    ):
        done = CliRunner().invoke(main, ["plan", "--model-id", str(directory), "--devices", "2xA100-80GB", *arguments])
        assert said in done.output


@pytest.mark.parametrize("kind", ["bert", "modernbert", "gemma3", "qwen3"])
def test_models_that_end_in_a_vector(kind: str, tmp_path: Path) -> None:
    """They have no KV cache, and the weights of the files. The plan of a GGUF file is that of the model."""
    directory = pooling_model(kind)
    file = write_vector_gguf(directory, tmp_path / "m.gguf")
    plans = []
    for source in (directory, file):
        command = ["plan", "--model-id", str(source), "--devices", "2xA100-80GB", "--dtype", "float32", "--json"]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.output))
    one, other = ([split | {"command": ""} for split in plan["splits"]] for plan in plans)
    assert one == other
    assert [(split["ranks"], split["kv_token_bytes"], split["longest"]) for split in one] == [(1, 0, 512)]
    with Checkpoint(directory) as checkpoint:
        used = [name for name in checkpoint if "pooler" not in name]
        numbers = sum(checkpoint.raw_tensor(name).numel() for name in used)
    assert one[0]["weight_bytes"] == 4 * (numbers + {"gemma3": 384, "qwen3": 384}.get(kind, 0))  # norms of heads
    for option, value in (("--quantize", "int8"), ("--num-shard", "2")):
        command = ["plan", "--model-id", str(file), "--devices", "2xA100-80GB", option, value]
        done = CliRunner().invoke(main, command)
        assert f"{option} is not for models that end in a vector" in done.output


def test_layers_that_models_with_vectors_lack(tmp_path: Path) -> None:
    file = write_gguf(make("lfm2"), tmp_path / "m.gguf", metadata={"lfm2.pooling_type": 2})
    done = CliRunner().invoke(main, ["plan", "--model-id", str(file), "--devices", "A100-80GB"])
    assert f"recurrent layers in {file}: not served in a model that ends in a vector" in done.output


def test_texts_that_are_shorter_than_the_positions_allow(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(pooling_model("bert"), directory)
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    done = CliRunner().invoke(main, ["plan", "--model-id", str(directory), "--devices", "A100-80GB", "--json"])
    assert [split["longest"] for split in json.loads(done.output)["splits"]] == [100]


@pytest.mark.parametrize("native", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("quantize", [None, "int4", "gptq"])
def test_draft_models(quantize: str | None, native: bool, tmp_path: Path) -> None:
    """They are whole on each rank, in the dtype of the served model; a format of checkpoints is not theirs."""
    served, draft = make("llama", dtype="bfloat16", hidden=128), make("qwen2", context=128, layers=1)
    if quantize == "gptq":
        served = write("llama", Gptq(bits=4, size=64), tmp_path, ("lm_head",), hidden=128, dtype="bfloat16").directory
    settings, device = Settings(quantize=quantize), CPU if native else GPU
    planned = read_planned_deployment(PlanRequest(served, settings, [device], draft=draft))
    assert planned.context == 128
    place = torch.device("cpu") if native else META
    own = None if quantize == "gptq" else quantize
    whole, draft_model = load(draft, 0, 1, place, native, "bfloat16", own)
    for rank in range(2):
        weights, model = load(served, rank, 2, place, native, "auto", quantize)
        found = rank_memory(planned, shard_decoder(planned.served.config, rank, 2), device, settings)
        both = sum(one.footprint.bytes + vector_bytes(one) for one in (weights, whole))
        assert found.weights == both
        assert found.kv_token == model.kv.token_bytes + draft_model.kv.token_bytes


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_heads_that_draft(quantize: str | None, tmp_path: Path) -> None:
    """They are whole on each rank, and what a request may hold is that of the model."""
    llama, deepseek = make("llama", layers=6), with_mtp("deepseek_v3", tmp_path / "deepseek")
    eagle3 = small_head(tmp_path / "head", llama, flags=("norm_before_fc", "norm_before_residual"))
    deeper = small_head(tmp_path / "deeper", llama, layers=2)
    for directory, draft in ((llama, eagle3), (llama, deeper), (deepseek, None)):
        settings = Settings(quantize=quantize, draft_model_id=MTP if draft is None else str(draft))
        planned = read_planned_deployment(PlanRequest(directory, settings, [CPU], draft=draft))
        assert planned.context == planned.served.config.context_length
        shard = shard_decoder(planned.served.config, 1, 2)
        alone = rank_memory(planned._replace(draft=None), shard, CPU, settings)
        found = rank_memory(planned, shard, CPU, settings)
        _, head = build(directory, True, "float32", draft, quantize=quantize)
        own = head._weights
        norms = [norm for norm in (own.embedding_norm, own.hidden_norm, *own.fusion_norms) if norm is not None]
        vectors = vector_bytes(head._decoder._weights) + sum(norm.weight.nbytes for norm in norms)
        assert found.weights - alone.weights == head.footprint.bytes + vectors
        assert found.kv_token - alone.kv_token == head.kv.token_bytes
    assert plan(llama, "--devices", "2xL4", "--draft-model-id", str(eagle3))["draft_parameters"] == 107_456


@pytest.mark.parametrize("native", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("kind", ["llama", "phi3", "olmo2", "starcoder2", "mixtral"])
def test_adapters(kind: str, native: bool, tmp_path: Path) -> None:
    directory = make(kind, dtype="bfloat16", intermediate=200)
    suffixes = (
        ("q_proj", "v_proj", "qkv_proj", "o_proj") if kind in ("phi3", "mixtral") else ("k_proj", "o_proj", "_fc")
    )
    adapters = (
        make_adapter(tmp_path / "all", directory, rank=5, targets=(*suffixes, "up_proj", "down_proj", "c_proj")),
        make_adapter(tmp_path / "some", directory, rank=40, targets=suffixes, ranks={"o_proj": 3}, layers=[1]),
    )
    settings, device = Settings(), CPU if native else GPU
    planned = read_planned_deployment(PlanRequest(directory, settings, [device], adapters=adapters))
    for rank in range(2):
        # Adapters of torch's kernels are float32 on CPU, and in the model's dtype on a GPU, where our kernels pad them.
        _, model = load(directory, rank, 2, torch.device("cpu"), native, "auto", None)
        held = 0
        for adapter in adapters:
            content = model.load_adapter(adapter)
            if isinstance(content, PackedWeights):
                held += sum(tensor.nbytes for tensor in content._kept)
            else:
                assert isinstance(content, LoraWeights)
                content = padded_weights(content)
                held += sum(2 * part.numel() for pairs in content.layers for pair in pairs if pair for part in pair)
        found = rank_memory(planned, shard_decoder(planned.served.config, rank, 2), device, settings)
        assert found.adapters == held > 0


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
    assert "weights and reserve take 146" in splits[1]["problem"]
    # Two bytes for each parameter, and four for each of the 161 norms.
    assert splits[1]["weight_bytes"] == 2 * 70_553_706_496 + 2 * 161 * 8192
    # Keys and values of 80 layers, 8 KV heads and 128 elements, of two bytes each.
    assert [splits[ranks]["kv_token_bytes"] for ranks in (1, 2, 4, 8)] == [327_680 // ranks for ranks in (1, 2, 4, 8)]
    assert splits[4]["longest"] == 131072
    assert splits[8]["kv_tokens"] > 2 * splits[4]["kv_tokens"] > 4 * splits[2]["kv_tokens"] > 0
    assert found["recommendation"].startswith("Recommended: 4 replicas of 2 ranks on H100, the fewest")
    assert found["commands"] == [f"tgi up --model-id {large} --num-shard 2 --replicas 4"]
    for name in ("kv_tokens", "longest_requests", "typical_requests"):
        assert splits[2][f"all_{name}"] == 4 * splits[2][name] > 0
    wanting = plan(large, "--devices", "8xH100", "--requests", "100")
    assert wanting["recommendation"].startswith("Recommended: 2 replicas of 4 ranks on H100, the fewest")
    shared = plan(large, "--devices", "16xH100")["splits"][-1]
    assert (shared["ranks"], shared["kv_token_bytes"]) == (16, 40_960)  # two ranks have the same KV head


def test_chosen_numbers_of_ranks_and_replicas(large: Path) -> None:
    (split,) = plan(large, "--devices", "8xH100", "--num-shard", "4", "--replicas", "1")["splits"]
    assert (split["ranks"], split["replicas"], split["idle"]) == (4, 1, 4)
    assert split["command"] == f"tgi up --model-id {large} --num-shard 4"
    found = plan(large, "--devices", "8xH100", "--replicas", "2")["splits"]
    assert [(split["ranks"], split["replicas"]) for split in found] == [(1, 2), (2, 2), (4, 2)]
    nodes = plan(large, "--devices", "2xcpu:256GB", "--kv-cache-dtype", "int8")["splits"]
    assert [node["command"] for node in nodes] == [
        f"tgi up --model-id {large} --kv-cache-dtype int8 --device cpu --replicas 2",
        f"tgi up --model-id {large} --kv-cache-dtype int8 --device cpu --num-shard 2",
    ]
    for arguments, said in (
        (["--num-shard", "2", "--replicas", "5"], "has fewer than the 10 devices of a kind"),
        (["--num-shard", "12", "--devices", "24xH100"], "cannot be divided among 12 ranks"),
        (["--num-shard", "0"], "`num_shard` cannot be < 1"),
        (["--replicas", "0"], "--replicas"),
    ):
        done = CliRunner().invoke(main, ["plan", "--model-id", str(large), "--devices", "8xH100", *arguments])
        assert done.exit_code != 0
        assert said in done.output.replace("\n", " "), done.output


def test_draft_models_and_adapters_of_a_large_model(large: Path, tmp_path: Path) -> None:
    small, adapter = tmp_path / "small", tmp_path / "adapter"
    for directory in (small, adapter):
        directory.mkdir()
    config = LLAMA_70B | {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16}
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    lora = {"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(lora))
    devices = ["--devices", "8xH100", "--num-shard", "4"]
    (alone,) = plan(large, *devices)["splits"]
    found = plan(large, *devices, "--draft-model-id", str(small), "--lora-adapters", f"one={adapter},two={adapter}")
    (split,) = found["splits"]
    # Of q_proj a rank has a quarter of the outputs, of o_proj a quarter of the inputs; two adapters.
    assert split["adapter_bytes"] == 2 * 2 * 80 * 16 * 2 * (8192 + 8192 // 4)
    assert split["kv_token_bytes"] == alone["kv_token_bytes"] + 16 * 2 * 8 * 128 * 2
    assert split["weight_bytes"] > alone["weight_bytes"] + 2 * found["draft_parameters"]
    assert split["longest"] == found["context"] == 8192
    assert split["command"] == (
        f"tgi up --model-id {large} --lora-adapters one={adapter},two={adapter} --draft-model-id {small} --num-shard 4 "
        "--replicas 2"
    )
    (adapter / "adapter_config.json").write_text(json.dumps(lora | {"r": 512, "target_modules": "all-linear"}))
    large_adapters = ",".join(f"a{number}={adapter}" for number in range(3))
    (full,) = plan(large, *devices, "--lora-adapters", large_adapters)["splits"]
    assert "adapters take" in full["problem"]
    assert "lower --memory-fraction" in full["problem"]
    (fits,) = plan(large, *devices, "--lora-adapters", large_adapters, "--memory-fraction", "0.2")["splits"]
    assert not fits["problem"]
    for arguments, said in (
        (
            ["--draft-model-id", str(small), "--max-total-tokens", "9000"],
            "sequences have at most 8192",
        ),
        (["--lora-adapters", f"one={small}"], "has no adapter_config.json"),
        (["--lora-adapters", "one=@"], "Invalid LoRA adapter format"),
    ):
        done = CliRunner().invoke(main, ["plan", "--model-id", str(large), *devices, *arguments])
        assert done.exit_code in (1, 2)
        assert said in done.output, done.output
    (adapter / "adapter_config.json").write_text(json.dumps(lora | {"target_modules": ["c_fc"]}))
    done = CliRunner().invoke(main, ["plan", "--model-id", str(large), *devices, "--lora-adapters", f"one={adapter}"])
    assert "names no projection of the model" in done.output


def test_large_model_on_one_device(large: Path) -> None:
    found = plan(large, "--devices", "1xH100")
    (split,) = found["splits"]
    assert split["problem"]
    assert found["recommendation"].endswith("What would fit: --quantize int8 with 1 rank on H100, or 2xH100.")
    smaller = plan(large, "--devices", "1xH100", "--quantize", "int4")
    (split,) = smaller["splits"]
    assert not split["problem"]
    assert split["typical_requests"] > 16
    tight = plan(large, "--devices", "4xL4")["recommendation"]
    assert "What would fit: --quantize int8 with 4 ranks on L4" in tight


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
    head, _, _, titles, *rows = done.stdout.splitlines()
    assert "70.55 billion parameters, bfloat16, weights as stored, context 131,072 tokens" in head
    assert titles.split()[:3] == ["device", "ranks", "replicas"]
    assert [row.split()[:4] for row in rows[:2]] == [["H100", "1", "8", "141.11"], ["H100", "2", "4", "71.61"]]
    assert rows[0].split()[-1] == "-"
    assert "an estimate" in done.stdout
    assert rows[-1] == f"tgi up --model-id {large} --num-shard 2 --replicas 4"


@each_case(
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
        ({"model_type": "persimmon"}, [], "runs through transformers, on one device, and cannot be planned"),
        ({"model_type": None}, [], "names no model_type"),
        ({"hidden_size": "many"}, [], "does not describe a model"),
        ({"vocab_size": "many"}, [], "vocab_size is 'many', but a whole number above 0 is expected"),
        ({"num_attention_heads": 0}, [], "does not describe a model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 64}}, [], "4 and 8 bits is read"),
        ({"torch_dtype": "float64"}, [], "dtype 'float64' is not supported"),
        ({"quantization_config": {"quant_method": "gguf"}}, [], "has no weights"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, [], "does not follow from the config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, [], "group_size is missing"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
            [],
            "does not follow from the config",
        ),
        ({}, ["--quantize", "gptq"], "is for weights that are quantized already"),
        ({}, ["--kv-cache-dtype", "int8"], "a type of the KV cache for CPU"),
        ({}, ["--quantize", "fp8", "--devices", "A100-80GB"], "which A100-80GB does not multiply"),
        ({}, ["--quantize", "fp8", "--devices", "cpu:64GB"], "which cpu:64GB does not multiply"),
        ({}, ["--max-total-tokens", "200000"], "have at most 131072 tokens"),
    ],
)
def test_models_that_cannot_be_planned(change: Any, arguments: list[str], said: str, large: Path) -> None:
    (large / "config.json").write_text(json.dumps(LLAMA_70B | change))
    if change.get("model_type") == "persimmon":
        (large / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5 * 10**9}}))
    done = CliRunner().invoke(main, ["plan", "--model-id", str(large), "--devices", "8xH100", *arguments])
    assert said in done.output, done.output
    assert "Traceback" not in done.output
    if change.get("model_type") == "persimmon":
        assert "the weights take 5.00 GB as stored" in done.output


@pytest.mark.parametrize(
    ("model_id", "said"),
    [("model.gguf", "does not exist. Name a GGUF file"), ("owner/name", "HF_HUB_OFFLINE forbids"), ("/none", "exist")],
)
def test_models_that_are_not_here(model_id: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, ["plan", "--model-id", model_id, "--devices", "L4"])
    assert (done.exit_code, said in done.output) == (1, True), done.output


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json"])
def test_models_that_cannot_be_read(name: str, large: Path) -> None:
    (large / name).unlink(missing_ok=True)
    (large / name).symlink_to("/proc/self/mem")  # reading its beginning fails, for root too
    done = CliRunner().invoke(main, ["plan", "--model-id", str(large), "--devices", "L4"])
    assert (done.exit_code, "cannot be read" in done.output) == (1, True), done.output
    assert isinstance(done.exception, SystemExit)
