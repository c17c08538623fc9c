"""Trains the model of scripts/train_picture_model.py, unless that is done, serves it, and runs the checks of clients.

Not a part of the test run: how well a trained model does depends on the machine by a percent or two.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.train_picture_model import draw_picture
from tests.clients.environments import ROOT, environment
from tests.live.server import Server
from tests.models import picture_model

PICTURES = 200
CLIENTS = {"openai": "check_openai.py", "huggingface-hub": "check_huggingface_hub.py"}


def draw_pictures(directory: Path) -> Path:
    """Pictures that the model has not seen, and answers.json, for pictures.py."""
    directory.mkdir()
    pictures = {f"{seed}.png": draw_picture(seed) for seed in range(PICTURES)}
    for name, picture in pictures.items():
        picture.image.save(directory / name)
    (directory / "answers.json").write_text(json.dumps({name: one.answer for name, one in pictures.items()}))
    return directory


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tgi-pictures-") as temporary:
        directory = Path(temporary)
        with Server(directory / "run", "--model-id", str(picture_model())) as server:
            server.start().wait_until_ready()
            addresses = {"TGI_PICTURES_URL": server.url, "TGI_PICTURES": str(draw_pictures(directory / "pictures"))}
            plain = ("-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider")
            ends = [
                subprocess.run(
                    [str(environment(client)), *plain, str(Path("tests", "clients", "seeing", checks))],
                    cwd=ROOT,
                    env={"PATH": os.environ["PATH"], "HOME": temporary} | addresses,
                ).returncode
                for client, checks in CLIENTS.items()
            ]
    return max(ends)


if __name__ == "__main__":
    sys.exit(main())
