"""A peer closes its connection while more of its messages wait than a listener takes. Libzmq may end this program."""

import sys
import time
from pathlib import Path

import zmq

from tests.live.server import free_port
from tests.microkernel.tcp import Deployment, hello, until
from tgi.microkernel.links import curve
from tgi.microkernel.links.link import MAX_WAITING_MESSAGES
from tgi.microkernel.messages.protocol import Stop, encode


def main(directory: Path) -> None:
    deployment = Deployment(directory, free_port())
    listener = deployment.bind()
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    curve.use_connecting_keys(peer, deployment.host_keys)
    peer.connect(deployment.address)
    peer.send(encode(hello("tokenizer")))
    assert until(lambda: listener.received, listener)
    for number in range(3 * MAX_WAITING_MESSAGES):
        peer.send_multipart([encode(Stop(number))] * 20)
    time.sleep(0.5)
    peer.close()
    context.term()
    time.sleep(2.5)  # in which a heartbeat is due
    assert until(lambda: "PeerDisconnected" in listener.kinds(), listener)
    deployment.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
