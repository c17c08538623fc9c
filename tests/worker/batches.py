"""Builds ForwardBatches from rows that a test writes down."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.worker.attention.interface import AttentionBackend, ForwardBatch
from tgi.worker.models.interface import Model

PAGE = 16


class Row(NamedTuple):
    """`tokens` at positions start, start + 1, …, of a sequence whose keys and values are in `pages`.

    The sequence has the state slot of the number after that of its first page.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


def make_batch(rows: Sequence[Row], page_size: int = PAGE) -> ForwardBatch:
    tokens, positions, slot_mapping, cu_query_lens, context_lens, logits_indices = [], [], [], [0], [], []
    for row in rows:
        for position, token in enumerate(row.tokens, row.start):
            tokens.append(token)
            positions.append(position)
            slot_mapping.append(row.pages[position // page_size] * page_size + position % page_size)
        cu_query_lens.append(len(tokens))
        context_lens.append(row.start + len(row.tokens))
        logits_indices.append(len(tokens) - 1)
    widest = max(-(-n // page_size) for n in context_lens)
    table = [[*row.pages, *[0] * widest][:widest] for row in rows]
    return ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor([slot_mapping]),
        cu_query_lens=torch.tensor(cu_query_lens, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        page_table=torch.tensor([table], dtype=torch.int32),
        logits_indices=torch.tensor(logits_indices),
        query_lens_host=[len(row.tokens) for row in rows],
        context_lens_host=context_lens,
        state_slots=torch.tensor([row.pages[0] + 1 for row in rows], dtype=torch.int32),
    )


def moved(batch: ForwardBatch, device: str) -> ForwardBatch:
    """The batch on another device."""
    columns: list[Any] = [column.to(device) if isinstance(column, Tensor) else column for column in batch]
    return ForwardBatch(*columns)


def prefill(model: Model, attention: AttentionBackend, ids: Sequence[int], pages: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] after all of `ids`, computed in one step."""
    return model.forward(make_batch([Row(ids, 0, pages)]), attention)[0]


def in_chunks(
    model: Model,
    attention: AttentionBackend,
    ids: Sequence[int],
    pages: Sequence[int],
    sizes: Sequence[int],
    page_size: int = PAGE,
) -> torch.Tensor:
    """Logits [chunks, vocab] after each chunk; `sizes` add up to the number of ids."""
    assert sum(sizes) == len(ids)
    done, found = 0, []
    for size in sizes:
        found.append(model.forward(make_batch([Row(ids[done : done + size], done, pages)], page_size), attention)[0])
        done += size
    return torch.stack(found)
