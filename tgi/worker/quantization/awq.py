"""AWQ checkpoints in the "gemm" layout, as AutoAWQ writes them.

The tensors of the layer NAME. A word has eight 4-bit numbers, from the low bits on for outputs 0, 2, 4, 6, 1, 3, 5, 7:

- NAME.qweight int32 [inputs, outputs / 8],
- NAME.qzeros int32 [groups, outputs / 8]: zero points,
- NAME.scales float [groups, outputs].
"""

from torch import Tensor

from tgi.worker.quantization.affine import AffineWeight, pack_nibbles, unpack_bits
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.layer_tensors import FLOATS, WORDS, LayerTensors
from tgi.worker.quantization.weight_forms import AWQ_BITS, awq_scheme


class AwqFormat:
    """Reads AWQ weights; a CheckpointFormat. Raises UserError for a config that is not supported."""

    stored_as = ("qweight",)

    def __init__(self, config: QuantizationConfig) -> None:
        self._size = awq_scheme(config).size
        layout = config.text("version", config.text("checkpoint_format", "gemm"))
        if layout.lower() != "gemm":
            raise config.unfit(f"version is {layout}, but AWQ in the gemm layout is read")
        self.remarks = (f"the weights are AWQ's, of {AWQ_BITS} bits in groups of {self._size} inputs",)

    def read_weight(self, tensors: LayerTensors) -> AffineWeight:
        groups, words = tensors.group_count(self._size), tensors.word_count(tensors.outputs, AWQ_BITS)
        tensors.word_count(tensors.inputs, AWQ_BITS)  # QuantizedWeight packs inputs, so they must fill words too
        qweight = tensors.read_checked("qweight", WORDS, tensors.inputs, words)
        qzeros = tensors.read_checked("qzeros", WORDS, groups, words)
        scales = tensors.read_checked("scales", FLOATS, groups, tensors.outputs)
        codes = pack_nibbles(_by_outputs(qweight))
        return AffineWeight(AWQ_BITS, tensors.inputs, codes, _by_outputs(qzeros), scales.t())


def _by_outputs(words: Tensor) -> Tensor:
    """Unpacks words [rows, n] to numbers uint8 [8 n, rows], in the order of outputs."""
    even_and_odd = unpack_bits(words, AWQ_BITS).unflatten(1, (-1, 2, 4))
    return even_and_odd.permute(1, 3, 2, 0).reshape(-1, words.shape[0])
