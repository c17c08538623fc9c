"""A gate and an up projection as one product: the same bits as two products, for all formats, rows and LoRA sums."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cases import each_case
from tests.worker.cpu_kernels.available import EMULATED, VARIANTS, load_variant, numbers, our_kernels
from tests.worker.cpu_kernels.test_integer_linear import whole
from tests.worker.cpu_kernels.test_models import directory
from tests.worker.cpu_kernels.test_program import run, same, without_program
from tests.worker.cpu_kernels.test_quantized_linear import quantized
from tests.worker.loras import make_adapter
from tgi.worker.activations import UP_EPILOGUES
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import EPILOGUES, CpuKernels, can_pack_together
from tgi.worker.distributed.sharding import whole_model
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Mlp
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.loader import read_model_spec
from tgi.worker.models.weight_loader import DecoderWeightLoader, StoredMatrix
from tgi.worker.quantization.quantize import quantize_weight as in_few_bits
from tgi.worker.quantization.weight import Weight
from tgi.worker.quantization.weight_sources import WeightSource

pytestmark = pytest.mark.slow

# Outputs are not a multiple of a panel; inputs are several parts, an odd number of which is computed together.
OUTPUTS, INPUTS = 72 if EMULATED else 200, 1184
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 300, 448, 620)[: 11 if EMULATED else None]
FORMS: dict[str, Callable[[], Weight]] = {  # both weights, stacked
    "bfloat16": lambda: numbers(2 * OUTPUTS, INPUTS),
    "8 bits, groups": lambda: quantized(8, 32, False, 2 * OUTPUTS, INPUTS),
    "8 bits, small groups": lambda: quantized(8, 16, False, 2 * OUTPUTS, INPUTS),
    "4 bits, groups": lambda: quantized(4, 32, False, 2 * OUTPUTS, INPUTS),
    "4 bits, groups, shifts": lambda: quantized(4, 32, True, 2 * OUTPUTS, INPUTS),
    "8 bits, whole": lambda: whole(8, 2 * OUTPUTS, INPUTS),
    "4 bits, whole": lambda: whole(4, 2 * OUTPUTS, INPUTS),
}


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


@each_case("form", FORMS)
def test_one_product_has_the_bits_of_two(kernels: CpuKernels, form: str) -> None:
    gate, up = kernels.supported_weight(FORMS[form]()).split([OUTPUTS, OUTPUTS])
    assert can_pack_together(gate, up)
    both, one, other = kernels.pack_weight(gate, up), kernels.pack_weight(gate), kernels.pack_weight(up)
    x, bias = numbers(max(ROWS), INPUTS, seed=1, dtype=kernels.dtype), torch.randn(2 * OUTPUTS)
    plus = torch.randn(max(ROWS), 2 * OUTPUTS)
    # One of three for each number of rows, but each of them with every form, set and, in some form, number of rows.
    cases = ("silu", None, None), ("gelu_tanh", bias, None), ("clamped_silu", bias, plus)
    for at, rows in enumerate(ROWS, [*FORMS].index(form)):
        then, shift, more = cases[at % 3]
        more = None if more is None else more[:rows]
        shifts = (None, None) if shift is None else shift.split(OUTPUTS)
        added = (None, None) if more is None else more.split(OUTPUTS, 1)
        left = kernels.linear(x[:rows], one, shifts[0], EPILOGUES[then], None, added[0])
        expected = kernels.linear(x[:rows], other, shifts[1], EPILOGUES[UP_EPILOGUES.get(then, "mul")], left, added[1])
        assert torch.equal(kernels.linear(x[:rows], both, shift, EPILOGUES[then], None, more), expected)


def test_weights_of_different_formats_cannot_be_packed_together() -> None:
    forms = [make().split([OUTPUTS, OUTPUTS])[0] for make in FORMS.values()]
    assert all(can_pack_together(one, other) == (one is other) for one in forms for other in forms)
    assert not can_pack_together(forms[0], forms[0][1:])


class Apart(DecoderWeightLoader):
    """Makes two layers where one would do."""

    def _gate_and_up(
        self, gate: StoredMatrix, up: StoredMatrix, factors: object = None
    ) -> tuple[Linear | None, Linear]:
        first, second = self._matrices(self._config.mlp_bias, self._config.hidden, gate, up)
        return self._build(*first, self._config.activation), self._build(*second, "mul")


class Mixed:
    """A checkpoint in which one gate and one up projection have 8 bits."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.tensor = source.tensor

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        found = self._source.weight(name, outputs, inputs)
        narrow = name.endswith(("layers.0.mlp.gate_proj", "layers.1.mlp.up_proj"))
        return in_few_bits(found, "int8") if narrow and isinstance(found, torch.Tensor) else found


def decoder(kind: str, mixed: bool, reader: type[DecoderWeightLoader]) -> DecoderModel:
    recipe = read_model_spec(directory(kind), "bfloat16")
    kernels = our_kernels(recipe)
    assert recipe.decoder is not None
    with Checkpoint(directory(kind)) as checkpoint, torch.inference_mode():
        source = recipe.scheme.source(checkpoint)
        source = Mixed(source) if mixed else source
        read = reader(source, recipe.decoder, whole_model(recipe.decoder), torch.bfloat16, torch.device("cpu"), kernels)
        return DecoderModel(
            recipe.decoder, read.load(lambda percent: None), torch.bfloat16, torch.device("cpu"), kernels
        )


# Two tensors, one joint tensor, and formats that differ in two of three layers.
@pytest.mark.parametrize(("kind", "mixed"), [("llama", False), ("phi3", False), ("llama", True)])
def test_models_compute_the_same_with_one_or_two_products_and_adapters(kind: str, mixed: bool, tmp_path: Path) -> None:
    together, apart = (decoder(kind, mixed, reader) for reader in (DecoderWeightLoader, Apart))
    mlps = [layer.mlp for layer in together._weights.layers]
    one = [isinstance(mlp, Mlp) and mlp.gate is None for mlp in mlps]
    assert one == ([False, False, True] if mixed else [True, True, True])
    path = make_adapter(tmp_path / "a", directory(kind), 16, seed=1)
    for adapted in (False, True):
        adapters = [(model.load_adapter(path), None, None) if adapted else () for model in (together, apart)]
        found = run(together, adapters[0])
        assert same(found, run(apart, adapters[1]))
        assert same(found, run(without_program(together), adapters[0]))
