"""Draws the pictures, and runs the checks of each client in its environment."""

import json
import os
import subprocess
from pathlib import Path

from scripts.train_picture_model import draw_picture
from tests.clients.environments import ROOT, environment

CLIENTS = {"openai": "check_openai.py", "huggingface-hub": "check_huggingface_hub.py"}


def draw_pictures(directory: Path, count: int) -> Path:
    """Pictures that the model has not seen, and answers.json, for pictures.py."""
    directory.mkdir()
    pictures = {f"{seed}.png": draw_picture(seed) for seed in range(count)}
    for name, picture in pictures.items():
        picture.image.save(directory / name)
    (directory / "answers.json").write_text(json.dumps({name: one.answer for name, one in pictures.items()}))
    return directory


def check(client: str, url: str, pictures: Path) -> "subprocess.CompletedProcess[str]":
    """Runs the checks of a client in its environment, against the server at `url`."""
    plain = ("-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider", "-q")
    environ = {"PATH": os.environ["PATH"], "HOME": str(pictures.parent)}
    return subprocess.run(
        [str(environment(client)), *plain, str(Path("tests", "clients", "seeing", CLIENTS[client]))],
        cwd=ROOT,
        env=environ | {"TGI_PICTURES_URL": url, "TGI_PICTURES": str(pictures)},
        capture_output=True,
        text=True,
    )
