"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tgi.worker.mixers.interface import size_obstacle
from tgi.worker.tensor_shapes import MatrixShape, StateShape, VectorShape


class DeltaTensors(StrEnum):
    """How a checkpoint divides the projections of the input: queries q, keys k, values v, the gate z, and b and a."""

    BY_KEY_HEAD = "by_key_head"  # in_proj_qkvz has q, k, v and z of each key head, in_proj_ba b and a of each
    BY_KIND = "by_kind"  # in_proj_qkv has all q, then all k, then all v; in_proj_z, in_proj_b and in_proj_a
    SEPARATE = "separate"  # q_proj, k_proj, v_proj, g_proj (z), b_proj and a_proj, and a convolution for each of qkv


@dataclass(frozen=True)
class GatedDeltaConfig:
    """The gated delta rule of cpu_kernels/delta_rule.h (Qwen3-Next), of a convolution of q, k and v over the last
    `kernel` tokens. Each key head belongs to as many neighbouring value heads.

    Implements MixerConfig. Ranks divide the key heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int  # elements of a head
    value_dim: int
    kernel: int
    tensors: str = DeltaTensors.BY_KIND
    negative: bool = False  # the state's matrix may have negative eigenvalues: b counts twice
    norm_epsilon: float | None = None  # of the norm of the result; None: that of all norms

    @property
    def keys(self) -> int:
        """Elements of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What is convolved: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def output_name(self) -> str:
        """The projection of the result, after the prefix."""
        return "o_proj" if self.tensors == DeltaTensors.SEPARATE else "out_proj"

    @property
    def norm_name(self) -> str:
        """The norm of the result, after the prefix."""
        return "o_norm" if self.tensors == DeltaTensors.SEPARATE else "norm"

    @property
    def inputs(self) -> list[tuple[str, int]]:
        """The tensors of q, k, v and z, after the prefix, with their outputs, in this order; the same name more than
        once: they are parts of one."""
        names = {
            DeltaTensors.BY_KEY_HEAD: ["in_proj_qkvz"] * 4,
            DeltaTensors.BY_KIND: ["in_proj_qkv"] * 3 + ["in_proj_z"],
            DeltaTensors.SEPARATE: ["q_proj", "k_proj", "v_proj", "g_proj"],
        }[DeltaTensors(self.tensors)]
        return list(zip(names, (self.keys, self.keys, self.values, self.values), strict=True))

    @property
    def gates(self) -> list[str]:
        """The tensors of b and a, after the prefix."""
        return {
            DeltaTensors.BY_KEY_HEAD: ["in_proj_ba"] * 2,
            DeltaTensors.BY_KIND: ["in_proj_b", "in_proj_a"],
            DeltaTensors.SEPARATE: ["b_proj", "a_proj"],
        }[DeltaTensors(self.tensors)]

    @property
    def convolutions(self) -> list[tuple[str, int]]:
        """The tensors of the convolution, after the prefix, with their channels."""
        if self.tensors != DeltaTensors.SEPARATE:
            return [("conv1d", self.channels)]
        return [("q_conv1d", self.keys), ("k_conv1d", self.keys), ("v_conv1d", self.values)]

    @property
    def state(self) -> dict[str, StateShape]:
        """The last inputs of the convolution, the oldest first, and a matrix of each value head."""
        return {
            "window": StateShape((self.kernel - 1, self.channels)),
            "matrix": StateShape((self.value_heads, self.key_dim, self.value_dim), wide=True),
        }

    @property
    def kernel_obstacle(self) -> str:
        return size_obstacle(self.kernel, self.key_dim, self.value_dim)

    @property
    def gpu_kernels(self) -> tuple[str, ...]:
        return ("causal_conv", "delta_rule")

    def part(self, local: range) -> "GatedDeltaConfig":
        values = len(local) * self.value_heads // self.key_heads
        return replace(self, key_heads=len(local), value_heads=values)

    def matrices(self, hidden: int, local: range, name: str) -> Iterator[MatrixShape]:
        own, value = self.part(local), self.values // self.key_heads
        for gate in self.gates:
            heads = self.value_heads, hidden, own.value_heads
            yield MatrixShape(f"{name}.{gate}", *heads, range(hidden), quantizable=False)
        for (part, outputs), (_, mine) in zip(self.inputs, own.inputs, strict=True):
            yield MatrixShape(f"{name}.{part}", outputs, hidden, mine, range(hidden), stack=f"{name}.in_proj")
        columns = range(local.start * value, local.stop * value)
        yield MatrixShape(f"{name}.{self.output_name}", hidden, self.values, hidden, columns)

    def vectors(self, hidden: int, local: range, name: str, first: bool) -> Iterator[VectorShape]:
        own = self.part(local)
        for vector in ("A_log", "dt_bias"):
            yield VectorShape(f"{name}.{vector}", self.value_heads, own.value_heads, True)
        yield VectorShape(f"{name}.{self.norm_name}.weight", self.value_dim, self.value_dim, True)
        for (conv, channels), (_, mine) in zip(self.convolutions, own.convolutions, strict=True):
            yield VectorShape(f"{name}.{conv}.weight", channels * self.kernel, mine * self.kernel, True)
