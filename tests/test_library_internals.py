"""The classes of libraries whose internals the product uses are those that it was written for."""

import hashlib
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

REQUIREMENTS = Path(__file__).parents[1] / "requirements" / "base.txt"
HTTP_SERVER = "HttpConnection, HttpServer and ConnectionTable in tgi/api/http_server.py"
# Of each class the first digits of its source's SHA-256, and what uses it.
SOURCES = {
    HttpToolsProtocol: ("18fdf324b11bf160", HTTP_SERVER),
    RequestResponseCycle: ("e67d470d435dcc1c", HTTP_SERVER),
    Server: ("06e799f7c58f8be6", HTTP_SERVER),
    ServerState: ("f2260fbf10154746", HTTP_SERVER),
    MmapedDict: ("6e06f65ed9e69bbe", "MetricStore"),
}


@pytest.mark.parametrize("cls", SOURCES, ids=lambda cls: cls.__name__)
def test_internals_are_the_known_ones(cls: type) -> None:
    known, user = SOURCES[cls]
    digest = hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()[:16]
    assert digest == known, (
        f"{cls.__module__} has another {cls.__name__} than {user} was made for. Compare its source with that of the "
        f"version before, adapt {user} where it overrides or uses what has changed, then write {digest!r} here."
    )


@pytest.mark.parametrize("library", ["uvicorn", "prometheus-client"])
def test_no_other_minor_version_is_installed(library: str) -> None:
    major, minor, *_ = version(library).split(".")
    assert f"{library}>={major}.{minor},<{major}.{int(minor) + 1}" in REQUIREMENTS.read_text().splitlines(), (
        f"{library} {version(library)} is installed; requirements/base.txt has to allow this minor version alone"
    )
