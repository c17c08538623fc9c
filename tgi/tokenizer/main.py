"""The tokenizer process: a loop that moves messages between the links, the pool and the encoding threads."""

import gc
import logging
import os
import time

from tgi.hub.model_config import read_model_config
from tgi.microkernel import tracing
from tgi.microkernel.flight_recorder import RingRecorder, ring_path
from tgi.microkernel.link import Link
from tgi.microkernel.process import Process
from tgi.microkernel.progress import CHAT_TEMPLATE
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.encoding_jobs import JobExecutors
from tgi.tokenizer.pool import TokenizerPool
from tgi.tokenizer.resumable_streams import ResumableStreams
from tgi.tokenizer.structured_output.compile_process import GrammarCompiler
from tgi.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0


def main(process: Process) -> None:
    """Serves apis on "tok-<replica>.front" and connects to the scheduler at "sched-0.front".

    Returns when the process is told to stop and all requests have ended, or when it is told to hand over: then the
    front ends submit its requests to other tokenizers.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time: the package's threads would only disturb
    process.publish_state("starting", "loading the tokenizer")
    config = read_model_config(process.settings.model_dir, weights=False)
    tracer = tracing.create_tracer(process.settings, process.name)
    compiler = GrammarCompiler(config.directory, process.settings.grammar_compile_limit)
    pool = TokenizerPool(
        Vocabulary.load(config),
        ChatRenderer.load(config),
        tracer=tracer,
        recorder=RingRecorder(ring_path(process.run_dir, process.name)),
        build_grammar=compiler.build,
        units=process.work_register.units,
    )
    hello = process.hello(config.fingerprint)
    defaults = process.settings.sampling_defaults
    api_link = Link.bind(
        process.link_address(f"tok-{process.replica}.front"), hello._replace(sampling_defaults=defaults)
    )
    scheduler_link = process.connect_to_scheduler("sched-0.front", hello)
    process.watch_link(api_link)
    process.watch_link(scheduler_link)
    gc.collect()
    gc.freeze()
    process.facts = {CHAT_TEMPLATE: bool(config.chat_templates)}
    process.publish_state("ready")
    executors = JobExecutors(process.wake_loop, process.work_register.units)
    streams = ResumableStreams(pool.handle)
    while not process.handing_over and not (process.stopping and pool.idle and executors.idle):
        if process.stopping:
            process.publish_state("draining")
            streams.drop_detached()
        deadline = pool.deadline()
        process.wait(IDLE_SECONDS if deadline is None else deadline - time.monotonic())
        run_once(pool, streams, api_link, scheduler_link, executors)
        if executors.longest_seconds() > process.settings.hang_timeout:
            process.begin_work(0.0, "a text")  # the supervisor ends this process: a thread cannot be ended
        if process.beat_due:
            process.exchange_beats(pool.beat())
    for link in (api_link, scheduler_link):
        link.say_goodbye()
        link.close()
    executors.shutdown()
    compiler.close()
    if tracer is not None:
        tracer.close()


def run_once(
    pool: TokenizerPool, streams: ResumableStreams, api_link: Link, scheduler_link: Link, executors: JobExecutors
) -> None:
    """One iteration of the loop: handles all received messages and completed jobs, then sends what they produced."""
    for peer, message in scheduler_link.receive():
        pool.handle(peer, message)
    for peer, message in api_link.receive():
        streams.receive(peer, message)
    streams.drop_expired()
    for job, result in executors.completed_jobs():
        pool.complete_job(job.key, result)
    if executors.idle:
        pool.run_trials()
    executors.start_jobs(pool.jobs)
    for peer, message in streams.forward(pool.drain_outgoing()):
        (scheduler_link if peer.role == "scheduler" else api_link).send(peer, message)
    api_link.flush()
    scheduler_link.flush()
