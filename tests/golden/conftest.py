"""Front ends for the golden files: one per set of settings and state, shared by the exchanges that need it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.conftest import LIMITS, READY, Front, request
from tests.golden.reader import Exchange
from tests.golden.scripts import SCRIPTS
from tgi.microkernel.messages.protocol import Cancel, Generate, ModelSource, ModelTask, Status
from tgi.microkernel.settings.table import Settings

# States in which another kind of model is served.
MODELS = {
    "an embedding model": ModelSource(task=ModelTask.EMBED, prompts=["query"]),
    "a reranker": ModelSource(task=ModelTask.CLASSIFY, labels=["LABEL_0"]),
    "a classifier": ModelSource(task=ModelTask.CLASSIFY, labels=["no", "maybe", "yes"]),
}
LOADING = Status(False, True, "loading weights", 40)
STALLED = Status(True, False, "the worker finishes no step", 100, LIMITS)


@pytest.fixture(scope="module")
def front_for() -> Iterator[Callable[[Exchange], Front]]:
    """front_for(exchange): a front end with the settings and in the state of the exchange."""
    fronts: dict[str, Front] = {}
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:

        def find(exchange: Exchange) -> Front:
            states = ("loading weights at 40%", "no step has finished", *MODELS)
            state = exchange.given if exchange.given in states else ""
            key = f"{state} {sorted(exchange.server)}"
            if key not in fronts:
                values = {"validation_workers": 1, "hostname": "127.0.0.1"} | exchange.settings
                directory = Path(folder) / str(len(fronts))
                directory.mkdir()
                front = fronts[key] = Front(Settings(**values), directory, SCRIPTS["nothing"]())  # type: ignore[arg-type]
                front.start()
                _enter_state(front, state)
            fronts[key].tokenizers[0].answer = SCRIPTS[exchange.tokenizer]()
            return fronts[key]

        yield find
        for front in fronts.values():
            front.stop()


def _enter_state(front: Front, state: str) -> None:
    """Starts the tokenizer process and waits until the front end has received its status."""
    tokenizer = front.tokenizers[0]
    if state == "loading weights at 40%":
        tokenizer.start(LOADING)
        while front.get("/health").headers.get("x-startup-stage") != "loading weights 40%":
            pass
        return
    tokenizer.source = MODELS.get(state, tokenizer.source)
    tokenizer.start(READY)
    front.until_ready()
    if state == "no step has finished":
        tokenizer.send(STALLED)
        while front.get("/health").status == 200:
            pass


@contextlib.contextmanager
def in_flight(front: Front) -> Iterator[None]:
    """Another request occupies the server for the duration of the block and gets no token."""
    tokenizer = front.tokenizers[0]
    script, tokenizer.answer = tokenizer.answer, SCRIPTS["silence"]()
    body = b'{"inputs":"other"}'
    with front.connect() as connection:
        head = {"content-type": "application/json", "content-length": str(len(body))}
        connection.sendall(request("POST", "/generate", body, head))
        while tokenizer.next(Generate, 5).inputs != "other":
            pass
        tokenizer.answer = script
        yield
    tokenizer.next(Cancel)  # its permit is free again
