"""Adapters come and go while the worker runs: answers, the list in its status, and requests that hold what is gone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.test_loop import Running
from tests.worker.test_scripted import SCRIPT, good, slot, step
from tgi.kernel.errors import UserError
from tgi.kernel.messages import Adapt, Adapted, Sampling, encode
from tgi.kernel.presence import Adapter, Status
from tgi.worker.lora import shelf as shelves
from tgi.worker.lora.shelf import Shelf, Unread, stock
from tgi.worker.scripted import ScriptedEngine, ScriptedWorker

PROMPT = [1, 2, 3, 4, 5, 6]


def adapter(directory: Path, content: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": content}))
    return directory


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path, ScriptedEngine(SCRIPT))
    one.scheduler.ready()
    yield one
    one.stop()
    one.scheduler.link.close()


def adapt(running: Running, rid: int, name: str, path: Path | str) -> tuple[list[str], str]:
    """Asks, and returns the names of each Status before the answer, and the answer's error."""
    running.scheduler.send(Adapt(rid, name, str(path)))  # type: ignore[arg-type]
    seen: list[str] = []
    while True:
        message = running.scheduler.until(lambda message: isinstance(message, Status | Adapted))
        if isinstance(message, Adapted):
            assert message.rid == rid
            return seen, message.error
        seen.append(" ".join(one.name for one in message.adapters))


def test_adapters_are_loaded_replaced_and_unloaded(running: Running, tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", 2)
    assert adapt(running, 7, "b", one) == (["b"], "")
    assert adapt(running, 8, "a", one) == (["b a"], "")
    assert adapt(running, 9, "b", one) == ([], "")  # the same content: nothing to do
    assert adapt(running, 10, "b", two) == (["b a"], "")
    assert adapt(running, 11, "b", "") == (["a"], "")
    assert adapt(running, 12, "b", "") == ([], "")  # gone already
    _, error = adapt(running, 13, "c", tmp_path / "nowhere")
    assert error == f"{tmp_path}/nowhere has no adapter_config.json, so it is no LoRA adapter."


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    """Or a digest would stand for what it is not of."""
    path = adapter(tmp_path / "one")

    def read(directory: Path) -> Unread:
        adapter(directory, 2)
        return Unread(directory)

    shelf = Shelf(read)
    with pytest.raises(UserError, match="has changed while it was read"):
        shelf.fetch("one", path)
    shelf.put(shelf.fetch("one", path))  # now it is complete


def test_a_request_without_its_adapter_is_at_fault_alone(tmp_path: Path) -> None:
    worker = ScriptedWorker(SCRIPT)
    stock(worker.adapters, (("one", str(adapter(tmp_path / "one"))),))
    (listed,) = worker.adapters.listed
    asking = encode(Sampling(1, adapter="one", adapter_digest=listed.digest))
    lost = encode(Sampling(1, adapter="two", adapter_digest=b"x"))
    slots = [slot(0, PROMPT), slot(1, PROMPT, asking), slot(2, PROMPT, lost)]
    pages = [(at, 2 * at + page) for at in range(3) for page in range(2)]
    result = worker.run_step(step(1, [(0, 0, 4, 0), (1, 0, 5, 0), (2, 0, 6, 1)], slots, pages))
    assert result.faults == ["", "", "the adapter two is not loaded any more"]
    result = worker.run_step(step(2, [(0, 4, 2, 1), (1, 5, 1, 1)]))
    assert (len(result.ids), result.faults) == (8, [])
    plain, adapted = good(result)
    assert plain != adapted
    worker.adapters.drop("one")
    assert good(worker.run_step(step(3, [(1, 6, 1, 1)])))  # a request that runs goes on


def test_pages_of_an_adapter_are_no_other_requests(tmp_path: Path) -> None:
    worker = ScriptedWorker(SCRIPT)
    stock(worker.adapters, (("one", str(adapter(tmp_path / "one"))),))
    asking = encode(Sampling(1, adapter="one", adapter_digest=worker.adapters.listed[0].digest))
    good(worker.run_step(step(1, [(0, 0, 6, 1)], [slot(0, PROMPT, asking)], [(0, 0), (0, 1)])))
    shared = worker.run_step(step(2, [(1, 4, 2, 1)], [slot(1, PROMPT)], [(1, 0), (1, 2)]))
    assert "holds other tokens" in shared.error


def test_a_content_lives_as_long_as_a_name_or_a_request_has_it(tmp_path: Path) -> None:
    shelf = Shelf(Unread)
    stock(shelf, (("one", str(adapter(tmp_path / "a"))), ("two", str(adapter(tmp_path / "a")))))
    first, second = shelf.listed
    assert first == Adapter("one", str(tmp_path / "a"), first.digest)
    assert first.digest == second.digest
    shelf.drop("one")
    held = shelf.find(first.digest)
    shelf.drop("two")
    assert shelf.find(first.digest) is held
    del held
    assert shelf.find(first.digest) is None


def test_there_is_a_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "MOST", 1)
    shelf = Shelf(Unread)
    path = adapter(tmp_path / "a")
    stock(shelf, (("one", str(path)), ("one", str(path))))
    with pytest.raises(UserError, match="Unload one first"):
        shelf.fetch("two", path)
    shelf.drop("one")
    fetched = [shelf.fetch(name, path) for name in ("two", "three")]
    assert shelf.put(fetched[0])
    with pytest.raises(UserError, match="Unload one first"):  # there was room when it was read
        shelf.put(fetched[1])


def test_a_lack_of_memory_is_told(tmp_path: Path) -> None:
    def read(directory: Path) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(UserError, match="not enough memory"):
        Shelf(read).fetch("one", adapter(tmp_path / "a"))
