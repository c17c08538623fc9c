"""The draft model: a second, smaller model that guesses what the served one will draw.

It keeps keys and values of its own for the same pages of the same slots, and draws by the same rules with the same
noise, but from its own logits and without grammars: so where the two models think alike, its guess is right, at random
too. Nothing but the number of accepted drafts depends on it, so it may lag, and its keys and values may be missing (it
has not seen the last draft of a row that ends when all were accepted, and another request may go on from its pages).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tgi.hub.card import read_card
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.errors import UserError
from tgi.kernel.messages import Step
from tgi.worker.batch import Attention, Batch, Model
from tgi.worker.layout import Layout
from tgi.worker.noise import Noise
from tgi.worker.sampling import choose
from tgi.worker.slots import Rows, Slots

# A row that decodes without drafts is computed here once in so many tokens, as together they cost less; each slot's row
# in another step.
LAG = 32

Ints = NDArray[np.int64]


class Draft(NamedTuple):
    """A draft model and its cache, which has the pages of the served model's. Ids mean the same to both."""

    model: Model
    attention: Attention


def need_same_tokens(served: Path, draft: Path) -> None:
    """Raises UserError unless the models in these directories mean the same by the same ids, special ones aside."""
    cards = [read_card(directory) for directory in (served, draft)]
    files = [card.tokenizer_json for card in cards]
    if all(files) and len({file.read_bytes() for file in files if file is not None}) == 1:
        return
    one, other = (read_tokenizer(card).get_vocab(with_added_tokens=False) for card in cards)
    if one != other:
        same = len(one.items() & other.items())
        raise UserError(
            f"The model in {draft} cannot draft for the one in {served}: their tokenizers differ ({same} of "
            f"{len(one)} and {len(other)} tokens are the same). Choose a --draft-model-id of the same family."
        )


class Drafter:
    """Computes the rows of each step on the draft model, and finds the drafts of those that have none given."""

    def __init__(self, draft: Draft, slots: Slots, layout: Layout, noise: Noise) -> None:
        self._model, self._attention = draft
        self._slots = slots
        self._layout = layout
        self._noise = noise
        self._vocab_size = slots.vocab_size
        self._computed = np.zeros(len(slots.known), np.int64)  # ids whose keys and values are here, if they still hold

    def follow(self, step: Step, rows: Rows) -> None:
        """Comes after the rows have been checked and before they are computed. Writes drafts behind the known ids of
        the rows that want them."""
        for new in step.slots:
            self._computed[new.slot] = self._slots.width  # whatever page its first row starts behind
        asked = np.zeros_like(rows.ends) if rows.drafts is None else rows.drafts.counts
        ends = rows.ends - asked
        starts = np.minimum(self._computed[rows.slots], rows.starts)
        wanted = asked if rows.drafts is not None and rows.drafts.ids is None else np.zeros_like(asked)
        chosen = np.flatnonzero((wanted > 0) | (ends - rows.starts > 1) | ((ends + rows.slots) % LAG == 0))
        self._computed[rows.slots] = starts
        slots, starts, ends, wanted = rows.slots[chosen], starts[chosen], ends[chosen], wanted[chosen]
        while len(slots):
            drawing = np.flatnonzero(wanted)
            now = Rows(slots, starts, ends, drawing, ends[drawing])
            logits = self._model.forward(self._batch(now), self._attention)
            self._computed[slots] = ends
            slots, position, wanted = slots[drawing], now.position, wanted[drawing] - 1
            if len(slots):
                ids = choose(self._fitted(logits), self._layout.draws(slots, position, None), self._noise)
                self._layout.write(self._layout.places(slots, position), ids)
            left = wanted > 0
            slots, starts, ends, wanted = slots[left], position[left], position[left] + 1, wanted[left]

    def _batch(self, rows: Rows) -> Batch:
        """The rows' tokens without their adapters. Those that this model has no embedding for (nobody says them) become
        another."""
        batch = self._layout.batch(rows)._replace(adapted=())
        if self._model.vocab_size < self._vocab_size:
            batch = batch._replace(tokens=batch.tokens.clamp_(max=self._model.vocab_size - 1))
        return batch

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits [n, vocab] as wide as the served model's: models with one tokenizer may be padded differently."""
        return F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-torch.inf)
