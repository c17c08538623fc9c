"""WeightForm: how the numbers of a weight are stored, as sizes, without torch.

Weights quantized at load have the forms of quantize.py. Of a checkpoint format, the config tells the scheme of a layer,
from which its form follows, except where its tensors decide: a layer that the config does not name may be plain, and a
weight that QuantizedWeight cannot represent exactly is dequantized at load. The readers of the formats (gptq.py and
others) and `tgi plan` take the schemes from here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol, TypeAlias

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
AWQ_BITS, INTEGER_BITS = 4, (4, 8)
COMPRESSED_FLOAT4 = {"nvfp4-pack-quantized": NV_GROUP, "mxfp4-pack-quantized": MX_GROUP}  # inputs that share a scale
COMPRESSED_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *COMPRESSED_FLOAT4, "dense",
)  # fmt: skip
# Entries of configs with the layers that are not quantized.
PLAIN_LAYERS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


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
MADE_AT_LOAD = {"int8": INT8, "int4": INT4, "fp8": FLOAT8}


def divided_group(size: int) -> int | None:
    """The supported group size into which groups of `size` inputs can be divided, each part with the same scale; None:
    there is none."""
    return max((group for group in GROUPS if size > 0 and size % group == 0), default=None)


def fits_float8(outputs: int, inputs: int) -> bool:
    """Whether torch multiplies weights of 8-bit floats of this size."""
    return outputs % FLOAT8_MULTIPLE == inputs % FLOAT8_MULTIPLE == 0


def form_made_at_load(made: str, name: str, outputs: int, inputs: int) -> WeightForm | None:
    """The form that --quantize makes of the plain weight [outputs, inputs] of a layer; None: it stays plain."""
    outer = name in (EMBEDDING, HEAD)
    if inputs % FACTOR_GROUP:
        return None
    if made == "fp8":
        return FLOAT8 if fits_float8(outputs, inputs) and not outer else None
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
        return None


class PackedForms(StoredForms):
    """StoredForms of weights in the bits of a GGUF file, from the types and shapes of the tensors that its import
    writes. `exact`: scales are not rounded to float16; a weight whose scales float16 cannot hold is not told apart.
    `cpu`: weights are held as our CPU kernels take them."""

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


class LayerScheme(NamedTuple):
    """How the weight of a layer is quantized in the files."""

    bits: int
    size: int = -1  # inputs of a group with a scale; -1: all
    floating: bool = False
    symmetric: bool = True
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, of 8-bit floats
    activations: bool = False  # whether the scheme quantizes activations too
    scattered: bool = False  # the inputs of a group do not follow each other (act-order)

    def form(self, outputs: int, inputs: int, float8: bool) -> WeightForm | None:
        """The form of the weight [outputs, inputs] once it is loaded; None: it is dequantized then. `float8`: the
        device multiplies 8-bit floats."""
        if self.floating and self.bits == 4:
            return NVFP4 if self.size == NV_GROUP else MXFP4
        if self.floating:
            if not float8 or not fits_float8(outputs, inputs):
                return None
            size = inputs if self.block is None else self.block[1]
            if size >= inputs:
                return FLOAT8
            return FLOAT8._replace(group=size) if size in GROUPS and inputs % size == 0 else None
        size = inputs if self.size == -1 else self.size
        group = None if self.scattered and size != inputs else divided_group(size)
        return None if group is None else WeightForm(self.bits, group=group, shifts=not self.symmetric)


# Which layers have which scheme: the first rule holds whose function accepts the name of a layer. None: it is plain.
Rules: TypeAlias = Sequence[tuple[Callable[[str], object], LayerScheme | None]]


def scheme_of(rules: Rules, name: str) -> LayerScheme | None:
    """The scheme of the layer of this name; None: it is plain."""
    return next((scheme for is_for, scheme in rules if is_for(name)), None)


def gptq_rules(config: QuantizationConfig) -> Rules:
    """The entries of `dynamic`, then the default. Raises UserError for a config that is not supported, as all functions
    here."""
    rules: list[tuple[Callable[[str], object], LayerScheme | None]] = []
    dynamic = config.within("dynamic")
    for pattern in dynamic.values:
        names = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
        is_for = _compiled(config, names, f"{pattern!r} under dynamic")
        own = QuantizationConfig(config.path, config.values | dynamic.within(pattern).values)
        rules.append((is_for, None if pattern.startswith("-:") else _gptq_scheme(own)))
    return [*rules, (_any_layer, _gptq_scheme(config))]


def _gptq_scheme(config: QuantizationConfig) -> LayerScheme:
    bits = config.integer("bits")
    if bits not in INTEGER_BITS:
        raise config.unfit(f"bits is {bits}, but GPTQ with {' and '.join(map(str, INTEGER_BITS))} bits is read")
    symmetric, scattered = bool(config.values.get("sym", True)), bool(config.values.get("desc_act"))
    return LayerScheme(bits, config.integer("group_size"), symmetric=symmetric, scattered=scattered)


def awq_scheme(config: QuantizationConfig) -> LayerScheme:
    """That of all layers."""
    bits = config.integer("bits", "w_bit")
    if bits != AWQ_BITS:
        raise config.unfit(f"bits is {bits}, but AWQ with {AWQ_BITS} bits is read")
    size = config.integer("group_size", "q_group_size")
    return LayerScheme(bits, size, symmetric=not config.values.get("zero_point", True))


def fp8_scheme(config: QuantizationConfig) -> LayerScheme:
    """That of all layers."""
    return LayerScheme(8, floating=True, block=_block_size(config, "weight_block_size"))


# The algorithms of modelopt that are read; None: the tensors of a layer alone show how it is quantized.
_NVFP4, _MXFP4 = (LayerScheme(4, group, floating=True) for group in (NV_GROUP, MX_GROUP))
_FLOAT8 = LayerScheme(8, floating=True)
MODELOPT_ALGORITHMS = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), _NVFP4),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), _MXFP4),
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), _FLOAT8),
    "MIXED_PRECISION": None,
}


def modelopt_algorithm(config: QuantizationConfig) -> str:
    """The quant_algo of a config of modelopt: a key of MODELOPT_ALGORITHMS."""
    algorithm = config.text("quant_algo", "NONE").upper()
    if algorithm not in MODELOPT_ALGORITHMS:
        raise config.unfit(f"quant_algo is {algorithm}, but {', '.join(MODELOPT_ALGORITHMS)} are read")
    return algorithm


def compressed_rules(config: QuantizationConfig) -> Rules:
    """The targets of a group of layers: names come first, then regular expressions, then the class of all layers."""
    groups, rules = config.within("config_groups"), []
    for name in groups.values:
        group = groups.within(name)
        targets = [_target(group, target) for target in _names(group, "targets")]
        scheme = _compressed_scheme(group)
        rules += [(place, is_for, scheme) for place, is_for in targets]
    return [(is_for, scheme) for _, is_for, scheme in sorted(rules, key=lambda rule: rule[0])]


def _target(group: QuantizationConfig, target: str) -> tuple[int, Callable[[str], object]]:
    """The place of this kind of target in the order, and whether it means a layer."""
    if target == "Linear":
        return 2, _any_layer
    if target.startswith("re:"):
        return 1, _compiled(group, target.removeprefix("re:"), f"the target {target!r}")
    return 0, target.__eq__


def _compressed_scheme(group: QuantizationConfig) -> LayerScheme:
    """The scheme of one entry of config_groups."""
    format = group.text("format", COMPRESSED_FORMATS[0])
    if format not in COMPRESSED_FORMATS:
        raise group.unfit(f"a scheme has the format {format}, but {', '.join(COMPRESSED_FORMATS)} are read")
    weights = group.within("weights")
    bits, floating = weights.integer("num_bits"), weights.text("type", "int") == "float"
    size = -1 if weights.values.get("group_size") is None else weights.integer("group_size")
    float4 = floating and bits == 4 and size in COMPRESSED_FLOAT4.values()
    if bits not in INTEGER_BITS or (floating and bits != 8 and not float4):
        kind = "floats" if floating else "integers"
        raise group.unfit(
            f"weights are {kind} of {bits} bits, but integers of 4 and 8 bits, floats of 8 bits, and floats of 4 bits "
            f"in groups of {NV_GROUP} (NVFP4) and {MX_GROUP} (MXFP4) are read"
        )
    return LayerScheme(
        bits,
        size,
        floating,
        symmetric=bool(weights.values.get("symmetric", True)),
        block=_block_size(weights, "block_structure"),
        activations=bool(group.values.get("input_activations")),
    )


RULES: dict[str, Callable[[QuantizationConfig], Rules]] = {  # by quant_method
    "gptq": gptq_rules,
    "awq": lambda config: [(_any_layer, awq_scheme(config))],
    "compressed-tensors": compressed_rules,
    **dict.fromkeys(("fp8", "fbgemm-fp8"), lambda config: [(_any_layer, fp8_scheme(config))]),
    "mxfp4": lambda config: [(lambda name: ".experts." in name, _MXFP4)],
    **dict.fromkeys(
        ("modelopt", "modelopt-fp4", "modelopt-mixed"),
        lambda config: [(_any_layer, MODELOPT_ALGORITHMS[modelopt_algorithm(config)])],
    ),
}


class CheckpointForms(StoredForms):
    """StoredForms of a quantized checkpoint, from its config. Raises UserError for a config from which they
    cannot be told. `float8`: the device multiplies 8-bit floats, else these are dequantized at load. `cpu`: weights
    are held as our CPU kernels take them."""

    def __init__(self, config: QuantizationConfig, float8: bool, cpu: bool = False) -> None:
        self._rules = RULES[config.method](config) if config.method in RULES else ()
        if not any(scheme is not None for _, scheme in self._rules):
            raise config.unfit(
                f"the size of weights with quant_method {config.values.get('quant_method')!r} does not follow from the "
                "config. Plan with the original model and --quantize"
            )
        self._float8 = float8
        self._cpu = cpu
        self._plain = [EMBEDDING, *(pattern for entry in PLAIN_LAYERS for pattern in _names(config, entry))]
        if config.method in ("gptq", "awq", "fp8", "fbgemm-fp8") and not config.values.get("lm_head"):
            self._plain.append(HEAD)

    @override
    def of_layer(self, name: str, outputs: int, inputs: int) -> WeightForm | None:
        plain = any(_matches(pattern, name) for pattern in self._plain)
        scheme = None if plain else scheme_of(self._rules, name)
        form = None if scheme is None else scheme.form(outputs, inputs, self._float8)
        return WITH_GROUP_SCALES.get(form, form) if form is not None and self._cpu else form


def _any_layer(name: str) -> bool:
    return True


def _compiled(config: QuantizationConfig, pattern: str, what: str) -> Callable[[str], object]:
    """Whether a regular expression matches the beginning of a name."""
    try:
        return re.compile(pattern).match
    except (re.error, OverflowError, RecursionError) as error:
        raise config.unfit(f"{what} is no regular expression: {error}") from error


def _block_size(config: QuantizationConfig, entry: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block, a list of two; None if it is null or missing."""
    match size := config.values.get(entry):
        case None:
            return None
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise config.unfit(f"blocks are {size!r}, but two sizes are expected")


def _names(config: QuantizationConfig, entry: str) -> tuple[str, ...]:
    """A list of names; empty if it is null or missing."""
    found = config.values.get(entry) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise config.unfit(f"{entry} is {found!r}, but a list of names is expected")
    return tuple(found)


def _matches(pattern: str, name: str) -> bool:
    """Whether a layer is meant: by a regular expression after "re:", by its name, a part of it, or with wildcards."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}." or fnmatchcase(name, pattern)
