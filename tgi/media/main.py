"""The media process: a loop that moves messages between the link to the front ends and the loading threads."""

import gc
import logging

from tgi.hub.model_config import read_model_config
from tgi.hub.vision import read_vision_config
from tgi.microkernel.host.rundir import media_directory, media_socket, site_id
from tgi.microkernel.links.link import Link, PeerDisconnected, end_sessions
from tgi.microkernel.messages.protocol import Beat, Cancel, Hello, LoadImage, valid_file_name
from tgi.microkernel.observability.log import ComplaintLimit
from tgi.microkernel.processes.process import Process

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0


def main(process: Process) -> None:
    """Serves front ends on "media-<replica>.front" until it is told to stop and all images are loaded, or to hand over:
    then the front ends ask another media process."""
    # Imported here: no other process needs PIL and transformers.
    from tgi.media.processor import keep_torch_out

    keep_torch_out()
    from tgi.media.fetcher import FetchRules
    from tgi.media.loader import ImageLoader, LoadingThreads
    from tgi.media.processor import ImageProcessor
    from tgi.media.store import MediaStore

    process.publish_state("starting", "loading the image processor")
    settings = process.settings
    config = read_model_config(settings.model_dir, weights=False)
    rules = FetchRules(
        settings.image_urls,
        settings.allowed_image_hosts,
        settings.allow_private_image_hosts,
        settings.max_image_fetch_size,
        settings.image_fetch_timeout,
    )
    store = MediaStore(media_directory(process.run_dir), process.name, site_id(process.run_dir))
    loader = ImageLoader(
        ImageProcessor(config.directory, read_vision_config(config)),
        store,
        rules,
        settings.max_image_pixels,
        process.work_register,
    )
    threads = LoadingThreads(loader.load, store.unlink, process.wake_loop)
    link = Link.bind(process.link_address(media_socket(process.replica)), process.hello(config.content_hash))
    process.watch_link(link)
    complaints = ComplaintLimit()
    gc.collect()
    gc.freeze()
    process.publish_state("ready")
    while not process.handing_over and not (process.stopping and not len(threads)):
        if process.stopping:
            process.publish_state("draining")
        process.wait(IDLE_SECONDS)
        for peer, message in link.receive():
            match message:
                case LoadImage(name=name) if valid_file_name(name):
                    threads.add(peer, message)
                case Cancel():
                    threads.cancel(peer, message.rid)
                case PeerDisconnected():
                    threads.drop(peer)
                case Hello() | Beat():
                    pass
                case _ if complaints.allows_one():
                    log.error("ignored a %s from %s", type(message).__name__, peer)
        for peer, answer in threads.loaded():
            link.send(peer, answer)
        busy = loader.busy_seconds
        if busy > settings.hang_timeout:
            process.begin_work(0.0, "an image")  # the supervisor ends this process: a thread cannot be ended
        if process.beat_due:
            age = int(1000 * busy) if len(threads) else None
            process.exchange_beats(Beat(age, int(1000 * settings.hang_timeout), f"{len(threads)} images"))
        link.flush()
    end_sessions([link])
    link.close()
    threads.shutdown()
