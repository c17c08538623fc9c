"""Addresses that `tgi bench`, `tgi chat` and `tgi batch` take."""

import pytest

from tgi.server_address import ServerAddress


@pytest.mark.parametrize(
    ("url", "where", "header"),
    [
        ("http://127.0.0.1:3000", ("127.0.0.1", 3000, False, ""), "127.0.0.1:3000"),
        ("localhost:3000/", ("localhost", 3000, False, ""), "localhost:3000"),
        ("https://Host.example/v1/", ("host.example", 443, True, ""), "host.example"),
        ("http://user:password@host/path/v1", ("host", 80, False, "/path"), "host"),
        ("https://[::1]:8443/path/", ("::1", 8443, True, "/path"), "[::1]:8443"),
    ],
)
def test_url(url: str, where: tuple[str, int, bool, str], header: str) -> None:
    address = ServerAddress.parse(url)
    assert (address.host, address.port, address.tls, address.prefix) == where
    assert address.host_header == header
