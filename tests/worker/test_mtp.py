"""Layers for multi-token prediction as drafters: proposals are those of the published formula, and change no token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import model as make
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.driving import drive, make_engine
from tests.worker.test_draft_runner import asking, start
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_speculation import COUNT, engine_of, requests
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.settings.table import MTP
from tgi.worker.checkpoint import SINGLE_FILE
from tgi.worker.engine.engine import PendingStep
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, build_mtp, read_model_spec
from tgi.worker.models.mtp import MtpModel

pytestmark = pytest.mark.slow

LAYERS, HIDDEN = 3, 64
# Of the parts by their names in DeepSeek-V3's checkpoints: where Qwen3-Next has them.
QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def with_mtp(kind: str, directory: Path) -> Path:
    """A checkpoint with an MTP layer, which is the last layer of a deeper random model."""
    options = {"layer_types": ["linear_attention", "full_attention"] * 2} if kind == "qwen3_next" else {}
    deeper, generator = make(kind, layers=LAYERS + 1, more=tuple(options.items())), torch.Generator().manual_seed(2)
    tensors, config = load_file(deeper / SINGLE_FILE), json.loads((deeper / "config.json").read_text())
    layer = f"model.layers.{LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = 0.3 * torch.randn(HIDDEN, generator=generator) + (kind != "qwen3_next")
    tensors[f"{layer}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5
    if kind == "qwen3_next":
        names = {f"{layer}{one}.weight": f"mtp.{other}.weight" for one, other in QWEN_NAMES.items()}
        tensors = {names.get(name, name).replace(layer, "mtp.layers.0."): one for name, one in tensors.items()}
        config["layer_types"] = config["layer_types"][:LAYERS]
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    shutil.copytree(deeper, directory, dirs_exist_ok=True)
    save_file(tensors, directory / SINGLE_FILE, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def loaded(directory: Path, native: bool, dtype: str = "float32") -> tuple[Model, MtpModel]:
    kernels = our_kernels(read_model_spec(directory, dtype)) if native else None
    served = build_model(directory, dtype, "cpu", lambda stage, percent: None, kernels=kernels)
    return served, build_mtp(directory, served, dtype, kernels)


class Reference:
    """The formula on transformers' layers: those of the model, and the MTP layer as a model of one layer."""

    def __init__(self, kind: str, directory: Path) -> None:
        deeper = make(kind, layers=LAYERS + 1, more=self._options(kind))
        self._model = transformers.AutoModelForCausalLM.from_pretrained(deeper, dtype=torch.float32)
        stored, layer = load_file(directory / SINGLE_FILE), f"model.layers.{LAYERS}."
        self._parts = {
            name: stored[f"mtp.{other}.weight" if kind == "qwen3_next" else f"{layer}{name}.weight"]
            for name, other in QWEN_NAMES.items()
        }
        self._offset = 1.0 if kind == "qwen3_next" else 0.0
        self._epsilon = self._model.config.rms_norm_eps
        self._layers, self._norm = list(self._model.model.layers), self._model.model.norm
        self._count = self._model.config.num_hidden_layers

    @staticmethod
    def _options(kind: str) -> tuple[tuple[str, Any], ...]:
        return (("layer_types", ["linear_attention", "full_attention"] * 2),) if kind == "qwen3_next" else ()

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self._epsilon).rsqrt() * (self._parts[name] + self._offset)

    def _hidden(self, layers: list[torch.nn.Module], norm: torch.nn.Module, x: Tensor) -> Tensor:
        """The last hidden states [T, hidden] of inputs [T, hidden]."""
        inner = self._model.model
        inner.layers, inner.norm = torch.nn.ModuleList(layers), norm
        inner.config.num_hidden_layers = len(layers)
        if hasattr(inner.config, "layer_types") and self._offset:
            inner.config.layer_types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
            inner.config.layer_types = inner.config.layer_types[:LAYERS] if len(layers) > 1 else ["full_attention"]
        return inner(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]

    def propose(self, ids: list[int], count: int) -> list[int]:
        """Greedy drafts after these ids."""
        with torch.no_grad():
            embedded = self._model.model.embed_tokens(torch.tensor(ids))
            hidden = self._hidden(self._layers[:LAYERS], self._norm, embedded)[:-1]
            embedded, drafts = embedded[1:], []
            while True:
                both = torch.cat((self._rms("enorm", embedded), self._rms("hnorm", hidden)), 1)
                x = both @ self._parts["eh_proj"].T
                out = self._rms("shared_head.norm", self._hidden(self._layers[LAYERS:], torch.nn.Identity(), x)[-1:])
                drafts.append(int(self._model.lm_head(out).argmax()))
                if len(drafts) == count:
                    return drafts
                hidden = torch.cat((hidden, out))
                embedded = torch.cat((embedded, self._model.model.embed_tokens(torch.tensor(drafts[-1:]))))


@pytest.mark.parametrize(("kind", "native"), [("deepseek_v3", True), ("glm4_moe", False), ("qwen3_next", True)])
def test_drafts_are_those_of_the_formula(kind: str, native: bool, tmp_path: Path) -> None:
    """After a prompt in chunks, after steps without drafts, and after rejected drafts."""
    directory = with_mtp(kind, tmp_path)
    served, mtp = loaded(directory, native)
    engine, reference = make_engine(served, draft=mtp), Reference(kind, directory)
    known = list(range(20, 52))
    pages = [(0, page) for page in range(5)]
    engine.collect(engine.launch(step(1, [(0, 0, 20, 0)], [slot(0, known)], pages)))
    known += unpack_int32(engine.collect(engine.launch(step(2, [(0, 20, 12, 1)]))).token_ids)
    for number, count in enumerate((3, 0, 2, 4, 0, 0, 1), 3):
        pending = engine.launch(step(number, [(0, len(known) - 1, 1, 1)], drafts=[count] if count else []))
        if count:
            assert isinstance(pending, PendingStep)
            assert pending.drafts is not None
            assert pending.drafts.ids.tolist() == reference.propose(known, count)
        known += unpack_int32(engine.collect(pending).token_ids)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_drafts_change_no_token(kind: str, tmp_path: Path) -> None:
    served, mtp = loaded(with_mtp(kind, tmp_path), True, "bfloat16")
    prompts, samplings = requests(8)
    truth = drive(engine_of(served), prompts, COUNT, samplings)
    engine = engine_of(served, draft=mtp)
    for among, chunk, stagger in ((1.0, 4096, 0), (0.5, 7, 3)):
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, asking(3, among)[1]) == truth


def test_the_layer_is_loaded_at_start(tmp_path: Path) -> None:
    directory, run = with_mtp("deepseek_v3", tmp_path / "model"), tmp_path / "run"
    run.mkdir()
    engine, told = start(None, run, directory, draft_model_id=MTP)
    assert "loading the layer for multi-token prediction" in told
    served, _ = loaded(directory, True, "float32")
    (truth,) = drive(make_engine(served), [[9, 8, 7]], 12)
    assert drive(engine, [[9, 8, 7]], 12, guess=lambda row, drawn: 3)[0].ids == truth.ids
    with pytest.raises(UserError, match=r"cannot draft for itself: it has no layer for multi-token prediction"):
        start(None, run, make("deepseek_v3"), draft_model_id=MTP)
