"""`tgi worker`: connects to its scheduler, loads the model, measures its limits, and serves steps."""

import json
import logging
import sys
from pathlib import Path

from tgi.hub.card import read_card
from tgi.kernel.link import Link
from tgi.kernel.process import Process
from tgi.kernel.settings import Settings
from tgi.kernel.summary import Served
from tgi.worker.loop import Engine, Loop, Poisoned
from tgi.worker.lora.shelf import stock
from tgi.worker.processor import hold, keep_order
from tgi.worker.scripted import Script, ScriptedEngine
from tgi.worker.threads import wait_shortly

log = logging.getLogger(__name__)


def main(process: Process) -> None:
    """Runs until SIGTERM. Raises UserError where the model or the settings cannot work."""
    model = read_card(process.settings.model_dir).fingerprint
    link = Link.connect(process.address("sched-0.back"), process.hello(model))
    loop = Loop(process, link)
    loop.progress("starting", 0)
    try:
        engine, served = _engine(process.settings, loop)
        process.facts = served._asdict()
        loop.serve(engine)
    except Poisoned:
        log.critical("this worker cannot go on; its supervisor starts another", exc_info=True)
        sys.exit(1)
    finally:
        link.close()


def _engine(settings: Settings, loop: Loop) -> tuple[Engine, Served]:
    if settings.worker == "scripted":
        scripted = ScriptedEngine(_script(settings))
        stock(scripted.adapters, settings.adapters)
        nothing = Served.of(settings, scripted.limits, device="none", kernels="none: the worker is scripted")
        return scripted, nothing
    wait_shortly()
    hold(settings.cpu)
    keep_order()
    from tgi.worker.start import start_engine  # imports torch, which the scripted worker does without

    engine = start_engine(settings, loop.progress)
    assert engine.served is not None  # set by start_engine
    return engine, engine.served


def _script(settings: Settings) -> Script:
    """The scripted worker's measures: the settings', the vocabulary of the model that it stands for, or defaults."""
    wanted = {
        "max_total_tokens": settings.max_total_tokens,
        "max_batch_prefill_tokens": settings.max_batch_prefill_tokens,
        "slots": settings.max_batch_size,
        "step_us": settings.scripted_step_us,
        "vocab_size": _vocab_size(settings.model_dir),
    }
    script = Script(**{name: value for name, value in wanted.items() if value is not None})
    if settings.max_batch_total_tokens is not None:
        script = script._replace(pages=max(1, settings.max_batch_total_tokens // script.page_size))
    return script


def _vocab_size(directory: Path) -> int | None:
    path = directory / "config.json"
    if not path.is_file():
        return None
    size = json.loads(path.read_text()).get("vocab_size")
    return size if isinstance(size, int) else None
