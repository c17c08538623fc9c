"""A model on the Hugging Face Hub becomes a snapshot directory in its cache: configuration, tokenizer, safetensors. And
an adapter with its two files."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tgi.hub import peft
from tgi.hub.cache import Progress
from tgi.hub.safetensors import INDEX, choose, indexed, refuse_pickled, weight_files
from tgi.kernel.errors import UserError

log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL = re.compile(r"README\.md|[^/]+\.(json|jinja|model|tiktoken|txt)|additional_chat_templates/[^/]+\.jinja")
CODE = re.compile(r"[^/]+\.py")
TIMEOUT_S = 10


class Wanted(NamedTuple):
    """What of a repository is fetched: of a model, what besides configuration and tokenizer."""

    weights: bool = True
    code: bool = False
    adapter: bool = False  # it is no model but a LoRA adapter


def hub_cache_directory() -> Path:
    """Where the Hub's own library keeps its snapshots, without importing it."""
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
    wanted: Wanted,
    *,
    token: str | None,
    offline: bool,
    progress: Progress,
) -> Path:
    """The snapshot directory of `repo`, downloaded as far as it is not in the cache.

    A commit that is in the cache, and anything when `offline`, is found without a network. Raises UserError if the
    model does not exist, may not be read, has no safetensors, or cannot be reached and is not in the cache.
    """
    cache = cache or hub_cache_directory()
    revision = revision or "main"
    held = _held(repo, revision, cache, wanted)
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
        raise UserError(
            f"'{repo}' could not be fetched from the Hub: {error}. Check the network and the name, or name a directory."
        ) from error


def _held(repo: str, revision: str, cache: Path, wanted: Wanted) -> Path | None:
    """The complete snapshot in the cache, if there is one. Weights are downloaded last: where they are, all is."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text().strip()
        except OSError:
            return None
    directory = folder / "snapshots" / commit
    if wanted.adapter:
        return directory if all((directory / name).is_file() for name in peft.FILES) else None
    if not (directory / "config.json").is_file():
        return None
    if wanted.code and "auto_map" in (directory / "config.json").read_text() and not list(directory.glob("*.py")):
        return None  # it was fetched when its code was not trusted
    if not wanted.weights:
        return directory
    try:
        weight_files(directory)
    except UserError:
        return None  # a download that was interrupted: it goes on where it stopped
    return directory


def _download(repo: str, revision: str, cache: Path, wanted: Wanted, token: str | None, progress: Progress) -> Path:
    from huggingface_hub import HfApi

    progress("looking up the model", 0)
    info = HfApi(token=token).model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    root = [name for name in sizes if "/" not in name]
    if wanted.adapter:
        if problem := peft.lack(root):
            raise UserError(f"{repo} {problem}")
        return _fetch(repo, revision, cache, token, peft.FILES, progress, sum(sizes[name] for name in peft.FILES))
    weights = choose(root)
    if "config.json" not in sizes and peft.CONFIG in sizes:
        raise peft.no_model(repo, _fetch(repo, revision, cache, token, [peft.CONFIG], progress))
    if "config.json" not in sizes:
        raise UserError(f"{repo} has no config.json on the Hub, so it is not a model. Name another.")
    if not weights and wanted.weights:
        raise refuse_pickled(repo, root)
    small = [name for name in sizes if SMALL.fullmatch(name) or (wanted.code and CODE.fullmatch(name))]
    directory = _fetch(repo, revision, cache, token, small, progress)
    if not wanted.weights:
        return directory
    if INDEX in sizes:
        weights = indexed(directory / INDEX)
    total = sum(sizes.get(name, 0) for name in weights)
    if _fetch(repo, revision, cache, token, weights, progress, total) != directory:
        raise UserError(f"{repo} changed on the Hub while it was downloaded. Start again.")
    return directory


def _fetch(
    repo: str, revision: str, cache: Path, token: str | None, names: Iterable[str], progress: Progress, total: int = 0
) -> Path:
    """Downloads files one after the other; returns the snapshot directory they are in."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stage = "downloading weights" if total else "downloading configuration"

    class Count(tqdm):
        """The Hub library's progress bar, drawn by us."""

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
