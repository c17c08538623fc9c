"""Writes quantized checkpoints of small models in the formats of other tools, each after the definition of the format.

    written = write("llama", Gptq(bits=4, size=32), directory)

`written.directory` is the checkpoint, and `written.twin` a model of plain weights: the stored ones dequantized to
float32, with a zero point taken as the shift -scale * zero in float16.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import model

Array = NDArray[Any]
Columns = dict[str, Tensor]  # what a format stores for one layer, below its name
WEIGHTS = "model.safetensors"


class RoundedWeight(NamedTuple):
    """An affine weight [outputs, inputs]: scales * (numbers - zeros), in groups of `size` inputs."""

    numbers: Array  # int64 [outputs, inputs], from 0
    zeros: Array  # int64 [outputs, groups]
    scales: Array  # float16 [outputs, groups]
    size: int

    def stands_for(self, bits: int) -> Tensor:
        """Float32, with the shift in float16."""
        middle = 1 << (bits - 1)
        symmetric = bool((self.zeros == middle).all())
        base = middle if symmetric or bits == 8 else 0
        scales = self.scales.astype(np.float32)
        shifts = (-scales * (self.zeros - base)).astype(np.float16).astype(np.float32)
        scaled = self.numbers.astype(np.float32) - base
        scaled *= scales.repeat(self.size, 1)
        return torch.from_numpy(scaled if symmetric else scaled + shifts.repeat(self.size, 1))

    def exactly(self) -> Tensor:
        """Float64, by the formula above."""
        whole = (self.numbers - self.zeros.repeat(self.size, 1)) * self.scales.astype(np.float64).repeat(self.size, 1)
        return torch.from_numpy(whole)


def rounded(weight: Tensor, bits: int, size: int, symmetric: bool) -> RoundedWeight:
    """Rounds a weight to the nearest levels. `size` -1: one group."""
    values = weight.double().numpy()
    outputs, inputs = values.shape
    size = inputs if size == -1 else size
    grouped = values.reshape(outputs, -1, size)
    top = (1 << bits) - 1
    if symmetric:
        scales = np.abs(grouped).max(2) / (top // 2)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        scales = (high - low) / top
        zeros = np.rint(-low / scales).astype(np.int64)
    scales = scales.astype(np.float16)
    numbers = np.rint(grouped / scales[:, :, None].astype(np.float64)) + zeros[:, :, None]
    return RoundedWeight(numbers.clip(0, top).astype(np.int64).reshape(outputs, inputs), zeros, scales, size)


def words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Numbers [rows, n] in words of 32 bits [rows, n * bits / 32], rounded up; the n-th from below is order[n]."""
    each = 32 // bits
    numbers = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each)))
    found = np.zeros((numbers.shape[0], numbers.shape[1] // each), np.uint32)
    for place, number in enumerate(order or range(each)):
        found |= numbers[:, number::each].astype(np.uint32) << np.uint32(bits * place)
    return found.view(np.int32)


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


class Gptq(NamedTuple):
    bits: int = 4
    size: int = 32
    symmetric: bool = True
    version: str = "gptq"
    scattered: bool = False  # act-order: a group has inputs that are not consecutive
    dynamic: dict[str, Any] = {}

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.size,
            "sym": self.symmetric,
            "desc_act": self.scattered,
            "checkpoint_format": self.version,
            "dynamic": self.dynamic,
        }

    def columns(self, weight: Tensor) -> tuple[Columns, Tensor]:
        inputs = weight.shape[1]
        order = np.random.default_rng(0).permutation(inputs) if self.scattered else np.arange(inputs)
        found = rounded(weight[:, torch.from_numpy(order)], self.bits, self.size, self.symmetric)
        back = np.argsort(order)
        less = 1 if self.version == "gptq" else 0
        top = (1 << self.bits) - 1
        stored = {
            "qweight": tensor(words(found.numbers[:, back], self.bits).T),
            "qzeros": tensor(words((found.zeros.T - less) & top, self.bits)),
            "scales": tensor(found.scales.T),
            "g_idx": tensor((back // found.size).astype(np.int32)),
        }
        stands_for = found.exactly().float() if self.scattered else found.stands_for(self.bits)
        return stored, stands_for[:, torch.from_numpy(back)]


class Awq(NamedTuple):
    size: int = 32

    def config(self) -> dict[str, Any]:
        return {"quant_method": "awq", "bits": 4, "group_size": self.size, "zero_point": True, "version": "gemm"}

    def columns(self, weight: Tensor) -> tuple[Columns, Tensor]:
        found = rounded(weight, 4, self.size, False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {
            "qweight": tensor(words(found.numbers.T, 4, order)),
            "qzeros": tensor(words(found.zeros.T, 4, order)),
            "scales": tensor(found.scales.T),
        }
        return stored, found.stands_for(4)


class Compressed(NamedTuple):
    """compressed-tensors with integers. `size` -1: one scale for each output."""

    form: str = "pack-quantized"
    bits: int = 4
    size: int = 32
    symmetric: bool = True

    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.size == -1 else "group",
            "group_size": None if self.size == -1 else self.size,
        }
        activations = {"num_bits": 8, "dynamic": True} if self.form == "int-quantized" else None
        return compressed(self.form, weights, activations)

    def columns(self, weight: Tensor) -> tuple[Columns, Tensor]:
        found = rounded(weight, self.bits, self.size, self.symmetric)
        middle = 1 << (self.bits - 1)
        stored = {"weight_scale": tensor(found.scales)}
        if self.form == "pack-quantized":
            stored["weight_packed"] = tensor(words(found.numbers, self.bits))
            stored["weight_shape"] = torch.tensor(weight.shape)
            zeros = words(found.zeros.T, self.bits).T
        else:
            stored["weight"] = tensor((found.numbers - middle).astype(np.int8))
            zeros = (found.zeros - middle).astype(np.int8)
        if not self.symmetric:
            stored["weight_zero_point"] = tensor(zeros)
        return stored, found.stands_for(self.bits)


class Fp8(NamedTuple):
    """8-bit floats with a scale for each block of outputs and inputs; 0: one scale for all."""

    method: str = "fp8"
    outputs: int = 0
    inputs: int = 0
    name: str = "weight_scale"

    def config(self) -> dict[str, Any]:
        blocks = [self.outputs, self.inputs] if self.outputs > 1 else None
        if self.method != "compressed-tensors":
            return {"quant_method": self.method, "activation_scheme": "dynamic", "weight_block_size": blocks}
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": blocks}
        return compressed("float-quantized", weights, {"num_bits": 8, "type": "float"})

    def columns(self, weight: Tensor) -> tuple[Columns, Tensor]:
        rows, wide = self.outputs or weight.shape[0], self.inputs or weight.shape[1]
        factors = torch.ones_like(weight)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // wide))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                block = slice(row * rows, (row + 1) * rows), slice(column * wide, (column + 1) * wide)
                scales[row, column] = weight[block].abs().max() / 448
                factors[block] = scales[row, column]
        stored = (weight / factors).to(torch.float8_e4m3fn)
        scales = scales.flatten() if scales.numel() == 1 else scales
        return {"weight": stored, self.name: scales}, stored.float() * factors


class Float4(NamedTuple):
    """4-bit floats with a factor for each 16 (NVFP4) or 32 inputs (MXFP4)."""

    tool: str = "compressed-tensors"
    kind: str = "NVFP4"

    @property
    def size(self) -> int:
        return 16 if self.kind == "NVFP4" else 32

    def config(self) -> dict[str, Any]:
        if self.tool == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": self.kind, "ignore": ["lm_head"]}
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": self.size}
        return compressed(f"{self.kind.lower()}-pack-quantized", weights, weights | {"dynamic": "local"})

    def columns(self, weight: Tensor) -> tuple[Columns, Tensor]:
        """The number of a code is (-1)^sign * 2^(exponent - 1) * (1 + mantissa / 2), or mantissa / 2 if the exponent
        is 0, of one, two and one bits."""
        numbers = torch.tensor(
            [float(m) / 2 if e == 0 else 2.0 ** (e - 1) * (1 + m / 2) for e in range(4) for m in (0, 1)]
        )
        numbers = torch.cat((numbers, -numbers))
        outputs, inputs = weight.shape
        grouped = weight.view(outputs, -1, self.size)
        largest = grouped.abs().amax(2) / 6
        if self.kind == "NVFP4":
            whole = largest.max().reshape(1) / 448
            scales = (largest / whole).to(torch.float8_e4m3fn)
            factors = scales.float() * whole
            if self.tool == "compressed-tensors":
                whole = 1 / whole
                factors = scales.float() / whole
            name, whole = ("weight_scale_2", whole[0]) if self.tool == "modelopt" else ("weight_global_scale", whole)
            stored = {"weight_scale": scales, name: whole, "input_scale": torch.ones(())}
        else:
            exponents = largest.log2().ceil()
            stored, factors = {"weight_scale": (exponents + 127).to(torch.uint8)}, exponents.exp2()
        codes = (grouped[..., None] / factors[:, :, None, None] - numbers).abs().argmin(-1).view(outputs, inputs)
        packed = "weight" if self.tool == "modelopt" else "weight_packed"
        stored[packed] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return stored, numbers[codes] * factors.repeat_interleave(self.size, 1)


Form = Gptq | Awq | Compressed | Fp8 | Float4


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }


class Written(NamedTuple):
    directory: Path
    twin: Path


def write(kind: str, form: Form, directory: Path, plain: tuple[str, ...] = (), **options: Any) -> Written:
    """A checkpoint of a small model of `kind`. Layers whose name has one of `plain` in it are not quantized."""
    original = model(kind, **options)
    quantized, twin = directory / "quantized", directory / "twin"
    for copy in (quantized, twin):
        shutil.copytree(original, copy)
    tensors = load_file(original / WEIGHTS)
    stored, meant = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if value.ndim == 2 and "embed" not in name and not any(part in name for part in plain):
            layer = name.removesuffix(".weight")
            columns, meant[name] = form.columns(value.float())
            del stored[name]
            stored |= {f"{layer}.{column}": value for column, value in columns.items()}
    save_file(stored, quantized / WEIGHTS)
    save_file(meant, twin / WEIGHTS)
    change_config(quantized, lambda config: config.update(quantization_config=form.config()))
    return Written(quantized, twin)


def write_layer(form: Form, weight: Tensor, directory: Path) -> Tensor:
    """A checkpoint of one layer, "some.layer", and its dequantized weight."""
    columns, meant = form.columns(weight)
    save_file({f"some.layer.{column}": value for column, value in columns.items()}, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps({"quantization_config": form.config()}))
    return meant


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    """For change_tensors: this change of one column of the layer."""
    return lambda tensors: tensors.update({f"some.layer.{name}": change(tensors[f"some.layer.{name}"])})
