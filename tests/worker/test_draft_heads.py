"""Heads that draft from the served model's hidden states, for multi-token prediction (MTP) and EAGLE-3: proposals are
those of the published formulas, heads that know the text are accepted, and no token changes."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.benchmarks.rank_processes import RankCall
from tests.models import model as make
from tests.worker.counting_models import counting, rotation
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.driving import drive, make_engine
from tests.worker.eagle3_heads import Eagle3Head, Form, trained_head
from tests.worker.scheduled import ScheduledEngine
from tests.worker.test_draft_runner import asking, start
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_speculation import COUNT, VOCAB, engine_of, requests
from tgi.hub.model_config import read_model_config
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.settings.table import MTP
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.checkpoint import SINGLE_FILE
from tgi.worker.engine.engine import PendingStep, TorchEngine
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.loader import HeadOptions, build_eagle3, build_model, build_mtp, read_model_spec

pytestmark = pytest.mark.slow

LAYERS, HIDDEN = 3, 64
# Of the parts by their names in DeepSeek-V3's checkpoints: where Qwen3-Next and MiMo have them.
QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
MIMO_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}


def is_centred(kind: str) -> bool:
    """Whether norms scale by 1 + weight, and layers are recurrent."""
    return kind.startswith("qwen3_")


def deeper(kind: str) -> Path:
    """A random model with one layer more."""
    options = {"layer_types": ["linear_attention", "full_attention"] * 2} if is_centred(kind) else {}
    return make("qwen2" if kind == "mimo" else kind, layers=LAYERS + 1, more=tuple(options.items()))


def stored_names(kind: str) -> dict[str, str]:
    """The name of each part."""
    if is_centred(kind):
        return {name: f"mtp.{other}" for name, other in QWEN_NAMES.items()}
    if kind == "mimo":
        return {name: f"model.mtp_layers.0.{other}" for name, other in MIMO_NAMES.items()}
    return {name: f"model.layers.{LAYERS}.{name}" for name in QWEN_NAMES}


def with_mtp(kind: str, directory: Path, source: Path | None = None, projection: Tensor | None = None) -> Path:
    """A checkpoint with an MTP layer, which is the last layer of a deeper model. With `projection` its norms are
    neutral; otherwise they are random, as the projection."""
    source, generator = source or deeper(kind), torch.Generator().manual_seed(2)
    tensors, config = load_file(source / SINGLE_FILE), json.loads((source / "config.json").read_text())
    layer, names = f"model.layers.{LAYERS}.", stored_names(kind)
    if own := {"mimo": "model.mtp_layers.0."}.get(kind, "mtp.layers.0." if is_centred(kind) else ""):
        tensors = {name.replace(layer, own): one for name, one in tensors.items()}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        noise = 0.3 * torch.randn(HIDDEN, generator=generator) * (projection is None)
        tensors[f"{names[name]}.weight"] = noise + (not is_centred(kind))
    random_projection = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5
    tensors[f"{names['eh_proj']}.weight"] = random_projection if projection is None else projection
    if is_centred(kind):
        config["layer_types"] = config["layer_types"][:LAYERS]
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    config |= {"model_type": "mimo"} if kind == "mimo" else {}
    shutil.copytree(source, directory, dirs_exist_ok=True)
    save_file(tensors, directory / SINGLE_FILE, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def build(
    directory: Path,
    native: bool,
    dtype: str = "float32",
    eagle3: Path | None = None,
    call: RankCall | None = None,
    quantize: str | None = None,
) -> tuple[DecoderModel, DraftHead]:
    """A model and its head, which is in a directory of its own or in that of the model; as one rank, if there is a
    `call`."""
    kernels = our_kernels(read_model_spec(directory, dtype)) if native else None
    communicator = None if call is None else call.communicator(kernels)
    served = build_model(
        directory, dtype, "cpu", lambda stage, percent: None, False, kernels, quantize, communicator=communicator
    )
    assert isinstance(served, DecoderModel)
    options = HeadOptions(dtype, kernels, quantize)
    if eagle3 is not None:
        return served, build_eagle3(eagle3, served, options)
    return served, build_mtp(directory, served, options)


class Reference:
    """The formula on transformers' layers: those of the model, and the MTP layer as a model of one layer."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(deeper(kind), dtype=torch.float32)
        stored = load_file(directory / SINGLE_FILE)
        self._parts = {name: stored[f"{other}.weight"] for name, other in stored_names(kind).items()}
        self._offset, self._hidden_first = 1.0 if is_centred(kind) else 0.0, kind == "mimo"
        self._epsilon = self._model.config.rms_norm_eps
        self._layers, self._norm = list(self._model.model.layers), self._model.model.norm
        self._count = self._model.config.num_hidden_layers

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
                parts = self._rms("enorm", embedded), self._rms("hnorm", hidden)
                x = torch.cat(parts[::-1] if self._hidden_first else parts, 1) @ self._parts["eh_proj"].T
                out = self._rms("shared_head.norm", self._hidden(self._layers[LAYERS:], torch.nn.Identity(), x)[-1:])
                drafts.append(int(self._model.lm_head(out).argmax()))
                if len(drafts) == count:
                    return drafts
                hidden = torch.cat((hidden, out))
                embedded = torch.cat((embedded, self._model.model.embed_tokens(torch.tensor(drafts[-1:]))))


@pytest.mark.parametrize(
    ("kind", "native"),
    [
        ("deepseek_v3", True),
        ("glm4_moe", False),
        ("qwen3_next", True),
        ("qwen3_5_moe_text", True),  # whose checkpoints stack experts
        ("mimo", False),
    ],
)
def test_drafts_of_mtp_are_those_of_the_formula(kind: str, native: bool, tmp_path: Path) -> None:
    directory = with_mtp(kind, tmp_path)
    reference = Reference(kind, directory)
    served, head = build(directory, native)
    follow(make_engine(served, draft=head), reference.propose)


def follow(engine: TorchEngine, propose: Callable[[list[int], int], list[int]]) -> None:
    """Compares drafts after a prompt in chunks, after steps without drafts, and after rejected drafts."""
    known = list(range(20, 52))
    pages = [(0, page) for page in range(5)]
    engine.collect(engine.launch(step(1, [(0, 0, 20, 0)], [slot(0, known)], pages)))
    known += unpack_int32(engine.collect(engine.launch(step(2, [(0, 20, 12, 1)]))).token_ids)
    for number, count in enumerate((3, 0, 2, 4, 0, 0, 1), 3):
        pending = engine.launch(step(number, [(0, len(known) - 1, 1, 1)], drafts=[count] if count else []))
        if count:
            assert isinstance(pending, PendingStep)
            assert pending.drafts is not None
            assert pending.drafts.ids.tolist() == propose(known, count)
        known += unpack_int32(engine.collect(pending).token_ids)


FORMS = {
    "paper": Form(),
    "paper, all ids, named layers": Form(scored=VOCAB, taps=(1, 3, 6), named_after=True),
    "speculators": Form(True, ("norm_before_residual", "norm_before_fc"), taps=(0, 4), bias=True),
    "paper, three layers": Form(layers=3),
    "speculators, two layers": Form(True, ("norm_before_residual",), layers=2),
    "speculators, other width": Form(True, ("fc_norm", "norm_output"), hidden=48, taps=(2, 2, 5)),
}


def transformers_model(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize(("form", "native"), [(form, number % 2 == 1) for number, form in enumerate(FORMS)])
def test_drafts_of_eagle3_are_those_of_the_formula(
    form: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits, too, within 1e-4."""
    directory = make("llama", layers=6)
    model = transformers_model(directory)
    reference = Eagle3Head(FORMS[form], model)
    served, head = build(directory, native, eagle3=reference.save(tmp_path))
    seen: list[Tensor] = []
    compute = head.logits
    monkeypatch.setattr(head, "logits", lambda outputs: (seen.append(compute(outputs)), seen[-1])[1])

    def propose(ids: list[int], count: int) -> list[int]:
        drafts, logits = reference.propose(model, ids, count)
        torch.testing.assert_close(torch.cat(seen), torch.stack(logits), atol=1e-4, rtol=0)
        seen.clear()
        return drafts

    follow(make_engine(served, draft=head), propose)


@pytest.mark.parametrize("kind", ["gemma4_text", "qwen3_next"])
def test_states_tapped_by_a_program_and_layer_by_layer(kind: str) -> None:
    """Of a model whose layers have further inputs, and of one with recurrent layers."""
    directory, found = make(kind), []
    for native in (False, True):
        kernels = our_kernels(read_model_spec(directory, "float32")) if native else None
        served = build_model(directory, "float32", "cpu", lambda stage, percent: None, kernels=kernels)
        assert isinstance(served, DecoderModel)
        (truth,) = drive(make_engine(served), [[9, 8, 7, 30]], 3)
        taps = (0, 1, len(served.whole_config.layers))
        served.tap_hidden(taps, found.append)
        assert drive(make_engine(served), [[9, 8, 7, 30]], 3) == [truth]
        assert (served._program is not None) == native
    assert [states.shape for states in found] == [(4, 3 * HIDDEN), (1, 3 * HIDDEN), (1, 3 * HIDDEN)] * 2
    for by_layer, by_program in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(by_program, by_layer, atol=1e-4, rtol=0)


def steps_taken(engine: TorchEngine, starts: list[int], count: int, drafts: int) -> int:
    """How many steps after the prompt's requests that count take together, for `count` tokens each, with this many
    drafts in each step."""
    asked: list[int] = []

    def guess(row: int, drawn: int) -> int:
        asked.extend([row] * (drawn > 0))
        return drafts if drawn else 0

    drawn = drive(engine, [[(at + n) % VOCAB for n in range(5)] for at in starts], count, guess=guess)
    assert [one.ids for one in drawn] == [[(at + 5 + n) % VOCAB for n in range(count)] for at in starts]
    return len(asked)


@pytest.mark.parametrize("part", ["embedding", "hidden"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "mimo"])
def test_mtp_layers_that_know_the_text_are_accepted(kind: str, part: str, tmp_path: Path) -> None:
    """The model counts. The layer knows the token after the next from the embedding of the next one, or from the hidden
    state before it, which it turns by one."""
    turn, nothing = rotation(HIDDEN, VOCAB).float(), torch.zeros(HIDDEN, HIDDEN)
    halves = (torch.eye(HIDDEN), nothing) if part == "embedding" else (nothing, turn)
    projection = torch.cat(halves[::-1] if kind == "mimo" else halves, 1)
    source = counting(deeper(kind), tmp_path / "deeper", is_centred(kind))
    served, head = build(with_mtp(kind, tmp_path / "model", source, projection), native=True)
    # One token by the prompt, and three steps of four drafts and a token each.
    assert steps_taken(make_engine(served, draft=head), [7, 100, 300, 505], 16, 4) == 4 * 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that counts, and a head that was trained for it, without this server's code."""
    directory = tmp_path_factory.mktemp("trained")
    model = counting(make("llama", layers=6), directory / "model")
    texts = [[(at + n) % VOCAB for n in range(32)] for at in range(0, VOCAB, 16)]
    head = trained_head(transformers_model(model), Form(scored=VOCAB - 12), texts, 40)
    return model, head.save(directory / "head")


def test_a_trained_eagle3_head_is_accepted(trained: tuple[Path, Path]) -> None:
    """By chance one of 512 drafts would be."""
    served, head = build(trained[0], True, eagle3=trained[1])
    starts = list(range(3, VOCAB, 40))
    without = len(starts) * 20
    assert steps_taken(make_engine(served, draft=head), starts, 21, 2) < 0.6 * without


def small_head(directory: Path, model: Path, **form: Any) -> Path:
    """A random head for this model."""
    return Eagle3Head(Form(**form), transformers_model(model)).save(directory)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "llama", "qwen3_5_text"])
def test_drafts_change_no_token(kind: str, tmp_path: Path) -> None:
    """Of MTP layers, and of an EAGLE-3 head on a model with attention alone and on one with recurrent layers."""
    if kind in ("llama", "qwen3_5_text"):
        directory = make(kind)
        form = {"taps": (0, 1, LAYERS), "scored": 300}
        served, head = build(directory, True, "bfloat16", small_head(tmp_path, directory, **form))
    else:
        served, head = build(with_mtp(kind, tmp_path), True, "bfloat16")
    prompts, samplings = requests(8)
    truth = drive(engine_of(served), prompts, COUNT, samplings)
    engine = engine_of(served, draft=head)
    for among, chunk, stagger in ((1.0, 4096, 0), (0.5, 7, 3)):
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, asking(3, among)[1]) == truth


@pytest.mark.parametrize("kind", ["qwen3_next", "llama"])
def test_scheduled_requests_are_as_without_drafts(kind: str, trained: tuple[Path, Path], tmp_path: Path) -> None:
    """In batches and chunks, preempted, with prefix hits, and resumed by another scheduler and worker; to the bit. The
    model counts, so that drafts are accepted."""
    if kind == "llama":
        served, head = build(trained[0], True, eagle3=trained[1])
    else:
        source = counting(deeper(kind), tmp_path / "deeper", centred=True)
        projection = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
        served, head = build(with_mtp(kind, tmp_path / "model", source, projection), True)
    draw = random.Random(4)
    prompts = [[draw.randrange(6, 400) for _ in range(draw.choice((3, 20, 40)))] for _ in range(6)]
    prompts += [prompts[2], [*prompts[3], 9]]
    alone = []
    for prompt in prompts:
        single = ScheduledEngine(make_engine(served, slots=1))
        alone.append(single.add(prompt, 40))
        single.run()
    scheduled = ScheduledEngine(
        make_engine(served, slots=6, pages=11, draft=head), SchedulerConfig(max_drafts=3, draft_model=True)
    )
    for _ in range(2):
        together = [scheduled.add(prompt, 40) for prompt in prompts]
        scheduled.run()
        assert [(one.ids, one.logprobs) for one in together] == [(one.ids, one.logprobs) for one in alone]
    counters = scheduled.scheduler.counters
    assert counters.preemptions > 0
    assert counters.accepted_draft_tokens > 100
    scheduled.restart_scheduler()
    resumed = [scheduled.add(prompt, 40, resumed=one.ids[:9]) for prompt, one in zip(prompts, alone, strict=True)]
    scheduled.run()
    assert [one.ids for one in resumed] == [one.ids[9:] for one in alone]


def test_heads_are_loaded_at_start(tmp_path: Path) -> None:
    run, model = tmp_path / "run", make("llama", layers=6)
    run.mkdir()
    for directory, draft in (
        (with_mtp("deepseek_v3", tmp_path / "model"), None),
        (model, small_head(tmp_path / "head", model)),
    ):
        engine, told = start(draft, run, directory, draft_model_id=MTP if draft is None else str(draft))
        what = "layer for multi-token prediction" if draft is None else "EAGLE-3 head"
        assert f"loading the {what}" in told
        served = build_model(directory, "float32", "cpu", lambda stage, percent: None)
        (truth,) = drive(make_engine(served), [[9, 8, 7]], 12)
        assert drive(engine, [[9, 8, 7]], 12, guess=lambda row, drawn: 3)[0].ids == truth.ids


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_head(tmp_path_factory.mktemp("head"), make("llama", layers=6))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": (
        {"vocab_size": 600},
        "cannot draft for this model: it is for a vocab_size of 600, and the model's is",
    ),
    "width": ({"target_hidden_size": 32}, "it is for a hidden_size of 32, and the model's is 64"),
    "taps": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "before layers 1, 3, 7, and the model has layers 0 to"),
    "layers": ({"num_hidden_layers": 17}, "it has 17 layers, 1 to 16 expected"),
    "more layers": ({"num_hidden_layers": 2}, "asks for"),
    "no last norm": ({"eagle_config": {"use_last_layernorm": False}}, "has no last norm .use_last_layernorm False"),
    "several tokens": ({"eagle_config": {"parallel_draft_step": 4}}, "predicts several tokens at once"),
    "last states": ({"eagle_config": {"use_aux_hidden_state": False}}, "reads the last hidden states alone"),
    "family": ({"model_type": "gemma2"}, "is one of gemma2, which is not computed"),
    "many taps": ({"eagle_aux_hidden_state_layer_ids": [1] * 9}, "reads the hidden states before layers 1, 1, 1"),
    "scored": ({"draft_vocab_size": 513}, "its draft_vocab_size is 513, and its vocab_size 512"),
    "infinite": ({"draft_vocab_size": float("inf")}, "is not that of an EAGLE-3 head"),
    "no size": ({"target_hidden_size": "x"}, "is not that of an EAGLE-3 head"),
    "no object": ({"eagle_config": [1]}, "is not that of an EAGLE-3 head"),
    "missing": ({"intermediate_size": None}, "is not that of an EAGLE-3 head"),
    "activation": ({"hidden_act": "tanh"}, "hidden_act 'tanh', which is not computed in the layer of an EAGLE-3 head"),
    "shape": ({"num_attention_heads": 2}, "asks for"),
    "ids": ({"draft_vocab_size": 100}, "asks for"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_heads_that_are_not_for_the_model_are_refused(what: str, random_head: Path, tmp_path: Path) -> None:
    changes, said = REFUSED[what]
    head = Path(shutil.copytree(random_head, tmp_path / "head"))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=said):
        start(head, tmp_path, make("llama", layers=6))


def test_other_refusals(tmp_path: Path) -> None:
    model = make("llama", layers=6)
    head = small_head(tmp_path / "head", model)
    with pytest.raises(UserError, match=r"cannot draft for itself: it has no layer for multi-token prediction"):
        start(None, tmp_path, make("deepseek_v3"), draft_model_id=MTP)
    with pytest.raises(UserError, match="several streams"):
        start(small_head(tmp_path / "other", model, taps=(0, 1, 2)), tmp_path, make("gemma3n_text"))
    with pytest.raises(UserError, match="drafts for models of the built-in decoder only"):
        start(head, tmp_path, make("persimmon"))
    with pytest.raises(UserError, match="needs its weights"):
        start(head, tmp_path, model, load_format="dummy")
    with pytest.raises(UserError, match="has an EAGLE-3 head, which drafts for another model"):
        read_model_config(head)
    broken = load_file(head / SINGLE_FILE)
    save_file(broken | {"d2t": broken["d2t"] + VOCAB}, head / SINGLE_FILE)
    with pytest.raises(UserError, match="must give each of the 200 ids that the head scores one of the 512"):
        start(head, tmp_path, model)
    narrow = small_head(tmp_path / "narrow", model, hidden=48)
    with pytest.raises(UserError, match="it needs an embedding and an output head of its own"):
        start(narrow, tmp_path, model)
    for first in ({"architectures": ["LlamaForCausalLMEagle"]}, {"model_type": "eagle"}):
        (head / "config.json").write_text(json.dumps(first))
        with pytest.raises(UserError, match="has an EAGLE head of the first kinds"):
            read_model_config(head)
    (head / "config.json").write_text(json.dumps({"speculators_model_type": "dflash"}))
    with pytest.raises(UserError, match="of the kind dflash"):
        read_model_config(head)
