"""Admission: the permits of this front end's clients, and the limits of their keys. Requests of batches need no
permits: the batch limits how many there are, and each permit is left to a client that waits for an answer."""

import asyncio
import math
from collections import Counter

from tgi.api import errors
from tgi.api.clients import Client
from tgi.api.health import Health
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.admission.token_rates import TokenRates


class Admission:
    """Decides whether a client's request is admitted. Each generation of a client holds one of the server's permits
    while it is active. Permits are acquired for all generations of an HTTP request, before any is submitted."""

    def __init__(self, permits: Permits, token_rates: TokenRates | None, health: Health) -> None:
        """`token_rates`: None if keys have no limits of tokens per minute."""
        self.permits = permits
        self._token_rates = token_rates
        self._health = health
        self._unused: Counter[Client] = Counter()  # permits for generations that are submitted in this loop turn
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns unused permits in the turns of this loop."""
        self._loop = loop

    def require_free_permit(self, client: Client) -> None:
        """Raises ApiError: 429 if no permit is free for this client now. Acquires none. Before the readiness probe has
        passed it does nothing: acquire_permits then answers 503."""
        if self._health.probe_passed:
            self._acquire(client, 1)
            self.release_permit(client)

    def acquire_permits(self, client: Client, count: int = 1) -> None:
        """Acquires permits for this many generations of a client, to be submitted before anything is awaited: those
        that are unused when the loop turns are returned.

        Raises ApiError: 503 before the readiness probe has passed, 429 if too few permits are free for the client.
        """
        if not self._health.probe_passed:
            raise errors.unhealthy(self._health.stage)
        missing = count - self._unused[client]
        if missing > 0:
            self._acquire(client, missing)
            self._unused[client] = count
        if self._loop is not None:
            self._loop.call_soon(self._return_unused)

    def take_permit(self, client: Client) -> None:
        """For a generation that is submitted: takes a permit that was acquired for it, else acquires one.

        Raises ApiError: 429 if none is free for the client.
        """
        if self._unused[client]:
            self._unused[client] -= 1
        else:
            self._acquire(client, 1)

    def release_permit(self, client: Client) -> None:
        """A generation of this client is not active any more."""
        self._release(client, 1)

    def charge(self, client: Client, tokens: int) -> None:
        """Counts the tokens of a generation that has ended."""
        if client.tokens_per_minute is not None and self._token_rates is not None:
            self._token_rates.charge(client.permit_id, client.tokens_per_minute, tokens)

    def _acquire(self, client: Client, count: int) -> None:
        if (
            client.requests is not None
            and not client.batch
            and self.permits.held_by(client.permit_id) + count > client.requests
        ):
            text = f"This API key may have {client.requests} requests at once"
            raise errors.overloaded(self._health.retry_after, text)
        if client.tokens_per_minute is not None and self._token_rates is not None:
            wait = self._token_rates.wait_seconds(client.permit_id, client.tokens_per_minute)
            if wait > 0:
                text = f"This API key may use {client.tokens_per_minute} tokens per minute"
                raise errors.overloaded(math.ceil(wait), text)
        if not client.batch and not self.permits.acquire(count, client.permit_id, client.weight):
            raise errors.overloaded(self._health.retry_after)

    def _release(self, client: Client, count: int) -> None:
        if not client.batch:
            self.permits.release(count, client.permit_id)

    def _return_unused(self) -> None:
        for client, count in self._unused.items():
            self._release(client, count)
        self._unused.clear()
