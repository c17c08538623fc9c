"""The shapes of deploy/kubernetes, and what a pod template says of its containers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tests.deploy.kustomize import KUSTOMIZATION, render
from tgi.cli import main as tgi
from tgi.launcher import main as launcher
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.table import Settings

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SHAPES = sorted(path.parent.name for path in KUBERNETES.glob(f"*/{KUSTOMIZATION}"))
PROGRAMS = ("tgi", "text-generation-launcher")


def objects(kind: str, shape: str) -> list[dict[str, Any]]:
    return [one for one in render(KUBERNETES / shape) if one["kind"] == kind]


def pod_specs(shape: str) -> Iterator[dict[str, Any]]:
    for deployment in objects("Deployment", shape):
        yield deployment["spec"]["template"]["spec"]


def containers(shape: str) -> Iterator[dict[str, Any]]:
    """All containers of a shape, those that start before others included."""
    for pod in pod_specs(shape):
        yield from pod.get("initContainers", ())
        yield from pod["containers"]


def command_of(container: dict[str, Any]) -> list[str]:
    """What the container runs; without a command, the entry point of the images with a worker."""
    return [*container.get("command", ["text-generation-launcher"]), *container.get("args", ())]


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables with values; those from Secrets are left out."""
    return {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}


def settings_of(command: list[str], environment: dict[str, str]) -> Settings:
    """The settings of a command line of one of our programs, as the program itself reads them."""
    program, *words = command
    assert program.rpartition("/")[2] in PROGRAMS
    entry: click.Command = launcher
    if program.rpartition("/")[2] == "tgi":
        role, *words = words
        entry = tgi.commands[role]
    return load_settings(entry.make_context(program, words).params, environment)
