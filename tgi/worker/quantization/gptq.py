"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

For the layer NAME with `each` = 32 / bits numbers in a word, low bits first:

- NAME.qweight int32 [inputs / each, outputs]: numbers of inputs that follow each other share a word,
- NAME.qzeros int32 [groups, outputs / each]: zero points; one less than they are in the format "gptq", as they are in
  "gptq_v2",
- NAME.scales float [groups, outputs],
- NAME.g_idx int32 [inputs], which may be missing: the group of each input.
"""

import re

import torch

from tgi.worker.quantization.columns import FLOATS, WORDS, Columns
from tgi.worker.quantization.declared import Declared
from tgi.worker.quantization.levels import Levels, unpacked

BITS = (4, 8)


class Gptq:
    """Reads the weights of such a checkpoint."""

    stored_as = ("qweight",)

    def __init__(self, declared: Declared) -> None:
        kind = declared.text("checkpoint_format", "gptq")
        if declared.values.get("is_marlin_format"):
            kind = "marlin"
        if kind not in ("gptq", "gptq_v2"):
            raise declared.unfit(f"checkpoint_format is {kind}, but gptq and gptq_v2 are read")
        self._less = 1 if kind == "gptq" else 0
        self._general = bits, size = _form(declared)
        self.remarks = (f"the weights are GPTQ's, of {bits} bits in groups of {size} inputs",)
        self._special = []
        dynamic = declared.within("dynamic")
        for pattern in dynamic.values:
            if pattern.startswith("-:"):
                continue  # not quantized, as its tensors show
            try:
                compiled = re.compile(pattern.removeprefix("+:"))
            except (re.error, OverflowError, RecursionError) as error:
                raise declared.unfit(f"{pattern!r} under dynamic is no regular expression: {error}") from error
            self._special.append(
                (compiled, _form(Declared(declared.path, declared.values | dynamic.within(pattern).values)))
            )

    def read(self, columns: Columns) -> Levels:
        """The weight of a layer that has a qweight."""
        forms = (form for pattern, form in self._special if pattern.match(columns.name))
        bits, size = next(forms, self._general)
        groups = columns.groups(size)
        qweight = columns.read("qweight", WORDS, columns.words(columns.inputs, bits), columns.outputs)
        qzeros = columns.read("qzeros", WORDS, groups, columns.words(columns.outputs, bits))
        scales = columns.read("scales", FLOATS, groups, columns.outputs)
        zeros = (unpacked(qzeros, bits) + self._less) & (2**bits - 1)
        return Levels(
            bits,
            columns.inputs,
            # The numbers of an output follow each other in its words, from low bits to high: turned, they are packed.
            qweight.t().contiguous().view(torch.uint8),
            zeros.t(),
            scales.t(),
            columns.order("g_idx", groups),
        )


def _form(declared: Declared) -> tuple[int, int]:
    """Bits, and inputs of a group."""
    bits = declared.integer("bits")
    if bits not in BITS:
        raise declared.unfit(f"bits is {bits}, but GPTQ with {' and '.join(map(str, BITS))} bits is read")
    return bits, declared.integer("group_size")
