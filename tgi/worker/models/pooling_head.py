"""PoolingHead: from the hidden states of a text to its vector: pooling, dense layers, and a classifier's head."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.hub.pooling import PoolingConfig
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import ModelTask
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.models.config_reader import EPILOGUES

Step = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Step] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class PoolingHead:
    """Computes in float32: a call takes hidden states [T, hidden] of packed sequences and returns [sequences, size]."""

    def __init__(
        self, pooling: PoolingConfig, config: dict[str, Any], checkpoint: Checkpoint, hidden: int, device: torch.device
    ) -> None:
        """Loads the weights of the head. Raises UserError naming a tensor that is missing or has another shape."""
        self._pooling = pooling.pooling
        self._device = device
        self.size = hidden
        self._steps: list[Step] = []
        for dense in pooling.dense:
            with Checkpoint(dense.directory) as stored:
                self._add_dense(stored, "linear", dense.outputs, dense.bias, dense.activation)
        if pooling.task is ModelTask.CLASSIFY and pooling.score_tokens is None:
            self._add_classifier(pooling, config, checkpoint)

    def __call__(self, hidden: Tensor, bounds: list[int]) -> Tensor:
        """The vectors float32 [sequences, size]. Sequence r has the rows bounds[r] to bounds[r + 1] - 1."""
        ends = torch.tensor(bounds, device=hidden.device)
        if self._pooling == "cls":
            pooled = hidden.index_select(0, ends[:-1]).float()
        elif self._pooling == "last":
            pooled = hidden.index_select(0, ends[1:] - 1).float()
        else:
            parts = hidden.float().split([stop - start for start, stop in pairwise(bounds)])
            pooled = torch.stack([part.mean(0) for part in parts])
        # One row at a time: the number of rows may change the order of sums.
        return torch.cat([self._finish(row) for row in pooled.split(1)])

    def _finish(self, x: Tensor) -> Tensor:
        for step in self._steps:
            x = step(x)
        return x

    def _add_dense(self, stored: Checkpoint, name: str, outputs: int, bias: bool, activation: str) -> None:
        weight = self._wide(stored, f"{name}.weight", outputs, self.size)
        vector = self._wide(stored, f"{name}.bias", outputs) if bias else None
        apply = ACTIVATIONS[activation]
        self._steps.append(lambda x: apply(F.linear(x, weight, vector)))
        self.size = outputs

    def _add_classifier(self, pooling: PoolingConfig, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        kind, labels = config["model_type"], len(pooling.labels)
        if kind == "bert":
            self._add_dense(checkpoint, "bert.pooler.dense", self.size, True, "tanh")
            self._add_dense(checkpoint, "classifier", labels, True, "none")
        elif kind == "modernbert":
            activation = EPILOGUES[config.get("classifier_activation", "gelu")]
            self._add_dense(checkpoint, "head.dense", self.size, bool(config.get("classifier_bias")), activation)
            self._add_norm(checkpoint, "head.norm", bool(config.get("norm_bias")), config.get("norm_eps", 1e-5))
            self._add_dense(checkpoint, "classifier", labels, True, "none")
        elif "classifier.out_proj.weight" in checkpoint:
            self._add_dense(checkpoint, "classifier.dense", self.size, True, "tanh")
            self._add_dense(checkpoint, "classifier.out_proj", labels, True, "none")
        elif "score.weight" in checkpoint:
            self._add_dense(checkpoint, "score", labels, "score.bias" in checkpoint, "none")
        else:
            raise UserError(
                f"The weights in {checkpoint.directory} have no head of a classifier of model_type {kind}: "
                "classifier.out_proj or score was expected."
            )

    def add_token_score(self, no: Tensor, yes: Tensor) -> None:
        """The score of a model that ranks by two tokens: the difference of their logits; rows of the output head."""
        weight = (yes.float() - no.float())[None]
        self._steps.append(lambda x: F.linear(x, weight))
        self.size = 1

    def _add_norm(self, checkpoint: Checkpoint, name: str, bias: bool, epsilon: float) -> None:
        weight = self._wide(checkpoint, f"{name}.weight", self.size)
        vector = self._wide(checkpoint, f"{name}.bias", self.size) if bias else None
        self._steps.append(lambda x: F.layer_norm(x, weight.shape, weight, vector, epsilon))

    def _wide(self, stored: Checkpoint, name: str, *shape: int) -> Tensor:
        return stored.tensor(name, *shape).to(self._device, torch.float32)
