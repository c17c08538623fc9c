"""docs/deployment.md: its command lines, paths and examples match the files and the program."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy.kustomize import LOADER
from tests.deploy.shapes import DEPLOY, KUBERNETES, ROOT, settings_of
from tests.deploy.test_docker import IMAGES, environment_of
from tests.deploy.test_kubernetes import LATEST, MORE_VARIABLES, OLDEST, VARIABLES
from tests.test_pages import blocks
from tgi.microkernel.processes.supervisor import ROLE_GRACE_SECONDS

PAGE = (ROOT / "docs" / "deployment.md").read_text()
LINES = [line for block in blocks(PAGE, "sh") for line in block.replace("\\\n", " ").splitlines()]
WITH_ARGUMENT = {"--gpus", "--shm-size", "--tmpfs", "--cap-drop", "--stop-timeout", "--user", "-p", "-v", "-e"}
NOT_THERE = {"deploy/docker/api-keys"}  # made by the reader
RUNS = [line for line in LINES if line.startswith("docker run") and "tgi-server:" in line]


def test_paths_exist() -> None:
    named = set(re.findall(r"(?<![\w/])deploy/[\w./-]*\w/?", PAGE)) - NOT_THERE
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    kubernetes = {f"deploy/kubernetes/{path.name}" for path in KUBERNETES.iterdir()}
    assert kubernetes <= {name.rstrip("/") for name in named}


def test_images_are_those_of_the_dockerfile() -> None:
    built = [shlex.split(line) for line in LINES if line.startswith("docker build")]
    assert {words[words.index("--target") + 1] for words in built} == set(IMAGES)
    for words in built:
        assert words[words.index("-t") + 1] == f"tgi-server:{words[words.index('--target') + 1]}"


@pytest.mark.parametrize("line", RUNS)
def test_a_container_is_started_with_settings_of_the_program(line: str, tmp_path: Path) -> None:
    words = iter(shlex.split(line)[2:])
    variables = {}
    for word in words:
        if word in WITH_ARGUMENT:
            argument = next(words)
            if word == "-e":
                name, _, value = argument.partition("=")
                variables[name] = value
        elif not word.startswith("-"):
            break
    tag = word.removeprefix("tgi-server:")
    assert tag in IMAGES
    assert set(variables) <= VARIABLES | MORE_VARIABLES
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    if "TGI_API_KEY_FILE" in variables:
        assert f"{variables['TGI_API_KEY_FILE']}:ro" in line
        variables["TGI_API_KEY_FILE"] = str(keys)
    environment = environment_of(tag) | variables | {"NVIDIA_VISIBLE_DEVICES": ""}
    settings = settings_of(["text-generation-launcher", *words], environment)
    assert settings.model_id == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings.port == 80


def test_start_lines_are_found() -> None:
    assert len(RUNS) == 2


def test_numbers_match_the_files() -> None:
    assert f"each role within {ROLE_GRACE_SECONDS:g} s" in PAGE
    assert f"Needs Kubernetes {OLDEST} " in PAGE
    (deployment,) = yaml.safe_load_all((KUBERNETES / "base" / "deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert f"`terminationGracePeriodSeconds: {pod['terminationGracePeriodSeconds']}`" in PAGE
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert f"`GRACEFUL_TERMINATION_TIMEOUT`, {variables['GRACEFUL_TERMINATION_TIMEOUT']} s" in PAGE
    assert f"`MAX_CONCURRENT_REQUESTS` is {variables['MAX_CONCURRENT_REQUESTS']}" in PAGE


def test_variables_of_compose_are_listed() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (DEPLOY / "docker" / "compose.yaml").read_text()))
    table = PAGE.partition("## Compose")[2].partition("## systemd")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(used)
    assert used["MODEL_ID"] in table


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="renders with kubectl, which is not installed")
def test_the_example_of_an_overlay_is_valid(tmp_path: Path) -> None:
    (example,) = blocks(PAGE, "yaml")
    base = os.path.relpath(KUBERNETES / "one-gpu", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(example.replace("../tgi/deploy/kubernetes/one-gpu", base))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.load_all(done.stdout, LOADER))
    for one in objects:
        kubernetes_validate.validate(one, LATEST, strict=True)
    (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "REGISTRY/tgi-server:cuda"
    (data,) = [volume for volume in pod["volumes"] if volume["name"] == "data"]
    assert data == {"name": "data", "persistentVolumeClaim": {"claimName": "models"}}
