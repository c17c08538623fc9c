"""Client libraries, unmodified, against servers with the demo model's tokenizer and template, and a scripted worker.

The pinned dependencies of those in Python conflict, so each group runs its check_GROUP*.py in its own environment
(environments.py). Those in JavaScript share one, in which each node/check_*.mjs runs. All use the same servers at the
same time.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.environments import GROUPS, NODE, ROOT, environment, node_environment
from tests.live.server import Server, SharedServers, python_path
from tests.models import pooling_model

pytestmark = pytest.mark.live

KEY = "the key"
ANSWERING = Path(__file__).parent / "answering"
NODE_CHECKS = {f"node-{path.stem.removeprefix('check_')}": path.name for path in sorted(NODE.glob("check_*.mjs"))}


@pytest.fixture(scope="module")
def outcomes(
    demo_model: Path, shared_server: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """The failures of each group's checks, and of each in JavaScript; "" if they pass."""
    directory = tmp_path_factory.mktemp("clients")
    # Both answer what answering/sitecustomize.py says, the guarded one in the form of its template: see served.script.
    model = ("--model-id", str(demo_model), "--worker", "scripted")
    template = ("--tokenizer-config-path", str(ANSWERING / "hermes.jinja"))
    guarded = (*model, "--api-key", KEY, "--max-total-tokens", "32768", *template)
    with (
        ThreadPoolExecutor(len(GROUPS) + len(NODE_CHECKS)) as pool,
        Server(directory / "guarded", *guarded, env=python_path(ANSWERING)) as guarded_server,
        Server(directory / "demo", *model, env=python_path(ANSWERING)) as demo,
    ):
        node = pool.submit(node_environment)
        pythons = {group: pool.submit(environment, group) for group in GROUPS}
        guarded_server.start()
        demo.start().wait_until_ready()
        guarded_server.wait_until_ready()
        # Without the user's proxies, tokens and client settings. served.py reads the addresses.
        embeddings = shared_server("--model-id", str(pooling_model("bert")))
        addresses = {
            "TGI_EMBEDDINGS_URL": embeddings.url,
            "TGI_URL": demo.url,
            "TGI_GUARDED_URL": guarded_server.url,
            "TGI_KEY": KEY,
        }
        environ = {"PATH": os.environ["PATH"], "HOME": str(directory), **addresses}
        outcomes = {group: pool.submit(check, group, pythons[group].result(), environ, demo) for group in GROUPS}
        program, modules = node.result()
        shutil.copytree(NODE, directory / "node")
        (directory / "node" / "node_modules").symlink_to(modules)
        for name, file in NODE_CHECKS.items():
            command = [str(program), "--test", "--test-reporter=spec", file]
            outcomes[name] = pool.submit(run, name, command, directory / "node", environ, demo)
        yield outcomes


def check(group: str, python: Path, environ: dict[str, str], server: Server) -> str:
    """Runs a group's checks in its environment, without this project's configuration of pytest."""
    checks = sorted(map(str, Path(__file__).parent.glob(f"check_{group.replace('-', '_')}*.py")))
    pytest_alone = ("-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider")
    options = ("-q", "--tb=short", "--color=no", "--disable-warnings")
    return run(group, [str(python), *pytest_alone, *options, *checks], ROOT, environ, server)


def run(name: str, command: list[str], directory: Path, environ: dict[str, str], server: Server) -> str:
    """Runs checks: "", or what they and the server say."""
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    log = "".join(line for line in server.output["up"] if " INFO " not in line)
    return f"{name} by {command[0]}:\n{done.stdout}{done.stderr}\nThe server's log:\n{log}"


@pytest.mark.timeout(600)  # the first run downloads and installs
@pytest.mark.parametrize("group", [*GROUPS, *NODE_CHECKS])
def test_client(group: str, outcomes: dict[str, Future[str]]) -> None:
    if failures := outcomes[group].result():
        pytest.fail(failures, pytrace=False)
