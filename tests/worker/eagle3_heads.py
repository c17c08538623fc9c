"""EAGLE-3 heads for the tests: the published formula on transformers' layers, random or trained, as checkpoints."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from tgi.worker.checkpoint import SINGLE_FILE


class Form(NamedTuple):
    """How a head is published, and what it does otherwise than the paper's."""

    speculators: bool = False  # as the speculators library writes it, with layers of Qwen3 and an own embedding
    flags: tuple[str, ...] = ()  # of norm_before_residual, norm_before_fc, fc_norm, norm_output
    hidden: int = 64
    scored: int = 200
    bias: bool = False  # of fc
    taps: tuple[int, ...] | None = None  # named in config.json; None: the default
    layers: int = 1
    named_after: bool = False  # eagle_config names the layers whose output is tapped

    def all_taps(self, layers: int) -> list[int]:
        """The numbers of layers before which the hidden states are tapped."""
        return sorted(self.taps or (2, layers // 2, layers - 3))


class Eagle3Head(nn.Module):
    """The head for a model of transformers. Its parameters have the names of the paper's code."""

    def __init__(self, form: Form, model: Any, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        served, self.form = model.config, form
        self.taps = form.all_taps(served.num_hidden_layers)
        kind = transformers.Qwen3Config if form.speculators else transformers.LlamaConfig
        self.config = kind(
            hidden_size=form.hidden, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
            num_hidden_layers=form.layers, vocab_size=served.vocab_size, max_position_embeddings=64, rope_theta=5000.0,
            rms_norm_eps=1e-5,
        )  # fmt: skip
        self.config._attn_implementation = "sdpa"
        size, fused = form.hidden, len(self.taps) * served.hidden_size
        build = Qwen3DecoderLayer if form.speculators else LlamaDecoderLayer
        layer, *further = (build(self.config, number) for number in range(form.layers))
        self.further = nn.ModuleList(further)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * size, outputs, bias=False))
        layer.hidden_norm = LlamaRMSNorm(size, 1e-5)
        self.midlayer, self.norm = layer, LlamaRMSNorm(size, 1e-5)
        self.fc = nn.Linear(fused, size, bias=form.bias)
        self.lm_head = nn.Linear(size, form.scored, bias=False)
        self.embed_tokens = model.get_input_embeddings()
        if form.speculators:
            self.embed_tokens = nn.Embedding(served.vocab_size, size)
        if "norm_before_fc" in form.flags:
            self.input_norm = LlamaRMSNorm(fused, 1e-5)
        if "fc_norm" in form.flags:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(served.hidden_size, 1e-5) for _ in self.taps)
        self.targets = torch.randperm(served.vocab_size)[: form.scored].sort().values  # ids that it scores
        self._rotary = LlamaRotaryEmbedding(self.config)
        with torch.no_grad():
            for parameter in self.own():
                parameter.copy_(
                    torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
                )
                parameter.add_(1.0 if parameter.ndim == 1 else 0.0)

    def own(self) -> list[nn.Parameter]:
        """The parameters of the head."""
        return [one for name, one in self.named_parameters() if self._keeps(name)]

    def _keeps(self, name: str) -> bool:
        return self.form.speculators or not name.startswith("embed_tokens")

    def fuse(self, states: tuple[Tensor, ...]) -> Tensor:
        """h of the served model's hidden states before each layer, [B, T, hidden] each."""
        tapped = [states[tap] for tap in self.taps]
        if "fc_norm" in self.form.flags:
            tapped = [norm(one) for norm, one in zip(self.fc_norm, tapped, strict=True)]
        fused = torch.cat(tapped, -1)
        return self.fc(self.input_norm(fused) if "norm_before_fc" in self.form.flags else fused)

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What a further token is predicted from [B, T, hidden], and the logits [B, T, scored], of h [B, T, hidden] and
        the next ids [B, T]."""
        layer, flags = self.midlayer, self.form.flags
        normed = layer.hidden_norm(hidden)
        residual = normed if "norm_before_residual" in flags else hidden
        inputs = torch.cat((layer.input_layernorm(self.embed_tokens(tokens)), normed), -1)
        positions = self._rotary(inputs, torch.arange(tokens.shape[1])[None])
        mixed, _ = layer.self_attn(hidden_states=inputs, position_embeddings=positions, attention_mask=None)
        x = residual + mixed
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        for more in self.further:
            x = more(x, position_embeddings=positions, attention_mask=None)
        normed = self.norm(x)
        return normed if "norm_output" in flags else x, self.lm_head(normed)

    def propose(self, model: Any, ids: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy drafts after these ids, and the logits [vocab] of each."""
        with torch.no_grad():
            hidden, known = self.fuse(hidden_states(model, [ids]))[:, :-1], ids[1:]
            found: list[Tensor] = []
            for _ in range(count):
                outputs, logits = self(hidden, torch.tensor([known]))
                whole = torch.full((self.config.vocab_size,), -torch.inf)
                whole[self.targets] = logits[0, -1]
                found.append(whole)
                known = [*known, int(whole.argmax())]
                hidden = torch.cat((hidden, outputs[:, -1:]), 1)
            return known[-count:], found

    def save(self, directory: Path) -> Path:
        """Writes the checkpoint."""
        directory.mkdir(parents=True, exist_ok=True)
        form, tensors = self.form, {name: one.detach() for name, one in self.state_dict().items() if self._keeps(name)}
        layer = {"model_type": "llama"} | self.config.to_diff_dict()
        own: dict[str, Any] = {"draft_vocab_size": form.scored, **dict.fromkeys(form.flags, True)}
        served = self.fc.in_features // len(self.taps)
        if served != form.hidden:
            own["target_hidden_size"] = served
        if form.taps and form.named_after:
            own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]}
        elif form.taps:
            own["eagle_aux_hidden_state_layer_ids"] = list(form.taps)
        if form.speculators:
            tensors = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
            own |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
            config = own | {"transformer_layer_config": layer}
        else:
            config = layer | own | {"architectures": ["LlamaForCausalLMEagle3"]}
        further = {f"layers.{number + 1}.": f"further.{number}." for number in range(len(self.further))}
        for own_name, name in further.items():
            tensors = {one.replace(name, own_name): tensor for one, tensor in tensors.items()}
        tensors["d2t"] = self.targets - torch.arange(form.scored)
        tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, self.targets, True)
        save_file({name: one.contiguous() for name, one in tensors.items()}, directory / SINGLE_FILE)
        (directory / "config.json").write_text(json.dumps(config))
        return directory


def trained_head(model: Any, form: Form, texts: list[list[int]], steps: int) -> Eagle3Head:
    """A head that has learned these texts of the model, of one length, at two tokens ahead and three."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would spend their time on waiting for each other
    head = Eagle3Head(form, model)
    with torch.no_grad():
        states, ids = hidden_states(model, texts), torch.tensor(texts)
    place = torch.full((head.config.vocab_size,), -100).index_put_((head.targets,), torch.arange(form.scored))
    optimizer = torch.optim.Adam(head.own(), 1e-2)
    for _ in range(steps):
        hidden, loss = head.fuse(states)[:, :-2], torch.zeros(())
        for ahead in (1, 2):
            hidden = hidden[:, : ids.shape[1] - 1 - ahead]
            outputs, logits = head(hidden, ids[:, ahead : ahead + hidden.shape[1]])
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), place[ids[:, ahead + 1 :]].flatten())
            hidden = outputs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    return head.eval()


def hidden_states(model: Any, texts: list[list[int]]) -> tuple[Tensor, ...]:
    """The hidden states of B texts of one length before each layer, and after the last one, [B, T, hidden] each."""
    last: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    states = model(torch.tensor(texts), output_hidden_states=True).hidden_states
    handle.remove()
    return (*states[:-1], *last)
