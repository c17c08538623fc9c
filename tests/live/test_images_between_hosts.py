"""Images whose files are on another host than the worker: run directories, and so media directories, of their own."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.live.server import Server
from tests.live.test_hosts import Host, Hosts
from tests.media.pictures import data_url, encoded, noise
from tests.microkernel.tcp import Cable, cable
from tests.models import vision_model
from tgi.microkernel.host.rundir import media_directory, received_images
from tgi.microkernel.messages.protocol import IMAGE_CHUNK_BYTES

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "1000", "--max-total-tokens", "4000")
SIDE = 700  # pixels: what the tiny model's processor makes of it are five chunks


class Pair(NamedTuple):
    """The host of all roles but the worker, that of the worker, and the network between them."""

    first: Server
    second: Host
    line: Cable

    def ask(self, seed: int, **fields: Any) -> httpx.Response:
        """Sends a request with an image that no other seed has."""
        url = data_url(encoded(noise(SIDE, SIDE, seed=seed)))
        content = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, **fields}
        return self.first.client.post("/v1/chat/completions", json=body)

    def received(self) -> set[Path]:
        """What the worker has of images."""
        return {*received_images(self.second.run_directory, 0).iterdir()}

    def drafts(self) -> list[Path]:
        return [path for path in self.received() if path.suffix == ".draft"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    hosts = Hosts(tmp_path_factory.mktemp("pair"), str(vision_model("qwen2_vl")))
    port = int(hosts.address.rpartition(":")[2])
    with (
        cable(port) as line,
        hosts.start_first("--validation-workers", "1", "--hang-timeout", "20") as first,
        hosts.other("second", f"tcp://127.0.0.1:{line.port}").start("worker", *SCRIPTED) as second,
    ):
        yield Pair(first.wait_until_ready(), second, line)
        assert not pair_leftovers(first, second)
        directories = [media_directory(one.run_directory) for one in (first, second)]
        for one in (second, first):
            one.stop()
        assert not [path for path in directories if path.exists()]


def pair_leftovers(first: Server, second: Server) -> list[Path]:
    """Links of requests, and images that are not complete."""
    links = media_directory(first.run_directory).glob("api-*")
    return [*links, *received_images(second.run_directory, 0).glob("*.draft")]


def test_the_worker_gets_the_same_bytes_once(pair: Pair) -> None:
    """Also by several requests at the same time, and by one that asks for several choices."""
    before = pair.received()
    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(lambda n: pair.ask(1, n=n), (1, 2, 1))]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    (file,) = pair.received() - before
    assert file.stat().st_size > 4 * IMAGE_CHUNK_BYTES
    sent = [one for one in media_directory(pair.first.run_directory).glob("*.safetensors") if one.stem == file.stem]
    assert [one.read_bytes() for one in sent] == [file.read_bytes()]
    assert sent[0].stat().st_ino != file.stat().st_ino
    assert pair.ask(1).status_code == 200
    assert pair.received() == {*before, file}


@pytest.mark.parametrize("lost", ["link", "worker-0", "scheduler-0", "tokenizer-0", "media-0"])
def test_what_is_lost_in_the_middle(pair: Pair, lost: str) -> None:
    """A part of an image has reached the worker. The request is answered in the end, and nothing is left behind."""
    before = pair.received()
    answer = interrupted(pair, seed=100 + len(before))
    if lost != "link":
        (pair.second if lost == "worker-0" else pair.first).kill(lost)
    pair.line.is_cut = False
    assert answer.result(120).status_code == 200, answer.result().text
    assert pair.drafts() == []
    (file,) = pair.received() - before
    assert file.stat().st_size > 4 * IMAGE_CHUNK_BYTES


def test_an_image_whose_front_end_is_lost(pair: Pair) -> None:
    """The worker removes what it has, and so does the front end that follows."""
    before = pair.received()
    answer = interrupted(pair, seed=50)
    pair.first.kill("api-0")
    pair.line.is_cut = False
    assert answer.exception(120) is not None
    pair.first.wait_until(lambda: not pair_leftovers(pair.first, pair.second), "nothing is left behind")
    assert pair.received() == before
    pair.first.wait_until_ready()
    assert pair.ask(51).status_code == 200


def interrupted(pair: Pair, seed: int) -> "Future[httpx.Response]":
    """A request whose image has reached the worker in part when the cable is cut."""
    pair.first.wait_until_ready()
    pair.line.bytes_left = 13 * IMAGE_CHUNK_BYTES // 3  # the first four may come as one message
    answer = ThreadPoolExecutor(1).submit(pair.ask, seed)
    pair.first.wait_until(lambda: pair.line.is_cut, "the cable is cut")
    (draft,) = pair.drafts()
    pair.first.wait_until(lambda: draft.stat().st_size, "a part of it has come")
    assert draft.stat().st_size <= 4 * IMAGE_CHUNK_BYTES
    return answer
