"""The tokenizer process: a loop that moves messages between the links, the pool and the encoding threads."""

import gc
import logging
import os
import time
from collections.abc import Callable
from functools import partial

from tgi.hub.model_config import ModelConfig, read_model_config
from tgi.hub.pooling import read_pooling_config
from tgi.hub.vision import read_vision_config
from tgi.microkernel.errors import UserError
from tgi.microkernel.host.rundir import scheduler_socket, tokenizer_socket
from tgi.microkernel.links import curve
from tgi.microkernel.links.discovery import Discovery, DownstreamLinks, nth_address
from tgi.microkernel.links.link import Link, ReplicaId, end_sessions
from tgi.microkernel.messages.protocol import Hello, ModelSource
from tgi.microkernel.observability import tracing
from tgi.microkernel.observability.flight_recorder import RingRecorder, ring_path
from tgi.microkernel.observability.progress import CHAT_TEMPLATE, TASK
from tgi.microkernel.processes.process import Process, work_in_progress
from tgi.microkernel.settings.table import Settings
from tgi.tokenizer.answers.formats import RESPONSE_TEMPLATE_NAMES, FormatDetector
from tgi.tokenizer.answers.response_template import described_formats
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.encoding_jobs import JobExecutors
from tgi.tokenizer.pool import TokenizerPool
from tgi.tokenizer.resumable_streams import ResumableStreams
from tgi.tokenizer.structured_output.compile_process import GrammarCompiler
from tgi.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
# Of a burst of messages from the front ends this many are handled at a time: the scheduler works on the first requests
# while the others are encoded, and tokens of streams do not wait for all of them.
MESSAGES_PER_PART = 8


def main(process: Process) -> None:
    """Serves apis on "tok-<replica>.front", and with --tokenizer-listen over TCP. Connects to the schedulers at
    "sched-<index>.front", or with --connect to those of other hosts.

    Returns when the process is told to stop and all requests have ended, or when it is told to hand over: then the
    front ends submit its requests to other tokenizers.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time: the package's threads would only disturb
    process.publish_state("starting", "loading the tokenizer")
    config = read_model_config(process.settings.model_dir, weights=False)
    pooling = read_pooling_config(process.settings.model_dir)
    tracer = tracing.create_tracer(process.settings, process.name)
    compiler = GrammarCompiler(config.directory, process.settings.grammar_compile_limit)
    vocabulary = Vocabulary.load(config)
    vision = read_vision_config(config) if process.settings.sees_images else None
    image_token = "" if vision is None else vision.image_token
    pool = TokenizerPool(
        vocabulary,
        ChatRenderer.load(config, load_formats(process.settings, config, vocabulary), image_token),
        tracer=tracer,
        recorder=RingRecorder(ring_path(process.run_dir, process.name)),
        build_grammar=compiler.build,
        work_register=process.work_register,
        work_in_progress=partial(work_in_progress, process.run_dir),
        tokenizers=process.settings.validation_workers,
        allow_adapter_updates=process.settings.allow_adapter_updates,
        pooling=pooling,
        image_token=image_token,
        images_first=vision is not None and vision.images_first,
        decoder_start=config.decoder_start,
    )
    hello = process.hello(config.content_hash)
    settings = process.settings
    source = ModelSource(
        settings.model_sha or "", settings.model_pipeline_tag or "", sorted(vocabulary.eos_ids), image_token=image_token
    )
    if pooling is not None:
        source = source._replace(
            task=pooling.task, normalizes=pooling.normalizes, labels=list(pooling.labels),
            multi_label=pooling.multi_label, prompts=[name for name, _ in pooling.prompts],
        )  # fmt: skip
    api_hello = hello._replace(sampling_defaults=settings.sampling_defaults, source=source)
    api_links = [Link.bind(process.link_address(tokenizer_socket(process.replica)), api_hello)]
    if (listen := process.settings.tokenizer_listen) is not None:
        keys = curve.load_tokenizer_keys(process.settings.keys or "")
        api_links.append(Link.bind(nth_address(listen, process.replica), api_hello, keys))
    for link in api_links:
        process.watch_link(link)
    schedulers = SchedulerLinks(process, hello)
    schedulers.follow(pool)
    gc.collect()
    gc.freeze()
    process.facts = {CHAT_TEMPLATE: bool(config.chat_templates), TASK: source.task}
    process.publish_state("ready")
    executors = JobExecutors(process.wake_loop, process.work_register)
    streams = ResumableStreams(pool.handle)
    while not process.handing_over and not (process.stopping and pool.idle and executors.idle):
        if process.stopping:
            process.publish_state("draining")
            streams.drop_detached()
        deadline = pool.deadline()
        process.wait(IDLE_SECONDS if deadline is None else deadline - time.monotonic())
        run_once(pool, streams, api_links, schedulers.links, executors, partial(schedulers.note_replica, pool))
        if executors.longest_seconds() > process.settings.hang_timeout:
            process.begin_work(0.0, "a text")  # the supervisor ends this process: a thread cannot be ended
        if process.beat_due:
            process.exchange_beats(pool.beat())
            schedulers.follow(pool)
    links = [*api_links, *schedulers.links]
    end_sessions(links)
    for link in links:
        link.close()
    executors.shutdown()
    compiler.close()
    if tracer is not None:
        tracer.close()


def load_formats(settings: Settings, config: ModelConfig, vocabulary: Vocabulary) -> FormatDetector:
    """The formats of the model's answers. Raises UserError if settings ask for a description that cannot be served."""
    described, fault = described_formats(config.directory)
    named = [one for one in (settings.tool_call_parser, settings.reasoning_parser) if one in RESPONSE_TEMPLATE_NAMES]
    if fault and named:
        raise UserError(f"`tool_call_parser` and `reasoning_parser` cannot be {named[0]}: {fault}.")
    tokens = [token.content for token in vocabulary.tokenizer.get_added_tokens_decoder().values()]
    formats = FormatDetector(settings.tool_call_parser, settings.reasoning_parser, tokens, described)
    template = config.chat_templates.get("tool_use") or config.chat_templates.get("default")
    if template is not None:
        call_format, tags = formats.call_format(template), formats.reasoning_tags(template)
        reasoning = "channels" if formats.channels(template) else "none" if tags is None else tags.open
        log.debug("tool calls: %s; reasoning: %s", "TGI's form" if call_format is None else call_format.name, reasoning)
    return formats


class SchedulerLinks:
    """The links to the schedulers of this pipeline, or with --connect to those of other hosts."""

    def __init__(self, process: Process, hello: Hello) -> None:
        self.links: list[Link] = []
        self._process = process
        self._replica_ids: dict[Link, ReplicaId] = {}  # of the schedulers that were connected last
        connect = partial(process.connect_link, hello=hello)
        if process.settings.connect:
            self._found = DownstreamLinks(Discovery(process.settings.connect).addresses, connect)
        else:
            expected = [scheduler_socket(index, "front") for index in range(process.settings.replicas)]
            self._found = DownstreamLinks(self._find, connect, map(process.link_address, expected))

    def _find(self) -> list[str]:
        return [self._process.link_address(name) for name in self._process.scheduler_sockets("front")]

    def note_replica(self, pool: TokenizerPool, link: Link, replica_id: ReplicaId) -> None:
        """A scheduler has connected over this link. Forgets one of another replica, which it has replaced."""
        before, self._replica_ids[link] = self._replica_ids.get(link, replica_id), replica_id
        if before != replica_id:
            pool.remove_scheduler(before)

    def follow(self, pool: TokenizerPool) -> None:
        """Connects to schedulers that were added, and forgets those that were retired."""
        added, removed = self._found.follow()
        for link in added:
            self._process.watch_link(link)
        for link in removed:
            for peer, message in link.receive():  # that it is lost may not have been handled yet
                pool.handle(peer, message)
            if link in self._replica_ids:
                pool.remove_scheduler(self._replica_ids.pop(link))
            self._process.unwatch_link(link)
            link.close()
        self.links = [*self._found.links.values()]


def run_once(
    pool: TokenizerPool,
    streams: ResumableStreams,
    api_links: list[Link],
    scheduler_links: list[Link],
    executors: JobExecutors,
    note_replica: Callable[[Link, ReplicaId], None] = lambda link, replica_id: None,
) -> None:
    """One iteration of the loop: handles all received messages and completed jobs, then sends what they produced.
    `note_replica` is called for each scheduler that has connected."""
    _receive_from_schedulers(pool, scheduler_links, note_replica)
    for link in api_links:
        for number, (peer, message) in enumerate(link.receive(), 1):
            streams.receive(peer, message)
            if number % MESSAGES_PER_PART == 0:
                _receive_from_schedulers(pool, scheduler_links, note_replica)
                _send(pool, streams, api_links, scheduler_links)
    streams.drop_expired()
    for job, result in executors.completed_jobs():
        pool.complete_job(job.key, result)
    if pool.jobs.trials and executors.idle:
        pool.run_trials()
    executors.start_jobs(pool.jobs)
    _send(pool, streams, api_links, scheduler_links)


def _receive_from_schedulers(
    pool: TokenizerPool, links: list[Link], note_replica: Callable[[Link, ReplicaId], None]
) -> None:
    for link in links:
        for peer, message in link.receive():
            pool.handle(peer, message)
            if isinstance(message, Hello):
                note_replica(link, ReplicaId(message.site, peer.replica))


def _send(pool: TokenizerPool, streams: ResumableStreams, api_links: list[Link], scheduler_links: list[Link]) -> None:
    """Sends what the pool has produced."""
    for peer, message in streams.forward(pool.drain_outgoing()):
        for link in scheduler_links if peer.role == "scheduler" else api_links:
            link.send(peer, message)  # dropped by a link that has no such peer
    for link in (*api_links, *scheduler_links):
        link.flush()
