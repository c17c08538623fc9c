"""Client libraries that send pictures to a trained model, which names what is in them. The worker has no file of the
front end's: it runs on a host of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.seeing.asking import CLIENTS, check, draw_pictures
from tests.live.server import Server
from tests.live.test_hosts import Hosts
from tests.models import picture_model
from tgi.microkernel.host.rundir import media_directory, received_images

pytestmark = pytest.mark.live

PICTURES = 40  # of which each library asks about all; 95 % of the answers must be right


class Served(NamedTuple):
    first: Server  # all but the worker
    second: Server  # the worker
    pictures: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("see")
    hosts = Hosts(directory, str(picture_model()))
    with hosts.start_first("--validation-workers", "1") as first, hosts.other("second").start("worker") as second:
        pictures = draw_pictures(directory / "pictures", PICTURES)
        yield Served(first.wait_until_ready(), second, pictures)


@pytest.mark.timeout(600)  # the first run installs the client
@pytest.mark.parametrize("client", CLIENTS)
def test_answers_are_right(served: Served, client: str) -> None:
    done = check(client, served.first.url, served.pictures)
    assert done.returncode == 0, done.stdout + done.stderr
    own, received = (
        {path.stem: path for path in directory.glob("*.safetensors")}
        for directory in (media_directory(served.first.run_directory), received_images(served.second.run_directory, 0))
    )
    assert len(received) >= PICTURES
    assert all(own[digest].read_bytes() == path.read_bytes() for digest, path in received.items())
