"""Resolving model names to directories: created once and complete, also with concurrent processes and after a kill."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from scripts.make_gguf import write_gguf
from tests.models import model
from tgi.hub import gguf_import
from tgi.hub.gguf_import import default_cache
from tgi.hub.model_config import read_model_config
from tgi.hub.resolver import model_directory
from tgi.microkernel.errors import UserError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

RESOLVE = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tgi.hub.resolver import model_directory
    print(model_directory(sys.argv[1], cache=Path(sys.argv[2]), progress=lambda *stage: print(*stage, flush=True)))
""")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(model("llama"), tmp_path / "my-model.gguf", "Q8_0")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Import(NamedTuple):
    """A GGUF file, a cache that has it imported, and the stages that were reported."""

    source: Path
    cache: Path
    directory: Path
    stages: list[str]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Import:
    place, stages = tmp_path_factory.mktemp("imported"), list[str]()
    source, cache = write_gguf(model("llama"), place / "my-model.gguf", "Q8_0"), place / "cache"
    directory = model_directory(str(source), cache=cache, progress=lambda stage, *_: stages.append(stage))
    return Import(source, cache, directory, stages)


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def start(source: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RESOLVE, str(source), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_model_directory_is_used_as_it_is(cache: Path) -> None:
    assert model_directory(str(model("llama")), cache=cache) == model("llama")
    assert not cache.exists()


def test_a_revision_without_effect_is_warned_of(imported: Import, caplog: pytest.LogCaptureFixture) -> None:
    for name in (str(model("llama")), str(imported.source)):
        model_directory(name, None, imported.cache)
        assert "has no effect" not in caplog.text
        model_directory(name, "v1", imported.cache)
        assert "Revision v1 has no effect" in caplog.text
        assert name in caplog.text
        caplog.clear()


def test_a_file_of_another_type_is_reported_as_such(cache: Path) -> None:
    with pytest.raises(UserError, match=r"is a file and not a \.gguf file. Name the directory"):
        model_directory(str(model("llama") / "config.json"), cache=cache)


def test_a_tilde_in_the_cache_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TGI_CACHE", "~/models")
    assert default_cache() == tmp_path / "models"


def test_a_gguf_file_is_imported_once(imported: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache, first, stages = imported
    assert read_model_config(first).vocab_size == 512
    assert first.name in visible(cache)
    assert "importing weights" in stages
    again: list[str] = []
    assert model_directory(str(source), cache=cache, progress=lambda stage, *_: again.append(stage)) == first
    assert again == []
    # as in a version that imports differently
    monkeypatch.setattr(gguf_import, "IMPORTER", gguf_import.IMPORTER + 1)
    assert model_directory(str(source), cache=cache) != first


def test_cached_models_are_found_without_heavy_imports(imported: Import) -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "gguf", "numpy", "tokenizers", "httpx")
    script = (
        RESOLVE
        + "from tgi.hub.model_config import read_model_config\n"
        + f"assert not set({heavy}) & set(sys.modules), sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(imported.source), str(imported.cache)], check=True, cwd=ROOT)


def test_concurrent_processes_import_once(source: Path, cache: Path) -> None:
    both = [start(source, cache) for _ in range(2)]
    said = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][-1] == said[1][-1]
    assert sum("reading 0" in lines for lines in said) == 1
    assert visible(cache) == [Path(said[0][-1]).name]


def test_after_a_killed_import_the_next_one_cleans_up(source: Path, cache: Path) -> None:
    process = start(source, cache)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("importing tokenizer"):
            break
    children = psutil.Process(process.pid).children()
    assert len(children) == 1
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert all(name.startswith(".") for name in visible(cache))
    directory = model_directory(str(source), cache=cache)
    assert visible(cache) == [directory.name]
    read_model_config(directory)


def test_the_converter_ends_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.gguf")  # reading it blocks
    files = [str(tmp_path / name) for name in ("endless.gguf", "out")]
    command = [sys.executable, "-m", "tgi.hub.gguf.convert", *files, "plain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert "reading" in child.stdout.readline()
        assert child.poll() is None
        child.stdin.close()
        assert child.wait() == 1


def test_a_damaged_file_leaves_nothing_in_the_cache(source: Path, cache: Path) -> None:
    source.write_bytes(source.read_bytes()[:5000])
    with pytest.raises(UserError, match="not a sound GGUF file"):
        model_directory(str(source), cache=cache)
    assert visible(cache) == []


def test_a_changed_file_is_imported_anew(imported: Import, tmp_path: Path) -> None:
    """Of the same name, size and time: the import in the cache is not taken for it, which a damage shows."""
    before, status = visible(imported.cache), imported.source.stat()
    changed = tmp_path / imported.source.name
    changed.write_bytes(b"?" + imported.source.read_bytes()[1:])
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match="GGUF"):
        model_directory(str(changed), cache=imported.cache)
    assert visible(imported.cache) == before


@pytest.mark.parametrize("name", ["none.gguf", "/no/such/model", "../nowhere", "a/b/c", "what ever", ""])
def test_names_without_a_model_are_rejected(name: str, cache: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        model_directory(name, cache=cache)


def test_a_cache_path_that_is_a_file_is_rejected(source: Path, cache: Path) -> None:
    cache.write_text("not a directory")
    with pytest.raises(UserError, match="TGI_CACHE"):
        model_directory(str(source), cache=cache)
