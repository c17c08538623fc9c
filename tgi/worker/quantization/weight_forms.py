"""WeightForm: how the numbers of a weight are stored, as sizes, without torch.

Weights quantized at load have the forms of quantize.py. Of a checkpoint format, the config tells the form of a layer,
except where its tensors decide: a layer that the config does not name may be plain, and a weight that QuantizedWeight
cannot represent exactly is dequantized at load.
"""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from typing_extensions import override

from tgi.hub.weight_files import StoredTensor
from tgi.microkernel.errors import UserError
from tgi.worker.quantization.config import QuantizationConfig

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # the names of the first and the last layer in checkpoints
POSITIONS = "model.embed_positions"  # learned vectors of positions
GROUPS = (16, 32, 64, 128)  # supported group sizes: inputs that share a scale
FACTOR_GROUP = 32  # inputs that share a factor of the codebook
MX_GROUP, NV_GROUP = 32, 16  # inputs of 4-bit floats that share a factor, in MXFP4 and NVFP4
FLOAT8_MULTIPLE = 16  # of outputs and inputs, for torch's products of 8-bit floats


class WeightForm(NamedTuple):
    """The columns of a QuantizedWeight (weight.py)."""

    bits: int  # of a code
    scale_bytes: int = 2
    group: int | None = None  # inputs that share a scale; None: all
    shifts: bool = False
    factors: int = 0  # inputs that share one; 0: there are none
    floating: bool = False  # the codes are floats


INT8, INT4 = WeightForm(8), WeightForm(4, factors=FACTOR_GROUP)
FLOAT8 = WeightForm(8, scale_bytes=4, floating=True)
NVFP4, MXFP4 = (WeightForm(4, scale_bytes=8, factors=group, floating=True) for group in (NV_GROUP, MX_GROUP))
# On our CPU kernels scales are of groups, in float16 where they are powers of two.
WITH_GROUP_SCALES = {
    NVFP4: WeightForm(4, scale_bytes=4, group=NV_GROUP, floating=True),
    MXFP4: WeightForm(4, group=MX_GROUP, floating=True),
}
# The algorithms of modelopt that are read, and the forms of their weights; None: the tensors alone show it.
MODELOPT_ALGORITHMS = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "FP8": FLOAT8,
    "FP8_PER_CHANNEL_PER_TOKEN": FLOAT8,
    "MIXED_PRECISION": None,
}
MADE_AT_LOAD = {"int8": INT8, "int4": INT4, "fp8": FLOAT8}


def form_made_at_load(made: str, name: str, outputs: int, inputs: int) -> WeightForm | None:
    """The form that --quantize makes of the plain weight [outputs, inputs] of a layer; None: it stays plain."""
    outer = name in (EMBEDDING, HEAD)
    if inputs % FACTOR_GROUP:
        return None
    if made == "fp8":
        return None if outer or outputs % FLOAT8_MULTIPLE or inputs % FLOAT8_MULTIPLE else FLOAT8
    return INT8 if outer else MADE_AT_LOAD[made]


def weight_bytes(form: WeightForm | None, outputs: int, inputs: range, of_inputs: int, itemsize: int) -> int:
    """Bytes of the part of a weight with these outputs and inputs, of `of_inputs`; `itemsize` is that of a plain
    weight, which the part is too if it does not begin and end with a group that can be represented."""
    plain = outputs * len(inputs) * itemsize
    if form is None:
        return plain
    group = form.group
    if len(inputs) < of_inputs:
        if form.factors and (inputs.start % form.factors or inputs.stop % form.factors):
            return plain
        if group is not None and (inputs.start % group or inputs.stop % group):
            group = math.gcd(group, inputs.start, inputs.stop)
            if group not in GROUPS:
                return plain
    scales = 1 if group is None else len(inputs) // group
    each = len(inputs) * form.bits // 8 + scales * form.scale_bytes * (2 if form.shifts else 1)
    return outputs * (each + (len(inputs) // form.factors if form.factors else 0))


def common_form(forms: Sequence[WeightForm | None], inputs: int) -> WeightForm | None:
    """The form of stacked weights of `inputs` columns with these forms, as of `stack_weights`; None: it is plain."""
    given = [form for form in forms if form is not None]
    if len(given) < len(forms) or len(set(given)) == 1:
        return given[0] if len(given) == len(forms) else None
    if any(form.floating and form.bits == 8 for form in given):
        return None
    given = [_as_integers(form) for form in given]
    groups = [form.group or inputs for form in given]
    group = min(groups)
    if any(one % group for one in groups):
        return None
    return WeightForm(
        bits=max(8 if form.factors else form.bits for form in given),
        scale_bytes=max(form.scale_bytes for form in given),
        group=None if group == inputs else group,
        shifts=any(form.shifts for form in given),
    )


def _as_integers(form: WeightForm) -> WeightForm:
    """That of QuantizedWeight.as_integers."""
    if not form.floating:
        return form
    group = form.group or form.factors
    return WeightForm(8, scale_bytes=4 if group == NV_GROUP else 2, group=group)


class StoredForms(Protocol):
    """The forms of the layers of a checkpoint."""

    def of_layer(self, name: str, outputs: int, inputs: int) -> WeightForm | None:
        """The form of the weight [outputs, inputs] of a layer; None: it is plain, in the files or after loading."""

    def plain_bytes(self, name: str) -> int | None:
        """Bytes of a number of a plain weight in the files; None: as the config says."""


class PackedForms(StoredForms):
    """StoredForms of weights in the bits of a GGUF file, from the types and shapes of the tensors that its import
    writes. `exact`: scales are not rounded to float16; a weight whose scales float16 cannot hold is not told apart.
    `cpu`: as of CheckpointForms."""

    def __init__(self, tensors: Mapping[str, StoredTensor], exact: bool, cpu: bool) -> None:
        self._tensors = tensors
        self._exact = exact
        self._cpu = cpu

    @override
    def of_layer(self, name: str, outputs: int, inputs: int) -> WeightForm | None:
        """Raises UserError if the columns of the weight are incomplete."""
        columns = {end: self._tensors.get(f"{name}.weight.{end}") for end in ("codes", "scales", "shifts")}
        codes, scales, shifts = columns.values()
        if codes is None:
            return None
        if f"{name}.weight.factors" in self._tensors:
            return WITH_GROUP_SCALES[MXFP4] if self._cpu else MXFP4
        if scales is None or len(scales.shape) != 2 or not scales.shape[1]:
            raise UserError(f"The quantized weight {name!r} has no scales that fit it. Fetch the model again.")
        wide = self._exact and any(column is not None and column.dtype != "F16" for column in (scales, shifts))
        group = inputs // scales.shape[1]
        return WeightForm(
            bits=8 if codes.dtype == "I8" else 4,
            scale_bytes=4 if wide else 2,
            group=None if group == inputs else group,
            shifts=shifts is not None,
        )

    @override
    def plain_bytes(self, name: str) -> int | None:
        stored = self._tensors.get(f"{name}.weight")
        return None if stored is None else 4 if stored.dtype == "F32" else 2


class CheckpointForms(StoredForms):
    """StoredForms of a quantized checkpoint, from its config. Raises UserError for a config from which they
    cannot be told. `float8`: the device multiplies 8-bit floats, else these are dequantized at load. `cpu`: weights
    are held as our CPU kernels take them."""

    def __init__(self, config: QuantizationConfig, float8: bool, cpu: bool = False) -> None:
        self._config = config
        self._float8 = float8
        self._cpu = cpu
        self._modelopt: WeightForm | None = None  # of the layers of a checkpoint of modelopt
        self._schemes: list[tuple[tuple[str, ...], QuantizationConfig]] = []  # targets and weights
        method = config.method
        if method == "compressed-tensors":
            groups = config.within("config_groups")
            for name in groups.values:
                scheme = groups.within(name)
                self._schemes.append((_names(scheme, "targets"), scheme.within("weights")))
        elif method.startswith("modelopt") and MODELOPT_ALGORITHMS.get(modelopt_algorithm(config)) is not None:
            self._modelopt = MODELOPT_ALGORITHMS[modelopt_algorithm(config)]
        elif method not in ("gptq", "awq", "fp8", "fbgemm-fp8", "mxfp4"):
            raise config.unfit(
                f"the size of weights with quant_method {config.values.get('quant_method')!r} does not follow from the "
                "config. Plan with the original model and --quantize"
            )

    @override
    def of_layer(self, name: str, outputs: int, inputs: int) -> WeightForm | None:
        form = self._stored_form(name, outputs, inputs)
        return WITH_GROUP_SCALES.get(form, form) if form is not None and self._cpu else form

    def _stored_form(self, name: str, outputs: int, inputs: int) -> WeightForm | None:
        config, method = self._config, self._config.method
        if method == "mxfp4":  # of experts alone
            return MXFP4 if ".experts." in name else None
        named = method == "compressed-tensors" or method.startswith("modelopt")
        head = named or config.values.get("lm_head")
        if name == EMBEDDING or (name == HEAD and not head):
            return None
        plain = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
        if any(_matches(pattern, name) for entry in plain for pattern in _names(config, entry)):
            return None
        if method == "compressed-tensors":
            return self._compressed(name, outputs, inputs)
        if self._modelopt is not None and self._modelopt != FLOAT8:
            return self._modelopt
        if self._modelopt is not None or method in ("fp8", "fbgemm-fp8"):
            return self._floats(config.values.get("weight_block_size"), outputs, inputs)
        if method == "awq":
            bits, size = config.integer("bits", "w_bit"), config.integer("group_size", "q_group_size")
            return self._affine(bits, size, inputs, bool(config.values.get("zero_point", True)))
        dynamic = config.within("dynamic")
        for pattern in dynamic.values:
            if re.match(pattern[2:] if pattern[:2] in ("+:", "-:") else pattern, name):
                if pattern.startswith("-:"):
                    return None
                config = QuantizationConfig(config.path, config.values | dynamic.within(pattern).values)
                break
        size = config.integer("group_size")
        if config.values.get("desc_act") and size not in (-1, inputs):
            return None  # groups are scattered over the inputs
        return self._affine(config.integer("bits"), size, inputs, not config.values.get("sym", True))

    @override
    def plain_bytes(self, name: str) -> int | None:
        return None

    def _compressed(self, name: str, outputs: int, inputs: int) -> WeightForm | None:
        meant = (weights for targets, weights in self._schemes if _are_for(targets, name))
        weights = next(meant, None)
        if weights is None:
            return None
        if weights.text("type", "int") == "float" and weights.integer("num_bits") == 4:
            return NVFP4 if weights.integer("group_size") == NV_GROUP else MXFP4
        if weights.text("type", "int") == "float":
            return self._floats(weights.values.get("block_structure"), outputs, inputs)
        size = -1 if weights.values.get("group_size") is None else weights.integer("group_size")
        return self._affine(weights.integer("num_bits"), size, inputs, not weights.values.get("symmetric", True))

    def _floats(self, blocks: object, outputs: int, inputs: int) -> WeightForm | None:
        if not self._float8 or outputs % FLOAT8_MULTIPLE or inputs % FLOAT8_MULTIPLE:
            return None
        match blocks:
            case [int(), int(size)] if size < inputs:
                return FLOAT8._replace(group=size) if size in GROUPS and inputs % size == 0 else None
        return FLOAT8

    def _affine(self, bits: int, size: int, inputs: int, shifts: bool) -> WeightForm | None:
        """Integers with scales and, if `shifts`, zero points for groups of `size` inputs; -1: all inputs."""
        if bits not in (4, 8):
            raise self._config.unfit(f"weights are of {bits} bits, but 4 and 8 bits are read")
        size = inputs if size == -1 else size
        group = max((group for group in GROUPS if size > 0 and size % group == 0), default=None)
        return None if group is None else WeightForm(bits, group=group, shifts=shifts)


def modelopt_algorithm(config: QuantizationConfig) -> str:
    """The quant_algo of a config of modelopt, in capitals: "NVFP4"."""
    return config.text("quant_algo", "NONE").upper()


def _names(config: QuantizationConfig, entry: str) -> tuple[str, ...]:
    """A list of names; empty if it is null or missing."""
    found = config.values.get(entry) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise config.unfit(f"{entry} is {found!r}, but a list of names is expected")
    return tuple(found)


def _are_for(targets: tuple[str, ...], name: str) -> bool:
    """Whether one of the targets means this layer, by its name or as a linear layer."""
    return any(target == "Linear" or _matches(target, name) for target in targets)


def _matches(pattern: str, name: str) -> bool:
    """Whether a layer is meant: by a regular expression after "re:", by its name, a part of it, or with wildcards."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}." or fnmatchcase(name, pattern)
