"""Adapters are loaded and unloaded while the worker runs: answers, the Status, requests with unloaded adapters."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.test_fake_worker import SCRIPT, good, slot, step
from tests.worker.test_loop import Running
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, Status, UpdateAdapter, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.fake_worker.fake_worker import FakeEngine, FakeWorker
from tgi.worker.lora import registry as registry_module
from tgi.worker.lora.registry import AdapterRegistry, FakeAdapter, load_adapters

PROMPT = [1, 2, 3, 4, 5, 6]


def adapter(directory: Path, content: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": content}))
    return directory


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path, FakeEngine(SCRIPT))
    one.scheduler.ready()
    yield one
    one.stop()
    one.scheduler.link.close()


def adapt(running: Running, rid: int, name: str, path: Path | str) -> tuple[list[str], str]:
    """Sends an update. Returns the adapter names of each Status before the answer, and the answer's error."""
    running.scheduler.send(UpdateAdapter(rid, name, str(path)))  # type: ignore[arg-type]
    seen: list[str] = []
    while True:
        message = running.scheduler.until(lambda message: isinstance(message, Status | AdapterUpdated))
        if isinstance(message, AdapterUpdated):
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


def test_a_step_that_was_sent_before_an_update_is_computed_with_the_adapters_before_it(
    running: Running, tmp_path: Path
) -> None:
    adapt(running, 1, "one", adapter(tmp_path / "one"))
    (listed,) = running.loop._status.adapters
    asking = encode(SamplingParams(1, adapter="one", adapter_digest=listed.digest))
    computed = step(1, [(0, 0, 6, 1)], [slot(0, PROMPT, asking)], [(0, 0), (0, 1)])
    running.scheduler.send(computed, UpdateAdapter(2, "one", ""))  # type: ignore[arg-type]
    result = running.scheduler.result()
    assert (len(good(result)), result.row_errors) == (1, [])


def test_files_that_change_while_they_are_read_are_rejected(tmp_path: Path) -> None:
    """Otherwise a digest would name other content."""
    path = adapter(tmp_path / "one")

    def read(directory: Path) -> FakeAdapter:
        adapter(directory, 2)
        return FakeAdapter(directory)

    registry = AdapterRegistry(read)
    with pytest.raises(UserError, match="has changed while it was read"):
        registry.fetch_adapter("one", path)
    registry.add_adapter(registry.fetch_adapter("one", path))  # now it is complete


def test_a_request_without_its_adapter_fails_alone(tmp_path: Path) -> None:
    worker = FakeWorker(SCRIPT)
    load_adapters(worker.adapters, (("one", str(adapter(tmp_path / "one"))),))
    (listed,) = worker.adapters.loaded_adapters
    asking = encode(SamplingParams(1, adapter="one", adapter_digest=listed.digest))
    lost = encode(SamplingParams(1, adapter="two", adapter_digest=b"x"))
    slots = [slot(0, PROMPT), slot(1, PROMPT, asking), slot(2, PROMPT, lost)]
    pages = [(at, 2 * at + page) for at in range(3) for page in range(2)]
    result = worker.run_step(step(1, [(0, 0, 4, 0), (1, 0, 5, 0), (2, 0, 6, 1)], slots, pages))
    assert result.row_errors == ["", "", "the adapter two is not loaded any more"]
    result = worker.run_step(step(2, [(0, 4, 2, 1), (1, 5, 1, 1)]))
    assert (len(result.token_ids), result.row_errors) == (8, [])
    plain, adapted = good(result)
    assert plain != adapted
    worker.adapters.remove_adapter("one")
    assert good(worker.run_step(step(3, [(1, 6, 1, 1)])))  # a request that runs goes on


def test_pages_of_an_adapter_are_not_shared_with_other_requests(tmp_path: Path) -> None:
    worker = FakeWorker(SCRIPT)
    load_adapters(worker.adapters, (("one", str(adapter(tmp_path / "one"))),))
    asking = encode(SamplingParams(1, adapter="one", adapter_digest=worker.adapters.loaded_adapters[0].digest))
    good(worker.run_step(step(1, [(0, 0, 6, 1)], [slot(0, PROMPT, asking)], [(0, 0), (0, 1)])))
    shared = worker.run_step(step(2, [(1, 4, 2, 1)], [slot(1, PROMPT)], [(1, 0), (1, 2)]))
    assert "holds other tokens" in shared.error


def test_content_lives_while_a_name_or_a_request_refers_to_it(tmp_path: Path) -> None:
    registry = AdapterRegistry(FakeAdapter)
    load_adapters(registry, (("one", str(adapter(tmp_path / "a"))), ("two", str(adapter(tmp_path / "a")))))
    first, second = registry.loaded_adapters
    assert first == LoadedAdapter("one", str(tmp_path / "a"), first.digest)
    assert first.digest == second.digest
    registry.remove_adapter("one")
    held = registry.find_content(first.digest)
    registry.remove_adapter("two")
    assert registry.find_content(first.digest) is held
    del held
    assert registry.find_content(first.digest) is None


def test_the_number_of_adapters_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_ADAPTERS", 1)
    registry = AdapterRegistry(FakeAdapter)
    path = adapter(tmp_path / "a")
    load_adapters(registry, (("one", str(path)), ("one", str(path))))
    with pytest.raises(UserError, match="Unload one first"):
        registry.fetch_adapter("two", path)
    registry.remove_adapter("one")
    fetched = [registry.fetch_adapter(name, path) for name in ("two", "three")]
    assert registry.add_adapter(fetched[0])
    with pytest.raises(UserError, match="Unload one first"):  # there was room when it was read
        registry.add_adapter(fetched[1])


def test_lack_of_memory_is_a_user_error(tmp_path: Path) -> None:
    def read(directory: Path) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(UserError, match="not enough memory"):
        AdapterRegistry(read).fetch_adapter("one", adapter(tmp_path / "a"))
