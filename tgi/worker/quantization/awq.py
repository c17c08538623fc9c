"""AWQ checkpoints in the layout for matrix products ("gemm"), as AutoAWQ writes them.

For the layer NAME, with eight numbers of 4 bits in a word, from below those of its outputs 0, 2, 4, 6, 1, 3, 5, 7:

- NAME.qweight int32 [inputs, outputs / 8],
- NAME.qzeros int32 [groups, outputs / 8]: zero points,
- NAME.scales float [groups, outputs].
"""

from torch import Tensor

from tgi.worker.quantization.columns import FLOATS, WORDS, Columns
from tgi.worker.quantization.declared import Declared
from tgi.worker.quantization.levels import Levels, packed, unpacked

BITS = 4


class Awq:
    """Reads the weights of such a checkpoint."""

    stored_as = ("qweight",)

    def __init__(self, declared: Declared) -> None:
        bits = declared.integer("bits", "w_bit")
        if bits != BITS:
            raise declared.unfit(f"bits is {bits}, but AWQ with {BITS} bits is read")
        layout = declared.text("version", declared.text("checkpoint_format", "gemm"))
        if layout.lower() != "gemm":
            raise declared.unfit(f"version is {layout}, but AWQ in the gemm layout is read")
        self._size = declared.integer("group_size", "q_group_size")
        self.remarks = (f"the weights are AWQ's, of {bits} bits in groups of {self._size} inputs",)

    def read(self, columns: Columns) -> Levels:
        """The weight of a layer that has a qweight."""
        groups, words = columns.groups(self._size), columns.words(columns.outputs, BITS)
        columns.words(columns.inputs, BITS)  # ours, too, have to be filled
        qweight = columns.read("qweight", WORDS, columns.inputs, words)
        qzeros = columns.read("qzeros", WORDS, groups, words)
        scales = columns.read("scales", FLOATS, groups, columns.outputs)
        return Levels(BITS, columns.inputs, packed(_by_outputs(qweight)), _by_outputs(qzeros), scales.t())


def _by_outputs(words: Tensor) -> Tensor:
    """The numbers of words [rows, n], uint8 [8 n, rows], in the order of outputs."""
    even_and_odd = unpacked(words, BITS).unflatten(1, (-1, 2, 4))
    return even_and_odd.permute(1, 3, 2, 0).reshape(-1, words.shape[0])
