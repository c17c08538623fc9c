"""Records streams of servers for tests/scripts/test_streams.py: 12 tokens in, 6 out.

    python -m scripts.benchmarks.record_streams llama.cpp vllm

Check the recordings for local paths before committing them.
"""

import random
import sys

from scripts.benchmarks import workloads
from scripts.benchmarks.comparison import told
from scripts.benchmarks.peers import PEERS, ours
from scripts.benchmarks.streams import burst
from scripts.benchmarks.workloads import Words

STREAMS = workloads.ROOT / "tests" / "scripts" / "streams"


def main() -> None:
    """Parses the command line, measures and prints."""
    model = workloads.made("135m")
    text = Words(model.tokenizer).text(12, random.Random(1))
    for name in sys.argv[1:]:
        peer = ours() if name == "ours" else PEERS[name]
        with peer.start(model, workloads.PEERS_DIRECTORY / f"{name}.log") as server:
            server.wait(peer.path, peer.body(text, 1))
            stream = burst(server.port, peer.path, [peer.body(text, 6)])[0]
        (STREAMS / f"{name}.http").write_bytes(b"".join(data for _, data in stream.reads))
        told(f"{name}: {peer.read(stream)}")


if __name__ == "__main__":
    main()
