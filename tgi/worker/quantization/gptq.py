"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

The tensors of the layer NAME, with `each` = 32 / bits numbers in a word, low bits first:

- NAME.qweight int32 [inputs / each, outputs]: numbers of consecutive inputs share a word,
- NAME.qzeros int32 [groups, outputs / each]: zero points, stored minus one in the format "gptq" and as such in
  "gptq_v2",
- NAME.scales float [groups, outputs],
- NAME.g_idx int32 [inputs], optional: the group of each input.
"""

import torch

from tgi.worker.quantization.affine import AffineWeight, unpack_bits
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.layer_tensors import FLOATS, WORDS, LayerTensors
from tgi.worker.quantization.weight_forms import gptq_rules


class GptqFormat:
    """Reads GPTQ weights; a CheckpointFormat. Raises UserError for a config that is not supported."""

    stored_as = ("qweight",)

    def __init__(self, config: QuantizationConfig) -> None:
        kind = config.text("checkpoint_format", "gptq")
        if config.values.get("is_marlin_format"):
            kind = "marlin"
        if kind not in ("gptq", "gptq_v2"):
            raise config.unfit(f"checkpoint_format is {kind}, but gptq and gptq_v2 are read")
        self._zero_offset = 1 if kind == "gptq" else 0
        self._rules = gptq_rules(config)
        bits, size = config.integer("bits"), config.integer("group_size")
        self.remarks = (f"the weights are GPTQ's, of {bits} bits in groups of {size} inputs",)

    def read_weight(self, tensors: LayerTensors) -> AffineWeight:
        # The config may call a layer plain whose tensors show that it is quantized.
        given = (scheme for is_for, scheme in self._rules if scheme is not None and is_for(tensors.name))
        bits, size, *_ = next(given)
        groups = tensors.group_count(size)
        qweight = tensors.read_checked("qweight", WORDS, tensors.word_count(tensors.inputs, bits), tensors.outputs)
        qzeros = tensors.read_checked("qzeros", WORDS, groups, tensors.word_count(tensors.outputs, bits))
        scales = tensors.read_checked("scales", FLOATS, groups, tensors.outputs)
        zeros = (unpack_bits(qzeros, bits) + self._zero_offset) & (2**bits - 1)
        return AffineWeight(
            bits,
            tensors.inputs,
            # The words of an output have consecutive inputs, low bits first: transposed, they are packed as needed.
            qweight.t().contiguous().view(torch.uint8),
            zeros.t(),
            scales.t(),
            tensors.group_order("g_idx", groups),
        )
