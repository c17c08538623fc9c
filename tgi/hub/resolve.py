"""From what the user names to a model directory: a directory, a GGUF file, a Hub id, or nothing at all. And to that of
an adapter: a directory or a Hub id.

What is there already is found without a network and without heavy imports; only work loads what it needs.
"""

import hashlib
import json
import logging
import os
import re
from pathlib import Path

from tgi.hub import convert, default, peft
from tgi.hub.cache import Progress, cached, default_cache
from tgi.hub.convert import import_gguf
from tgi.kernel.adapters import Named
from tgi.kernel.errors import UserError

log = logging.getLogger(__name__)

__all__ = ["DEFAULT_MODEL", "adapter_directory", "import_gguf", "model_directory"]

DEFAULT_MODEL = default.SMOLLM2.name
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SAMPLE = 1 << 20


def _quiet(stage: str, percent: float, size: int = 0, /) -> None:
    """Progress that nobody watches."""


def model_directory(
    model_id: str | None,
    revision: str | None = None,
    cache: Path | None = None,
    *,
    hub_cache: Path | None = None,
    token: str | None = None,
    offline: bool | None = None,
    weights: bool = True,
    code: bool = False,
    progress: Progress = _quiet,
) -> Path:
    """The directory of the model that `model_id` names, fetched or imported if need be.

    `cache` holds imported models ($TGI_CACHE, ~/.cache/tgi), `hub_cache` what comes from the Hub (its usual variables).
    `offline` defaults to HF_HUB_OFFLINE. From the Hub come `weights`, unless they are elsewhere, and the Python `code`
    of a model that is trusted. A `revision` of anything else is warned of.

    Raises UserError if there is no such model or it cannot be fetched.
    """
    cache = cache or default_cache()
    if offline is None:
        offline = _offline()
    if model_id is None:
        _without_revision("the demo model", revision)
        return _told(default.default_model(cache, progress, offline=offline))
    path = Path(model_id).expanduser()
    if model_id and path.is_dir():
        _without_revision(f"the directory {path}", revision)
        return path.absolute()
    if path.suffix.lower() == ".gguf":
        _without_revision(f"the file {path}", revision)
        return _told(_imported(path.absolute(), cache, progress))
    if path.is_file():
        raise UserError(f"{model_id!r} is a file and not a .gguf file. Name the directory that the model is in.")
    if path.is_absolute() or not HUB_ID.fullmatch(model_id):
        raise UserError(f"{model_id!r} does not exist. Name a model directory, a .gguf file or a Hub id (owner/name).")
    from tgi.hub.remote import Wanted, snapshot

    wanted = Wanted(weights, code)
    return snapshot(model_id, revision, hub_cache, wanted, token=token, offline=offline, progress=progress)


def adapter_directory(
    adapter: Named, *, hub_cache: Path | None = None, token: str | None = None, progress: Progress = _quiet
) -> Path:
    """The directory of an adapter's files: the one that it names, or that in the Hub's cache, fetched if need be.

    Raises UserError if there is no such directory or repository, or no adapter in it.
    """
    directory = Path(adapter.path or adapter.name).expanduser()
    if directory.is_dir():
        if problem := peft.lack([path.name for path in directory.iterdir()]):
            raise UserError(f"The directory {directory} {problem}")
        return directory.absolute()
    if adapter.path is not None or not HUB_ID.fullmatch(adapter.name):
        raise UserError(
            f"There is no directory {directory} for the LoRA adapter {adapter.name}. Name a directory (NAME=PATH) or a "
            "Hub id (owner/name)."
        )
    from tgi.hub.remote import Wanted, snapshot

    wanted = Wanted(adapter=True)
    return snapshot(
        adapter.name, adapter.revision, hub_cache, wanted, token=token, offline=_offline(), progress=progress
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _without_revision(what: str, revision: str | None) -> None:
    """Warns of a revision that changes nothing: start scripts give one with whatever they serve."""
    if revision is not None:
        log.warning("Revision %s has no effect: only models of the Hub have revisions, and this is %s", revision, what)


def _told(directory: Path) -> Path:
    """An imported model's directory. The log says which block types its file has, if any have kept their bits."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    except (OSError, ValueError, KeyError):  # what is wrong with it the reader of cards will say
        return directory
    kept, others = (
        ", ".join(f"{name} ({count})" for name, count in found[key].items()) for key in ("kept", "made_bfloat16")
    )
    log.debug("weights keep the bits of the GGUF file where its tensors are %s; bfloat16 stands for %s", kept, others)
    return directory


def _imported(file: Path, cache: Path, progress: Progress) -> Path:
    """The directory that a GGUF file was imported to, now or before."""
    try:
        status = file.stat()
        with file.open("rb") as opened:
            head = opened.read(SAMPLE)
            opened.seek(max(0, status.st_size - SAMPLE))
            tail = opened.read(SAMPLE)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist. Name a GGUF file, a model directory or a Hub id.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    # Hashing gigabytes at every start would take seconds: size, time of change and both ends tell files apart.
    identity = f"{status.st_size} {status.st_mtime_ns} ".encode() + head + tail
    name = f"{file.stem}-{hashlib.sha256(identity).hexdigest()[:12]}-{default.IMPORTER}"

    def build(temporary: Path) -> None:
        convert.fill(file, temporary, progress, packed=True)

    return cached(cache / "models" / name, build, progress)
