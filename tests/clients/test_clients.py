"""Client libraries, unmodified, against a real server with the demo model.

The pinned dependencies of those in Python conflict, so each group runs its check_GROUP*.py in its own environment
(environments.py). Those in JavaScript share one, in which each node/check_*.mjs runs. All use the same servers at the
same time.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.train_picture_model import draw_picture
from tests.clients.environments import GROUPS, NODE, ROOT, environment, node_environment
from tests.live.server import Server, SharedServers
from tests.models import picture_model, pooling_model

pytestmark = pytest.mark.live

KEY = "the key"
ANSWERING = Path(__file__).parent / "answering"
PICTURES = 20
NODE_CHECKS = {f"node-{path.stem.removeprefix('check_')}": path.name for path in sorted(NODE.glob("check_*.mjs"))}


@pytest.fixture(scope="module")
def outcomes(
    demo_model: Path, shared_server: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """The failures of each group's checks, and of each in JavaScript; "" if they pass."""
    directory = tmp_path_factory.mktemp("clients")
    # Answers as the prompt says, in the form of the template: see served.script.
    guarded = ("--model-id", str(demo_model), "--worker", "scripted", "--api-key", KEY, "--max-total-tokens", "32768")
    template = ("--tokenizer-config-path", str(ANSWERING / "hermes.jinja"))
    on_path = {"PYTHONPATH": os.pathsep.join([str(ANSWERING), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with (
        ThreadPoolExecutor(len(GROUPS) + len(NODE_CHECKS)) as pool,
        Server(directory / "guarded", *guarded, *template, env=on_path) as guarded_server,
    ):
        node = pool.submit(node_environment)
        pythons = {group: pool.submit(environment, group) for group in GROUPS}
        guarded_server.start()
        demo = shared_server("--model-id", str(demo_model))
        guarded_server.wait_until_ready()
        # Without the user's proxies, tokens and client settings. served.py reads the addresses.
        embeddings = shared_server("--model-id", str(pooling_model("bert")))
        seeing = shared_server("--model-id", str(picture_model()))
        addresses = {
            "TGI_EMBEDDINGS_URL": embeddings.url,
            "TGI_PICTURES_URL": seeing.url,
            "TGI_PICTURES": str(draw_pictures(directory / "pictures")),
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


def draw_pictures(directory: Path) -> Path:
    """Pictures that the model has not seen, and answers.json, for pictures.py."""
    directory.mkdir()
    pictures = {f"{seed}.png": draw_picture(seed) for seed in range(PICTURES)}
    for name, picture in pictures.items():
        picture.image.save(directory / name)
    answers = {name: picture.answer for name, picture in pictures.items()}
    (directory / "answers.json").write_text(json.dumps(answers))
    return directory


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
