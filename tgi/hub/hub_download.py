"""Downloads models (configuration, tokenizer, safetensors) and adapters from the Hugging Face Hub into its cache."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tgi.hub import adapter_files
from tgi.hub.gguf_import import ProgressCallback
from tgi.hub.weight_files import INDEX, choose_weight_files, files_of_index, no_safetensors_error, weight_files
from tgi.microkernel.errors import UserError

log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
CONFIG_FILES = re.compile(
    r"README\.md|[^/]+\.(json|jinja|model|tiktoken|txt)|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/(config\.json|model\.safetensors)"  # modules of sentence-transformers
)
CODE_FILES = re.compile(r"[^/]+\.py")
TIMEOUT_S = 10


class SnapshotContent(NamedTuple):
    """Which files of a repository are downloaded, in addition to configuration and tokenizer of a model."""

    weights: bool = True  # of the model, or of the adapter
    code: bool = False
    adapter: bool = False  # the repository is a LoRA adapter, not a model


def hub_cache_directory() -> Path:
    """The directory in which huggingface_hub keeps snapshots, found without importing it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def snapshot(
    repo: str,
    revision: str | None,
    cache: Path | None,
    wanted: SnapshotContent,
    *,
    token: str | None,
    offline: bool,
    progress: ProgressCallback,
) -> Path:
    """The snapshot directory of `repo`; files missing from the cache are downloaded.

    A commit that is in the cache, and anything when `offline`, is found without network. Raises UserError if the
    model does not exist, is not accessible, has no safetensors, or is neither reachable nor in the cache.
    """
    cache = cache or hub_cache_directory()
    revision = revision or "main"
    held = _cached_snapshot(repo, revision, cache, wanted)
    if held and (offline or COMMIT.fullmatch(revision)):
        return held
    if offline:
        raise UserError(
            f"{repo} (revision {revision}) is not in the cache {cache}, and HF_HUB_OFFLINE forbids to fetch it. "
            "Unset HF_HUB_OFFLINE, or name a directory."
        )
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.errors import HTTPError as ConnectionTrouble  # type: ignore[attr-defined]  # of its HTTP client

    try:
        return _download(repo, revision, cache, wanted, token or os.environ.get("HF_API_TOKEN") or None, progress)
    except GatedRepoError as error:
        raise UserError(
            f"{repo} is gated: accept its conditions at https://huggingface.co/{repo} and set HF_TOKEN to a token of "
            "that account."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision!r} on the Hub. Check --revision.") from error
    except RepositoryNotFoundError as error:
        kind = "an adapter" if wanted.adapter else "a model"
        raise UserError(
            f"{repo} is neither a directory here nor {kind} on the Hub. Check the name; set HF_TOKEN if it is private."
        ) from error
    except (ConnectionTrouble, OSError) as error:
        if held and not isinstance(error, HfHubHTTPError):
            log.warning("The Hub cannot be reached (%s); serving %s as it is in the cache", error, repo)
            return held
        reason = str(error).rstrip(". ")
        raise UserError(
            f"'{repo}' could not be fetched from the Hub: {reason}. Check the network and the name, or name a "
            "directory."
        ) from error


def _cached_snapshot(repo: str, revision: str, cache: Path, wanted: SnapshotContent) -> Path | None:
    """The complete snapshot in the cache, or None. Weights are downloaded last, so their presence implies all files."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text().strip()
        except OSError:
            return None
    directory = folder / "snapshots" / commit
    if wanted.adapter:
        there = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        files = adapter_files.wanted_files(wanted.weights, there)
        return directory if all((directory / name).is_file() for name in files) else None
    if not (directory / "config.json").is_file():
        return None
    if wanted.code and "auto_map" in (directory / "config.json").read_text() and not list(directory.glob("*.py")):
        return None  # downloaded while its code was not trusted
    if not wanted.weights:
        return directory
    try:
        weight_files(directory)
    except UserError:
        return None  # an interrupted download, which resumes
    return directory


def _download(
    repo: str, revision: str, cache: Path, wanted: SnapshotContent, token: str | None, progress: ProgressCallback
) -> Path:
    from huggingface_hub import HfApi

    progress("looking up the model", 0)
    info = HfApi(token=token).model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    root = [name for name in sizes if "/" not in name]
    if wanted.adapter:
        if problem := adapter_files.missing_files_problem(root, wanted.weights):
            raise UserError(f"{repo} {problem}")
        files = adapter_files.wanted_files(wanted.weights, root)
        return _fetch(repo, revision, cache, token, files, progress, sum(sizes[name] for name in files))
    weights = choose_weight_files(root)
    if "config.json" not in sizes and adapter_files.CONFIG in sizes:
        raise adapter_files.not_a_model_error(
            repo, _fetch(repo, revision, cache, token, [adapter_files.CONFIG], progress)
        )
    if "config.json" not in sizes:
        raise UserError(f"{repo} has no config.json on the Hub, so it is not a model. Name another.")
    if not weights and wanted.weights:
        raise no_safetensors_error(repo, root)
    small = [name for name in sizes if CONFIG_FILES.fullmatch(name) or (wanted.code and CODE_FILES.fullmatch(name))]
    directory = _fetch(repo, revision, cache, token, small, progress)
    if not wanted.weights:
        return directory
    if INDEX in sizes:
        weights = files_of_index(directory / INDEX)
    total = sum(sizes.get(name, 0) for name in weights)
    if _fetch(repo, revision, cache, token, weights, progress, total) != directory:
        raise UserError(f"{repo} changed on the Hub while it was downloaded. Start again.")
    return directory


def _fetch(
    repo: str,
    revision: str,
    cache: Path,
    token: str | None,
    names: Iterable[str],
    progress: ProgressCallback,
    total: int = 0,
) -> Path:
    """Downloads files one by one; returns their snapshot directory."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stage = "downloading weights" if total else "downloading configuration"

    class Count(tqdm):
        """Forwards the Hub library's progress bar to `progress`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"disable": True}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            self.count = kwargs.get("initial") or 0

        def update(self, n: float | None = 1) -> None:
            self.count += n or 0
            if total:
                progress(stage, min(99.0, 100 * (done + self.count) / total), total)

    done = 0
    directories = set()
    progress(stage, 0, total)
    for name in names:
        path = Path(hf_hub_download(repo, name, revision=revision, cache_dir=cache, token=token, tqdm_class=Count))
        done += path.stat().st_size
        directories.add(path.parents[name.count("/")])
    progress(stage, 100, total)
    if len(directories) != 1:
        raise UserError(f"{repo} changed on the Hub while it was downloaded. Start again.")
    return directories.pop()
