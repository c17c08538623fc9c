"""Every setting of the program, once: its flag, environment names, type, default and meaning."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tgi.kernel.option import (
    OPTION,
    Option,
    address,
    batch_sizes,
    boolean,
    count,
    endpoint,
    integer,
    number,
    proper_share,
    seconds,
    setting,
    share,
    tcp_port,
    text,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
# What plain weights may be made at load, by the names of `--quantize`: those of other makers mean the nearest of ours.
MADE_AT_LOAD = {
    "int8": "int8",
    "int4": "int4",
    "eetq": "int8",
    "bitsandbytes": "int8",
    "bitsandbytes-nf4": "int4",
    "bitsandbytes-fp4": "int4",
    "fp8": "fp8",
}
# The other names say what the weights are already, and so does fp8 where they are.
QUANTIZATIONS = (*MADE_AT_LOAD, "awq", "compressed-tensors", "exl2", "gptq", "marlin")
CHUNKED = "prompts are always computed in chunks, beside the decode steps of others"
KERNEL = "the attention kernel follows from the device"
ONE_SHARD = "there is one shard"
NO_IMAGES = "images are not served yet"
# Tokens drafted per step: where a draft model is named and no number, and at most, since longer drafts gain little.
DRAFTS, MOST_SPECULATED = 4, 16


@dataclass(frozen=True)
class Settings:
    """What `tgi up` and every role run with. Names are TGI's flag names; None means "measured" or "not set"."""

    # The model
    model_id: str | None = setting(
        None, "Hub id, local directory or .gguf file. Without it: the demo model.", text, also=("HF_MODEL_ID",)
    )
    revision: str | None = setting(None, "Branch, tag or commit on the Hub.", text, also=("HF_MODEL_REVISION",))
    dtype: str = setting(
        "auto",
        "Type of weights and activations; auto takes the model's own, or float32 on a CPU that only emulates that.",
        text,
        choices=DTYPES,
    )
    device: str = setting("auto", "Where the model runs.", text, env=("TGI_DEVICE",), choices=("auto", "cpu", "cuda"))
    cpu: str | None = setting(
        None,
        "Instruction set that kernels on CPU are held to; default: what the processor has.",
        text,
        env=("TGI_CPU",),
        choices=("avx2",),
    )
    quantize: str | None = setting(
        None,
        "Weights in fewer bits: int8 and int4 (and eetq, bitsandbytes…, which stand for one of them) are made at load, "
        "and fp8 on a GPU that has 8-bit floats; the others say what the weights are already.",
        text,
        also=("HF_MODEL_QUANTIZE",),
        choices=QUANTIZATIONS,
    )
    speculate: int | None = setting(
        None,
        f"Most tokens drafted per request and step, at most {MOST_SPECULATED}; with a draft model {DRAFTS}, else 0.",
        integer,
    )
    draft_model_id: str | None = setting(
        None,
        "Model that drafts: Hub id, local directory or .gguf file, of the model's vocabulary. Without it drafts are "
        "what followed the same words before.",
        text,
        env=("TGI_DRAFT_MODEL_ID",),
    )
    draft_model_revision: str | None = setting(
        None, "Its branch, tag or commit on the Hub.", text, env=("TGI_DRAFT_MODEL_REVISION",)
    )
    sharded: str | None = setting(None, "Run on several devices. Not supported yet.", text, choices=("true", "false"))
    num_shard: int | None = setting(
        None, "Number of devices. Not supported yet: only 1 is taken, and the default.", integer, also=("SM_NUM_GPUS",)
    )
    trust_remote_code: bool = setting(
        False,
        "Let a model that transformers does not know run the Python code that comes with it.",
        boolean,
        also=("HF_MODEL_TRUST_REMOTE_CODE",),
    )
    lora_adapters: str | None = setting(
        None,
        "LoRA adapters to load at start: Hub ids (ID or ID@REVISION) or directories (NAME=PATH), with commas between.",
        text,
    )
    allow_adapter_updates: bool = setting(
        False,
        "Let clients load adapters from directories of this host, and unload them, while the server runs.",
        boolean,
        env=("TGI_ALLOW_ADAPTER_UPDATES",),
    )
    rope_scaling: str | None = setting(
        None,
        "Kind of rotary scaling, in place of the model's own. dynamic is refused.",
        text,
        choices=("linear", "dynamic"),
    )
    rope_factor: float | None = setting(
        None, "Factor of the rotary scaling: 1.0 with --rope-scaling; alone it means linear.", number
    )
    tokenizer_config_path: str | None = setting(
        None,
        "A tokenizer_config.json whose entries replace the model's (the chat template, say), or a .jinja file.",
        text,
    )
    huggingface_hub_cache: str | None = setting(None, "Where Hub models are kept.", text)
    weights_cache_override: str | None = setting(
        None, "Directory to read the weight files from, in place of the model's own.", text
    )

    # Memory and kernels
    cuda_memory_fraction: float = setting(1.0, "Share of the GPU's memory that may be used.", share)
    memory_fraction: float = setting(
        0.9,
        "Share of the memory left after loading that the KV cache may take on CUDA.",
        share,
        env=("TGI_WIGGLE_ROOM",),
    )
    kv_cache_dtype: str | None = setting(
        None,
        "Keys and values in 8 bits on a GPU, twice as many tokens of them; default: in the type of the activations.",
        text,
        choices=("fp8_e4m3fn", "fp8_e5m2"),
    )
    cuda_graphs: tuple[int, ...] = setting(
        (),
        "Batch sizes to capture as CUDA graphs, 0 for none; default powers of two up to --max-batch-size.",
        batch_sizes,
    )
    attention: str | None = setting(
        None,
        "Attention kernels.",
        text,
        choices=("paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"),
        ignored=KERNEL,
    )
    use_flash_attention: bool = setting(True, "Attention kernels.", boolean, ignored=KERNEL)
    disable_custom_kernels: bool = setting(
        False, "Compute with torch's own operations alone, and none of our kernels, on CPU or CUDA.", boolean
    )

    # Limits
    max_concurrent_requests: int = setting(128, "Requests at once; more get a 429.", count)
    max_best_of: int = setting(2, "Largest best_of.", count)
    max_stop_sequences: int = setting(4, "Stop strings per request.", integer)
    max_top_n_tokens: int = setting(5, "Largest top_n_tokens.", integer)
    max_input_tokens: int | None = setting(None, "Longest prompt; default max_total_tokens - 1.", count)
    max_input_length: int | None = setting(None, "Old name of --max-input-tokens.", count)
    max_total_tokens: int | None = setting(None, "Longest prompt + generation; default: what fits.", count)
    max_batch_prefill_tokens: int | None = setting(None, "Tokens computed in one step.", count)
    max_batch_total_tokens: int | None = setting(None, "Size of the KV cache in tokens.", count)
    max_batch_size: int | None = setting(None, "Requests that run at once.", count)
    max_client_batch_size: int = setting(4, "Prompts in one /v1/completions call.", count)
    max_waiting_tokens: int = setting(20, "Tokens decoded before waiting requests come in.", integer, ignored=CHUNKED)
    waiting_served_ratio: float = setting(
        0.3, "Waiting to running requests at which a prefill pauses decoding.", number, ignored=CHUNKED
    )
    payload_limit: int = setting(2_000_000, "Largest request body in bytes.", count)

    # The front end
    hostname: str = setting("0.0.0.0", "Address to listen on.", address, env=("TGI_HOSTNAME",))
    port: int = setting(3000, "Port to listen on.", tcp_port, over=("AIP_HTTP_PORT",), short="-p")
    prometheus_port: int | None = setting(None, "A further port that serves /metrics.", tcp_port)
    api_workers: int = setting(1, "Front end processes on the port.", count, env=("TGI_API_WORKERS",))
    validation_workers: int = setting(2, "Tokenizer processes.", integer)
    api_key: tuple[str, ...] = setting(
        (),
        "Bearer key that clients must send. Repeatable; in the variable one per line.",
        text,
        separator="\n",
        secret=True,
    )
    api_key_file: str | None = setting(None, "File with further keys, one per line.", text, env=("TGI_API_KEY_FILE",))
    cors_allow_origin: tuple[str, ...] = setting(
        (), "Origins that browsers may call from; all without it. Repeatable.", text, separator=","
    )
    compute_type: str | None = setting(
        None, "What the header x-compute-type says; default: the number and kind of the GPUs.", text
    )
    reuse_port: bool = setting(
        False, "Let front ends that are started alone share the port (SO_REUSEPORT).", boolean, env=("TGI_REUSE_PORT",)
    )
    disable_grammar_support: bool = setting(False, "Refuse requests with a grammar.", boolean)
    enable_prefill_logprobs: bool = setting(
        False,
        "Compute logprobs of prompts.",
        boolean,
        also=("REQUEST_LOGPROBS",),
        ignored="a request that asks for them gets them",
    )
    allow_image_urls: tuple[str, ...] = setting(
        (),
        "Hosts from which images may be fetched; none without it. Repeatable.",
        text,
        env=("TGI_ALLOW_IMAGE_URLS",),
        separator=",",
        ignored=NO_IMAGES,
    )
    max_image_fetch_size: int = setting(
        1_073_741_824, "Largest image that is fetched, in bytes.", count, ignored=NO_IMAGES
    )
    kserve: bool = setting(False, "Serve KServe's v2 routes too.", boolean, env=("TGI_KSERVE",))
    aip_predict_route: str | None = setting(None, "Path of Vertex AI's prediction route.", text)
    aip_health_route: str | None = setting(None, "Path of Vertex AI's health route.", text)
    docker_label: str | None = setting(None, "What /info says as docker_label.", text)
    git_sha: str | None = setting(None, "What /info says as sha.", text, env=("VERGEN_GIT_SHA",))
    ngrok: bool = setting(False, "Tunnels are not built, refused.", boolean)
    ngrok_authtoken: str | None = setting(None, "Goes with --ngrok.", text, secret=True)
    ngrok_edge: str | None = setting(None, "Goes with --ngrok.", text)

    # The scheduler
    prefix_caching: bool = setting(True, "Share the KV pages of equal prefixes.", boolean)
    prefill_chunking: bool = setting(True, "Compute prompts in chunks.", boolean, ignored=CHUNKED)
    step_target: float = setting(
        0.2, "Seconds that a step may take while others wait for their next token.", seconds, env=("TGI_STEP_TARGET",)
    )
    stall_limit: float = setting(
        60.0,
        "Seconds without a finished step, with work in flight, after which /health fails.",
        seconds,
        env=("TGI_STALL_LIMIT",),
    )

    # The worker
    worker: str = setting(
        "torch",
        "The real worker, or a scripted one without a model.",
        text,
        env=("TGI_WORKER",),
        choices=("torch", "scripted"),
    )
    scripted_step_us: int = setting(
        0, "Microseconds that a step of the scripted worker takes.", integer, env=("TGI_SCRIPTED_STEP_US",)
    )
    watermark_gamma: float = setting(0.5, "Share of the vocabulary that a watermark makes green.", proper_share)
    watermark_delta: float = setting(2.0, "What a watermark adds to the scores of green tokens.", number)
    shard_uds_path: str | None = setting(
        None, "Socket of the shards.", text, ignored="sockets are in the run directory, which TGI_RUN names"
    )
    master_addr: str = setting("localhost", "Where the shards meet.", text, ignored=ONE_SHARD)
    master_port: int = setting(29500, "Where the shards meet.", tcp_port, ignored=ONE_SHARD)

    # Running it
    graceful_termination_timeout: float = setting(
        90.0, "Seconds that requests in flight may take after SIGTERM.", seconds, short="-g"
    )
    start_timeout: float = setting(
        600.0, "Seconds that a process may take to start.", seconds, env=("TGI_START_TIMEOUT",)
    )
    hang_timeout: float = setting(
        120.0, "Seconds without a sign of life after which a process is replaced.", seconds, env=("TGI_HANG_TIMEOUT",)
    )
    json_output: bool = setting(False, "Log in JSON, one object per line.", boolean)
    log_level: str = setting("info", "debug, info, warn, error or off; with commas also TARGET=LEVEL.", text)
    log_colorize: bool | None = setting(None, "Colour levels in logs; default: on a terminal.", boolean)
    env: bool = setting(False, "Log the runtime environment at start.", boolean, env=(), short="-e")
    otlp_endpoint: str | None = setting(
        None, "OTLP collector (gRPC) that traces go to: http://HOST:4317. Without it there are none.", endpoint
    )
    otlp_service_name: str = setting("text-generation-inference.router", "service.name of the traces.", text)
    usage_stats: str = setting(
        "off", "Usage statistics.", text, choices=("on", "off", "no-stack"), ignored="nothing is ever sent"
    )

    # Derived while starting, never given by the user
    run_dir: Path = field(default=Path("."))
    model_dir: Path = field(default=Path("."))  # the resolved model_id
    model_sha: str | None = None  # its commit, if it came from the Hub
    model_pipeline_tag: str | None = None
    draft_model_dir: Path | None = None  # the resolved draft_model_id
    adapters: tuple[tuple[str, str], ...] = ()  # name and directory of each of lora_adapters

    def to_json(self) -> str:
        """For a child process's environment."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The settings that a supervisor passed on."""
        values: dict[str, Any] = json.loads(text)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        paths = ("run_dir", "model_dir", "draft_model_dir")
        values |= {name: Path(values[name]) for name in paths if values.get(name) is not None}
        values["adapters"] = tuple((name, directory) for name, directory in values["adapters"])
        return cls(**values)


OPTIONS: dict[str, Option] = {item.name: item.metadata[OPTION] for item in fields(Settings) if OPTION in item.metadata}
DEFAULTS = Settings()
