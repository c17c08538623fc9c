"""The tokenizer process: a thin loop between two links and the pool."""

import gc
import logging
import os

from tgi.hub.card import read_card
from tgi.kernel import tracing
from tgi.kernel.link import Link
from tgi.kernel.process import Process
from tgi.kernel.summary import CHAT_TEMPLATE
from tgi.tokenizer.chat import Chats
from tgi.tokenizer.jobs import Threads
from tgi.tokenizer.pool import Pool
from tgi.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0


def main(process: Process) -> None:
    """Serves apis on "tok-<place>.front" through the scheduler at "sched-0.front", until told to stop and drained."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time: the package's threads would only disturb
    process.state("starting", "loading the tokenizer")
    card = read_card(process.settings.model_dir)
    tracer = tracing.tracer(process.settings, process.name)
    pool = Pool(Vocabulary.load(card), Chats.load(card), tracer=tracer)
    hello = process.hello(card.fingerprint)
    defaults = process.settings.sampling_defaults
    front = Link.bind(process.address(f"tok-{process.place}.front"), hello._replace(defaults=defaults))
    down = Link.connect(process.address("sched-0.front"), hello)
    process.watch(front)
    process.watch(down)
    gc.collect()
    gc.freeze()
    process.facts = {CHAT_TEMPLATE: bool(card.chat_templates)}
    process.state("ready")
    threads = Threads(process.wake)
    while not (process.stopping and pool.idle and threads.idle):
        if process.stopping:
            process.state("draining")
        process.wait(IDLE_SECONDS)
        turn(pool, front, down, threads)
    threads.close()
    down.close()
    front.close()
    if tracer is not None:
        tracer.close()


def turn(pool: Pool, front: Link, down: Link, threads: Threads) -> None:
    """One round: all that has come in, then all that it leads to."""
    for link in (down, front):
        for peer, message in link.receive():
            pool.handle(peer, message)
    for job, result in threads.results():
        pool.finished(job.key, result)
    while pool.jobs:
        threads.start(pool.jobs.popleft())
    for peer, message in pool.outgoing():
        (down if peer.role == "scheduler" else front).send(peer, message)
    front.flush()
    down.flush()
