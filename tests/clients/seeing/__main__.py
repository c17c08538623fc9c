"""Trains the model of scripts/train_picture_model.py, unless that is done, serves it, and runs the clients' checks."""

import sys
import tempfile
from pathlib import Path

from tests.clients.seeing.asking import CLIENTS, check, draw_pictures
from tests.live.server import Server
from tests.models import picture_model

PICTURES = 200


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tgi-pictures-") as temporary:
        directory = Path(temporary)
        with Server(directory / "run", "--model-id", str(picture_model())) as server:
            server.start().wait_until_ready()
            pictures = draw_pictures(directory / "pictures", PICTURES)
            ends = [check(client, server.url, pictures) for client in CLIENTS]
    for end in ends:
        sys.stdout.write(end.stdout + end.stderr)
    return max(end.returncode for end in ends)


if __name__ == "__main__":
    sys.exit(main())
