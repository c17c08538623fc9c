"""The command `scripts/bench`: runs the named measurement, or `serving` if none is named."""

import importlib
import sys

# Name on the command line: module, and what it measures. The order is that of the help.
MEASUREMENTS = {
    "serving": ("serving", "a server over HTTP: start, TTFT, inter-token latency, tokens/s, CPU time and memory"),
    "start": ("start", "command to first token, and kill -9 to the next one, by part; known prompts after a restart"),
    "front-ends": ("front_ends", "throughput of one, two, three front ends that each get a share of a core"),
    "latency": ("latency", "what front end, tokenizer and scheduler add to each token of a stream"),
    "idle": ("idle", "wake-ups of processes while streams and connections are idle"),
    "links": ("links", "what a delay between the hosts of a deployment adds to a stream"),
    "flood": ("flood", "time to first token of a client beside another one that floods the server"),
    "turns": ("turns", "time to first token of a chat's second turn behind long histories"),
    "speculation": ("speculation", "requests to a server with --speculate and to one without"),
    "scheduler": ("scheduler", "the scheduler's pass for one step, and the prefix cache"),
    "costs": ("costs", "CPU time per step and message; fails beyond twice the recorded figures"),
    "sampling": ("sampling", "a step from logits to tokens, by logits processor"),
    "memory": ("memory", "memory of the worker by type of weights, next to its bound"),
    "kernels": ("kernels", "matrix products of the CPU kernels and of oneDNN"),
    "step": ("step", "the parts of a decode step on the CPU kernels, next to the memory floor"),
    "architectures": ("architectures", "decode of experts, latent attention and recurrent layers, next to llama.cpp"),
    "images": ("images", "time to first token of requests with an image, next to llama.cpp and transformers"),
    "lora": ("lora", "decode steps with LoRA adapters"),
    "ranks": ("ranks", "decode steps of a model that is divided among several ranks on CPU"),
    "gpu": ("gpu", "decode and prefill on a GPU, next to its peaks"),
    "quantized": ("quantized", "products with quantized weights on a GPU"),
    "host": ("host", "the worker's loop per decode step, with the device stubbed"),
    "gpu-profile": ("gpu_profile", "the host's functions and the kernels of decode steps on a GPU"),
    "stack": ("stack", "all processes on a known shape: start, throughput next to the engine alone, kill -9"),
    "offline": ("offline", "scheduler and engine in one process, under requests at once"),
    "families": ("families", "every family's tiny model on a device, compared with transformers there"),
    "embeddings": ("embeddings", "texts per second of embeddings, next to transformers and fastembed"),
    "peer-gpu": ("peer_gpu", "continuous batching of transformers, on the shape and load of stack"),
    "quality": ("quality", "perplexity of quantized weights and of an 8-bit KV cache"),
}

HELP = """usage: scripts/bench [MEASUREMENT] [OPTIONS]

Without MEASUREMENT the options are those of `serving`: `scripts/bench --scripted --concurrency 64`.
`scripts/bench MEASUREMENT --help` explains one.
Comparison with other servers: `scripts/bench --against vllm,llama.cpp`.

measurements:
"""


def main() -> None:
    """Runs a measurement with the rest of the command line, or prints what can be measured."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in ("-h", "--help"):
        width = max(map(len, MEASUREMENTS))
        print(HELP + "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in MEASUREMENTS.items()))
        return
    name = "serving"
    if first and not first.startswith("-"):
        if first not in MEASUREMENTS:
            sys.exit(f"There is no measurement {first!r}. Choose one of {', '.join(MEASUREMENTS)}.")
        name = first
        del sys.argv[1]
    sys.argv[0] = f"scripts/bench {name}"
    importlib.import_module(f"scripts.benchmarks.{MEASUREMENTS[name][0]}").main()


if __name__ == "__main__":
    main()
