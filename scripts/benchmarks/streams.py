"""Requests to a server on this host, recorded with their times by the client of `tgi bench`."""

import asyncio
import statistics
from typing import Any

import uvloop

from tgi.bench.stream import BadStream, Event, Meter, Origin, Stream, send

__all__ = ["BadStream", "Event", "Stream", "burst", "median", "stream"]

LONGEST_BURST = 900.0  # seconds until a silent server counts as failed


async def stream(port: int, path: str, body: dict[str, Any], patience: float = LONGEST_BURST) -> Stream:
    """One POST over its own connection, read to the end. Raises OSError if the port is closed."""
    return await send(Origin(f"http://127.0.0.1:{port}", {}), path, body, Meter(), patience)


def burst(port: int, path: str, bodies: list[dict[str, Any]], patience: float = LONGEST_BURST) -> list[Stream]:
    """Sends all requests concurrently. Raises BadStream if they have not ended after `patience` seconds."""

    async def ask() -> list[Stream]:
        return await asyncio.gather(*(stream(port, path, body, patience) for body in bodies))

    try:
        found: list[Stream] = uvloop.run(ask())
    except TimeoutError:
        raise BadStream(f"no end after {patience:g} s") from None
    return found


def median(values: list[float]) -> float:
    """The median; nan for an empty list."""
    return statistics.median(values) if values else float("nan")
