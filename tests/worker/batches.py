"""Builds the batches that models and attention take, from rows written by hand."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.worker.batch import Attention, Batch, Model

PAGE = 16


class Row(NamedTuple):
    """`tokens` at positions start, start + 1, …, of a sequence whose keys and values live in `pages`."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


def make_batch(rows: Sequence[Row], page_size: int = PAGE) -> Batch:
    tokens, positions, cache_at, cu_query, context, draw_at = [], [], [], [0], [], []
    for row in rows:
        for position, token in enumerate(row.tokens, row.start):
            tokens.append(token)
            positions.append(position)
            cache_at.append(row.pages[position // page_size] * page_size + position % page_size)
        cu_query.append(len(tokens))
        context.append(row.start + len(row.tokens))
        draw_at.append(len(tokens) - 1)
    widest = max(-(-n // page_size) for n in context)
    table = [[*row.pages, *[0] * widest][:widest] for row in rows]
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        cache_at=torch.tensor(cache_at),
        cu_query=torch.tensor(cu_query, dtype=torch.int32),
        context=torch.tensor(context, dtype=torch.int32),
        page_table=torch.tensor(table, dtype=torch.int32),
        draw_at=torch.tensor(draw_at),
        query_lengths=[len(row.tokens) for row in rows],
        context_lengths=context,
    )


def moved(batch: Batch, device: str) -> Batch:
    """The same there."""
    columns: list[Any] = [column.to(device) if isinstance(column, Tensor) else column for column in batch]
    return Batch(*columns)


def prefill(model: Model, attention: Attention, ids: Sequence[int], pages: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] behind all of `ids`, computed in one go."""
    return model.forward(make_batch([Row(ids, 0, pages)]), attention)[0]


def in_chunks(
    model: Model, attention: Attention, ids: Sequence[int], pages: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Logits [chunks, vocab] behind each chunk; `sizes` add up to the number of ids."""
    assert sum(sizes) == len(ids)
    done, found = 0, []
    for size in sizes:
        found.append(model.forward(make_batch([Row(ids[done : done + size], done, pages)]), attention)[0])
        done += size
    return torch.stack(found)
