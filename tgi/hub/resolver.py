"""Resolves `--model-id` (a directory, a GGUF file, a Hub id, or nothing) and adapter names to directories.

What is already on disk is found without network and without heavy imports.
"""

import hashlib
import json
import logging
import os
import re
from pathlib import Path

from tgi.hub import adapter_files, default_model, gguf_import
from tgi.hub.gguf_import import ProgressCallback, cached_directory, default_cache, import_gguf
from tgi.microkernel.errors import UserError, reading
from tgi.microkernel.settings.lora_adapters import NamedAdapter

log = logging.getLogger(__name__)

__all__ = ["DEFAULT_MODEL", "adapter_directory", "import_gguf", "model_directory"]

DEFAULT_MODEL = default_model.SMOLLM2.name
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HASHED_BYTES = 1 << 20


def _no_progress(stage: str, percent: float, size: int = 0, /) -> None:
    """Ignores progress."""


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
    mmproj: str | None = None,
    progress: ProgressCallback = _no_progress,
) -> Path:
    """The directory of the model that `model_id` names, downloaded or imported if necessary.

    `cache` holds imported models ($TGI_CACHE, ~/.cache/tgi), `hub_cache` Hub snapshots (default: huggingface_hub's
    directory). `offline` defaults to HF_HUB_OFFLINE. From the Hub, `weights` are downloaded unless they are elsewhere,
    and Python `code` only if the model is trusted. A `revision` for other sources only causes a warning. `mmproj` is
    the file of the vision part of a GGUF file, if it does not lie next to it.

    Raises UserError if the model does not exist or cannot be downloaded.
    """
    cache = cache or default_cache()
    if offline is None:
        offline = _offline()
    if mmproj is not None and Path(model_id or "").suffix.lower() != ".gguf":
        raise UserError(
            f"--mmproj {mmproj} is for a model in a GGUF file, and {model_id or DEFAULT_MODEL!r} is not one. "
            "Leave it out."
        )
    if model_id is None:
        _warn_of_revision("the demo model", revision)
        return _log_block_types(default_model.default_model(cache, progress, offline=offline))
    path = Path(model_id).expanduser()
    with reading(path):
        is_directory, is_file = bool(model_id) and path.is_dir(), path.is_file()
    if is_directory:
        _warn_of_revision(f"the directory {path}", revision)
        return path.absolute()
    if path.suffix.lower() == ".gguf":
        _warn_of_revision(f"the file {path}", revision)
        return _log_block_types(_imported(path.absolute(), mmproj, cache, progress))
    if is_file:
        raise UserError(f"{model_id!r} is a file and not a .gguf file. Name the directory that the model is in.")
    if path.is_absolute() or not HUB_ID.fullmatch(model_id):
        raise UserError(f"{model_id!r} does not exist. Name a model directory, a .gguf file or a Hub id (owner/name).")
    from tgi.hub.hub_download import SnapshotContent, snapshot

    wanted = SnapshotContent(weights, code)
    with reading(hub_cache or model_id):
        return snapshot(model_id, revision, hub_cache, wanted, token=token, offline=offline, progress=progress)


def plannable_model(model_id: str | None, revision: str | None) -> Path:
    """What `tgi plan` reads of a model: the directory, of which the Hub's weights are not downloaded, or the GGUF file,
    which is not imported. Raises UserError as `model_directory`."""
    path = Path(model_id or "").expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return path.absolute()
    return model_directory(model_id, revision, weights=False)


def adapter_directory(
    adapter: NamedAdapter,
    *,
    hub_cache: Path | None = None,
    token: str | None = None,
    weights: bool = True,
    progress: ProgressCallback = _no_progress,
) -> Path:
    """The directory of an adapter's files: a local one, or one in the Hub's cache, downloaded if necessary; without
    `weights` its config alone.

    Raises UserError if the directory or repository does not exist or has no adapter.
    """
    directory = Path(adapter.path or adapter.name).expanduser()
    with reading(directory):
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else None
    if names is not None:
        if problem := adapter_files.missing_files_problem(names, weights):
            raise UserError(f"The directory {directory} {problem}")
        return directory.absolute()
    if adapter.path is not None or not HUB_ID.fullmatch(adapter.name):
        raise UserError(
            f"There is no directory {directory} for the LoRA adapter {adapter.name}. Name a directory (NAME=PATH) or a "
            "Hub id (owner/name)."
        )
    from tgi.hub.hub_download import SnapshotContent, snapshot

    wanted = SnapshotContent(weights, adapter=True)
    return snapshot(
        adapter.name, adapter.revision, hub_cache, wanted, token=token, offline=_offline(), progress=progress
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _warn_of_revision(what: str, revision: str | None) -> None:
    """Warns that a revision has no effect: start scripts pass one with any kind of model."""
    if revision is not None:
        log.warning("Revision %s has no effect: only models of the Hub have revisions, and this is %s", revision, what)


def _log_block_types(directory: Path) -> Path:
    """Logs which block types of an imported GGUF file kept their bits; returns the directory."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    except (OSError, ValueError, KeyError):  # read_model_config reports the problem
        return directory
    kept, others = (", ".join(f"{name} ({count})" for name, count in found[key].items()) for key in ("kept", "plain"))
    log.debug("weights keep the bits of the GGUF file where its tensors are %s; plain are %s", kept, others)
    return directory


def _imported(file: Path, mmproj: str | None, cache: Path, progress: ProgressCallback) -> Path:
    """The directory to which a GGUF file was imported, now or earlier."""
    try:
        status = file.stat()
        with file.open("rb") as opened:
            head = opened.read(HASHED_BYTES)
            opened.seek(max(0, status.st_size - HASHED_BYTES))
            tail = opened.read(HASHED_BYTES)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist. Name a GGUF file, a model directory or a Hub id.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    # Hashing gigabytes at every start would take seconds: size, modification time and both ends identify the file.
    identity = f"{status.st_size} {status.st_mtime_ns} ".encode() + head + tail
    parts = [part for part in gguf_import.gguf_parts(file) if part != file and part.is_file()]
    if (vision := gguf_import.vision_part(file, mmproj)) is not None:
        parts.append(vision)
    others = [part.stat() for part in parts]
    identity += "".join(f" {other.st_size} {other.st_mtime_ns}" for other in others).encode()
    name = f"{file.stem}-{hashlib.sha256(identity).hexdigest()[:12]}-{gguf_import.IMPORTER}"

    def build(temporary: Path) -> None:
        gguf_import.convert_in_child(file, temporary, progress, packed=True, mmproj=vision)

    return cached_directory(cache / "models" / name, build, progress)
