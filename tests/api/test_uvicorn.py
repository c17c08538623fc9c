"""The classes of uvicorn whose internals `tgi/api/http_server.py` uses are those that it was written for."""

import hashlib
import inspect
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "base.txt"
# The first digits of the SHA-256 of each class's source.
SOURCES = {
    HttpToolsProtocol: "18fdf324b11bf160",
    RequestResponseCycle: "e67d470d435dcc1c",
    Server: "06e799f7c58f8be6",
    ServerState: "f2260fbf10154746",
}


@pytest.mark.parametrize("cls", SOURCES, ids=lambda cls: cls.__name__)
def test_internals_are_the_known_ones(cls: type) -> None:
    digest = hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()[:16]
    assert digest == SOURCES[cls], (
        f"uvicorn {uvicorn.__version__} has another {cls.__name__} than tgi/api/http_server.py was made for. Compare "
        f"its source with that of the version before, adapt HttpConnection, HttpServer and ConnectionTable where they "
        f"override or use what has changed, then write {digest!r} here."
    )


def test_no_other_minor_version_is_installed() -> None:
    major, minor, *_ = uvicorn.__version__.split(".")
    assert f"uvicorn>={major}.{minor},<{major}.{int(minor) + 1}" in REQUIREMENTS.read_text().splitlines(), (
        f"uvicorn {uvicorn.__version__} is installed; requirements/base.txt has to allow this minor version alone"
    )
