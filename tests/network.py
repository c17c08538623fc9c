"""An emulated network for tests, and HTTP clients on its hosts: see scripts/reliability/network.py."""

import contextlib
from collections.abc import Iterator
from typing import Any

import httpcore
import httpx
import pytest

from scripts.reliability.network import Host, Network, missing_here


@contextlib.contextmanager
def network(*names: str, seed: int = 0) -> Iterator[Network]:
    """An emulated network of hosts with these names. Skips the test where the machine has none, with the reason."""
    if reason := missing_here():
        pytest.skip(f"cannot emulate a network: {reason}")
    with Network(*names, seed=seed) as made:
        yield made


class HostTransport(httpx.HTTPTransport):
    """A transport of httpx whose connections start on a host."""

    def __init__(self, host: Host) -> None:
        super().__init__(verify=False, trust_env=False)
        self._pool = httpcore.ConnectionPool(network_backend=_HostBackend(host))


class _HostBackend(httpcore.SyncBackend):
    def __init__(self, host: Host) -> None:
        self._host = host

    def connect_tcp(self, *arguments: Any, **options: Any) -> httpcore.NetworkStream:
        return self._host.run(super().connect_tcp, *arguments, **options)
