"""Records what servers send, for tests/scripts/test_streams.py: 12 tokens in, 6 out.

    python -m scripts.beside.record llama.cpp vllm

Look for paths of this machine in what was written before you commit it.
"""

import random
import sys

from scripts.beside import models
from scripts.beside.peers import PEERS, ours
from scripts.beside.streams import burst
from scripts.beside.turns import told
from scripts.beside.workloads import Words

STREAMS = models.ROOT / "tests" / "scripts" / "streams"


def main() -> None:
    model = models.made("135m")
    text = Words(model.tokenizer).text(12, random.Random(1))
    for name in sys.argv[1:]:
        peer = ours() if name == "ours" else PEERS[name]
        with peer.start(model, models.PEERS / f"{name}.log") as server:
            server.wait(peer.path, peer.body(text, 1))
            stream = burst(server.port, peer.path, [peer.body(text, 6)])[0]
        (STREAMS / f"{name}.http").write_bytes(b"".join(data for _, data in stream.reads))
        told(f"{name}: {peer.read(stream)}")


if __name__ == "__main__":
    main()
