"""Multi-token prediction (MTP): a layer of a checkpoint that predicts the token after the next one, as a drafter.

With h_i the output of the model's last norm at position i, e the embedding and t_i the token at position i,

    x_i = projection([embedding_norm(e(t_{i + 1})), hidden_norm(h_i)])
    o_i = norm(layer(x)_i)
    logits of t_{i + 2} = head(o_i)

where embedding and head are those of the model (DeepSeek-V3, 2024, section 2.2). A further token is predicted from o_i
in the place of h_{i + 1}.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.worker.attention.interface import AttentionBackend, ForwardBatch
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.decoder_config import DecoderConfig
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.norm import Norm
from tgi.worker.models.decoder import DecoderModel


class MtpNames(NamedTuple):
    """Names of the parts in a checkpoint."""

    layer: str  # prefix of the tensors of the decoder layer
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str


class MtpParts(NamedTuple):
    """What an MTP layer has before its decoder layer."""

    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear  # [hidden, 2 * hidden]


def find_names(checkpoint: Checkpoint, config: DecoderConfig) -> MtpNames:
    """The names of the first MTP layer. DeepSeek-V3 and GLM have it after the last layer, Qwen3-Next under a prefix of
    its own. Raises UserError if the checkpoint has none."""
    after = f"model.layers.{len(config.layers)}."
    for names in (
        MtpNames(after, f"{after}enorm", f"{after}hnorm", f"{after}eh_proj", f"{after}shared_head.norm"),
        MtpNames("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    ):
        if f"{names.projection}.weight" in checkpoint:
            return names
    raise UserError(
        f"The model in {checkpoint.directory} cannot draft for itself: it has no layer for multi-token prediction "
        f"({after}eh_proj or mtp.fc). Choose another --draft-model-id, or --speculate without one."
    )


def layer_config(config: DecoderConfig) -> DecoderConfig:
    """A decoder of the MTP layer alone, which is like the last layer with attention, and routed if the model has
    experts."""
    layer = config.layers[config.attention_layers[-1]]._replace(routed=config.experts is not None)
    return replace(config, layers=(layer,), recurrent=None)


class MtpModel:
    """An MTP layer with the embedding and the head of its model."""

    def __init__(self, decoder: DecoderModel, parts: MtpParts) -> None:
        """`decoder`: as of `layer_config`."""
        self.decoder = decoder
        self._parts = parts
        self.vocab_size, self.context_length = decoder.vocab_size, decoder.context_length
        self.kv, self.device, self.footprint = decoder.kv, decoder.device, decoder.footprint

    def forward(self, batch: ForwardBatch, hidden: Tensor, attention: AttentionBackend) -> Tensor:
        """o [T, hidden] of h [T, hidden], for a batch whose tokens are the next ones: t_{i + 1} at position i."""

        def inputs(tokens: Tensor) -> Tensor:
            before = F.pad(hidden, (0, 0, 0, len(tokens) - len(hidden)))
            embedded = self._parts.embedding_norm(self.decoder.embed(tokens))
            return self._parts.projection(torch.cat((embedded, self._parts.hidden_norm(before)), 1))

        return self.decoder.run_inputs(batch, attention, inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [n, vocab] of o [n, hidden]."""
        return self.decoder.head_logits(hidden)
