"""The client libraries that people use, unchanged, against a real server with the demo model.

Their pins exclude each other, so each group runs its own check_GROUP*.py in an environment of its own; see
environments.py.
All groups ask one server at the same time.
"""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.environments import GROUPS, ROOT, environment
from tests.live.server import Server

KEY = "the key"


@pytest.fixture(scope="module")
def outcomes(
    demo_model: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """What each group's checks said: nothing if they pass."""
    place = tmp_path_factory.mktemp("clients")
    guarded = ("--model-id", str(tiny_llama), "--worker", "scripted", "--api-key", KEY)
    with (
        ThreadPoolExecutor(len(GROUPS)) as pool,
        Server(place / "demo", "--model-id", str(demo_model)) as demo,
        Server(place / "guarded", *guarded) as other,
    ):
        pythons = {group: pool.submit(environment, group) for group in GROUPS}
        demo.start()
        other.start().ready()
        demo.ready()
        # Nothing of the user's: no proxy, no tokens and no settings of the clients. served.py reads the addresses.
        addresses = {"TGI_URL": demo.url, "TGI_GUARDED_URL": other.url, "TGI_KEY": KEY}
        environ = {"PATH": os.environ["PATH"], "HOME": str(place), **addresses}
        yield {group: pool.submit(check, group, pythons[group].result(), environ, demo) for group in GROUPS}


def check(group: str, python: Path, environ: dict[str, str], server: Server) -> str:
    """Runs a group's checks in its environment, without this project's configuration of pytest."""
    checks = sorted(map(str, Path(__file__).parent.glob(f"check_{group.replace('-', '_')}*.py")))
    pytest_alone = ("-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider")
    done = subprocess.run(
        [str(python), *pytest_alone, "-q", "--tb=short", "--color=no", "--disable-warnings", *checks],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return ""
    complaints = "".join(line for line in server.output["up"] if " INFO " not in line)
    return f"{group} in {python.parent.parent}:\n{done.stdout}{done.stderr}\nThe server said:\n{complaints}"


@pytest.mark.timeout(600)  # the first run downloads and installs
@pytest.mark.parametrize("group", GROUPS)
def test_client(group: str, outcomes: dict[str, Future[str]]) -> None:
    complaints = outcomes[group].result()
    if complaints:
        pytest.fail(complaints, pytrace=False)
