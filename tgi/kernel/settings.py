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
from tgi.kernel.sampling import SamplingDefaults

GENERATION_CONFIGS = ("auto", "tgi")  # what --generation-config may name besides a directory
# The headings of the help and of docs/configuration.md. The settings stand in this order, too.
GROUPS = MODEL, SERVING, LIMITS, PERFORMANCE, QUANTIZATION, ADAPTERS, SPECULATION, OPERATIONS, COMPATIBILITY = (
    "Model",
    "Serving",
    "Limits",
    "Performance",
    "Quantization",
    "Adapters",
    "Speculation",
    "Operations",
    "Compatibility",
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
# Defaults by kind of device. A step is one piece of work: on CPU a long one holds up the next token of every request.
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
BATCH_SIZE = {"cpu": 128, "cuda": 256}


def _per_device(defaults: dict[str, int]) -> str:
    return f"{defaults['cpu']} on CPU, {defaults['cuda']} on a GPU"


@dataclass(frozen=True)
class Settings:
    """What `tgi up` and every role run with. Names are TGI's flag names; None means "measured" or "not set"."""

    # Model
    model_id: str | None = setting(
        MODEL, None, "Hub id, local directory or .gguf file.", text, also=("HF_MODEL_ID",), unset="a small demo model"
    )
    revision: str | None = setting(
        MODEL, None, "Branch, tag or commit on the Hub.", text, also=("HF_MODEL_REVISION",), unset="main"
    )
    dtype: str = setting(
        MODEL,
        "auto",
        "Type of weights and activations; auto takes the model's own, or float32 on a CPU that only emulates that.",
        text,
        choices=DTYPES,
    )
    device: str = setting(
        MODEL,
        "auto",
        "Where the model runs; auto takes a GPU if there is one.",
        text,
        env=("TGI_DEVICE",),
        choices=("auto", "cpu", "cuda"),
    )
    trust_remote_code: bool = setting(
        MODEL,
        False,
        "Let a model that transformers does not know run the Python code that comes with it.",
        boolean,
        also=("HF_MODEL_TRUST_REMOTE_CODE",),
    )
    tokenizer_config_path: str | None = setting(
        MODEL,
        None,
        "A tokenizer_config.json whose entries replace the model's (the chat template, say), or a .jinja file.",
        text,
        unset="the model's own",
    )
    generation_config: str = setting(
        MODEL,
        "auto",
        "Sampling defaults on /v1: auto takes those of the model's generation_config.json, tgi those of TGI. Or a "
        "directory with a generation_config.json, whose entries replace the model's.",
        text,
        env=("TGI_GENERATION_CONFIG",),
    )
    huggingface_hub_cache: str | None = setting(
        MODEL, None, "Where Hub models are kept.", text, unset="where the Hub's own library keeps them"
    )
    weights_cache_override: str | None = setting(
        MODEL, None, "Directory to read the weight files from.", text, unset="the model's own"
    )
    rope_scaling: str | None = setting(
        MODEL,
        None,
        "Kind of rotary scaling; dynamic is refused.",
        text,
        choices=("linear", "dynamic"),
        unset="the model's own",
    )
    rope_factor: float | None = setting(
        MODEL,
        None,
        "Factor of the rotary scaling; without --rope-scaling it means linear.",
        number,
        unset="1.0 with --rope-scaling, else the model's own",
    )

    # Serving
    hostname: str = setting(SERVING, "0.0.0.0", "Address to listen on.", address, env=("TGI_HOSTNAME",))
    port: int = setting(SERVING, 3000, "Port to listen on.", tcp_port, over=("AIP_HTTP_PORT",), short="-p")
    api_key_file: str | None = setting(
        SERVING,
        None,
        "File with the keys that clients must send (Authorization: Bearer KEY), one per line.",
        text,
        env=("TGI_API_KEY_FILE",),
        unset="no key is asked for",
    )
    api_key: tuple[str, ...] = setting(
        SERVING,
        (),
        "The same on the command line, where other users of the host can see it for a moment at start: prefer the file "
        "or the variable API_KEY. Repeatable; in the variable one per line.",
        text,
        separator="\n",
        secret=True,
        unset="no key is asked for",
    )
    cors_allow_origin: tuple[str, ...] = setting(
        SERVING, (), "Origins that browsers may call from. Repeatable.", text, separator=",", unset="all"
    )
    api_workers: int = setting(SERVING, 1, "Front end processes on the port.", count, env=("TGI_API_WORKERS",))
    validation_workers: int = setting(SERVING, 2, "Tokenizer processes.", integer)
    prometheus_port: int | None = setting(
        SERVING, None, "A further port that serves /metrics.", tcp_port, unset="none; /metrics is on --port"
    )
    reuse_port: bool = setting(
        SERVING,
        False,
        "Let front ends that are started alone share the port (SO_REUSEPORT).",
        boolean,
        env=("TGI_REUSE_PORT",),
        hidden=True,
    )
    disable_grammar_support: bool = setting(SERVING, False, "Refuse requests with a grammar.", boolean)
    watermark_gamma: float = setting(
        SERVING, 0.5, "Share of the vocabulary that a watermark makes green.", proper_share
    )
    watermark_delta: float = setting(SERVING, 2.0, "What a watermark adds to the scores of green tokens.", number)

    # Limits
    max_concurrent_requests: int = setting(LIMITS, 128, "Requests at once; more get a 429.", count)
    max_input_tokens: int | None = setting(LIMITS, None, "Longest prompt.", count, unset="--max-total-tokens less 1")
    max_total_tokens: int | None = setting(
        LIMITS, None, "Longest prompt and generation together.", count, unset="what model and memory allow"
    )
    max_batch_size: int | None = setting(
        LIMITS, None, "Requests that run at once.", count, unset=_per_device(BATCH_SIZE)
    )
    max_batch_prefill_tokens: int | None = setting(
        LIMITS,
        None,
        "Tokens computed in one step; at least one for each request that runs.",
        count,
        unset=_per_device(PREFILL_TOKENS),
    )
    max_batch_total_tokens: int | None = setting(
        LIMITS, None, "Size of the KV cache in tokens.", count, unset="what the memory allows"
    )
    max_client_batch_size: int = setting(LIMITS, 4, "Prompts in one /v1/completions call.", count)
    max_best_of: int = setting(LIMITS, 2, "Largest best_of.", count)
    max_stop_sequences: int = setting(LIMITS, 4, "Stop strings per request.", integer)
    max_top_n_tokens: int = setting(LIMITS, 5, "Largest top_n_tokens.", integer)
    payload_limit: int = setting(LIMITS, 2_000_000, "Largest request body in bytes.", count)

    # Performance
    memory_fraction: float = setting(
        PERFORMANCE,
        0.9,
        "Share of the memory left after loading that the KV cache may take on CUDA.",
        share,
        env=("TGI_WIGGLE_ROOM",),
    )
    cuda_memory_fraction: float = setting(PERFORMANCE, 1.0, "Share of the GPU's memory that may be used.", share)
    cuda_graphs: tuple[int, ...] = setting(
        PERFORMANCE,
        (),
        "Batch sizes whose decode steps are captured as CUDA graphs; 0: none.",
        batch_sizes,
        unset="powers of two up to --max-batch-size",
    )
    prefix_caching: bool = setting(PERFORMANCE, True, "Share the KV pages of equal prefixes.", boolean)
    step_target: float = setting(
        PERFORMANCE,
        0.2,
        "Seconds that a step may take while others wait for their next token.",
        seconds,
        env=("TGI_STEP_TARGET",),
    )
    disable_custom_kernels: bool = setting(
        PERFORMANCE,
        False,
        "Compute with torch's own operations alone, and none of our kernels, on CPU or CUDA.",
        boolean,
    )
    cpu: str | None = setting(
        PERFORMANCE,
        None,
        "Instruction set that kernels on CPU are held to.",
        text,
        env=("TGI_CPU",),
        choices=("avx2",),
        unset="what the processor has",
    )

    # Quantization
    quantize: str | None = setting(
        QUANTIZATION,
        None,
        "Weights in fewer bits: int8 and int4 (and eetq, bitsandbytes…, which stand for one of them) are made at load, "
        "and fp8 on a GPU that has 8-bit floats; the others say what the weights are already.",
        text,
        also=("HF_MODEL_QUANTIZE",),
        choices=QUANTIZATIONS,
        unset="weights as they are stored",
    )
    kv_cache_dtype: str | None = setting(
        QUANTIZATION,
        None,
        "Keys and values in 8 bits, on a GPU: twice as many tokens of them.",
        text,
        choices=("fp8_e4m3fn", "fp8_e5m2"),
        unset="the type of the activations",
    )

    # Adapters
    lora_adapters: str | None = setting(
        ADAPTERS,
        None,
        "LoRA adapters to load at start: Hub ids (ID or ID@REVISION) or directories (NAME=PATH), with commas between.",
        text,
        unset="none",
    )
    allow_adapter_updates: bool = setting(
        ADAPTERS,
        False,
        "Let clients load adapters from directories of this host, and unload them, while the server runs.",
        boolean,
        env=("TGI_ALLOW_ADAPTER_UPDATES",),
    )

    # Speculation
    speculate: int | None = setting(
        SPECULATION,
        None,
        f"Most tokens drafted per request and step, at most {MOST_SPECULATED}.",
        integer,
        unset=f"{DRAFTS} with a draft model, else 0",
    )
    draft_model_id: str | None = setting(
        SPECULATION,
        None,
        "Model that drafts, of the model's vocabulary: Hub id, local directory or .gguf file. Without it drafts are "
        "what followed the same words before.",
        text,
        env=("TGI_DRAFT_MODEL_ID",),
        unset="none",
    )
    draft_model_revision: str | None = setting(
        SPECULATION,
        None,
        "Branch, tag or commit of the draft model on the Hub.",
        text,
        env=("TGI_DRAFT_MODEL_REVISION",),
        unset="main",
    )

    # Operations
    json_output: bool = setting(OPERATIONS, False, "Log in JSON, one object per line.", boolean)
    log_level: str = setting(
        OPERATIONS, "info", "debug, info, warn, error or off; with commas also TARGET=LEVEL.", text
    )
    log_colorize: bool | None = setting(OPERATIONS, None, "Colour levels in logs.", boolean, unset="on a terminal")
    env: bool = setting(OPERATIONS, False, "Log the runtime environment at start.", boolean, env=(), short="-e")
    otlp_endpoint: str | None = setting(
        OPERATIONS, None, "OTLP collector (gRPC) that traces go to: http://HOST:4317.", endpoint, unset="no traces"
    )
    otlp_service_name: str = setting(
        OPERATIONS, "text-generation-inference.router", "service.name of the traces.", text
    )
    graceful_termination_timeout: float = setting(
        OPERATIONS, 90.0, "Seconds that requests in flight may take after SIGTERM.", seconds, short="-g"
    )
    start_timeout: float = setting(
        OPERATIONS, 600.0, "Seconds that a process may take to start.", seconds, env=("TGI_START_TIMEOUT",)
    )
    hang_timeout: float = setting(
        OPERATIONS,
        120.0,
        "Seconds without a sign of life after which a process is replaced.",
        seconds,
        env=("TGI_HANG_TIMEOUT",),
    )
    stall_limit: float = setting(
        OPERATIONS,
        60.0,
        "Seconds without a finished step, with work in flight, after which /health fails.",
        seconds,
        env=("TGI_STALL_LIMIT",),
    )
    worker: str = setting(
        OPERATIONS,
        "torch",
        "The real worker, or a scripted one without a model.",
        text,
        env=("TGI_WORKER",),
        choices=("torch", "scripted"),
        hidden=True,
    )
    scripted_step_us: int = setting(
        OPERATIONS,
        0,
        "Microseconds that a step of the scripted worker takes.",
        integer,
        env=("TGI_SCRIPTED_STEP_US",),
        hidden=True,
    )

    # Compatibility
    kserve: bool = setting(COMPATIBILITY, False, "Serve KServe's v2 routes too.", boolean, env=("TGI_KSERVE",))
    aip_predict_route: str | None = setting(
        COMPATIBILITY, None, "Path of Vertex AI's prediction route.", text, unset="none"
    )
    aip_health_route: str | None = setting(COMPATIBILITY, None, "Path of Vertex AI's health route.", text, unset="none")
    compute_type: str | None = setting(
        COMPATIBILITY, None, "What the header x-compute-type says.", text, unset="number and kind of the GPUs"
    )
    docker_label: str | None = setting(COMPATIBILITY, None, "What /info says as docker_label.", text, unset="none")
    git_sha: str | None = setting(
        COMPATIBILITY, None, "What /info says as sha.", text, env=("VERGEN_GIT_SHA",), unset="none"
    )
    max_input_length: int | None = setting(
        COMPATIBILITY, None, "Old name of --max-input-tokens.", count, unset="none", hidden=True
    )
    sharded: str | None = setting(
        COMPATIBILITY,
        None,
        "Run on several devices. Not supported yet: only false is taken.",
        text,
        choices=("true", "false"),
        unset="false",
        hidden=True,
    )
    num_shard: int | None = setting(
        COMPATIBILITY,
        None,
        "Number of devices. Not supported yet: only 1 is taken.",
        integer,
        also=("SM_NUM_GPUS",),
        unset="1",
        hidden=True,
    )
    ngrok: bool = setting(COMPATIBILITY, False, "Tunnels are not built, refused.", boolean, hidden=True)
    ngrok_authtoken: str | None = setting(
        COMPATIBILITY, None, "Goes with --ngrok.", text, secret=True, unset="none", hidden=True
    )
    ngrok_edge: str | None = setting(COMPATIBILITY, None, "Goes with --ngrok.", text, unset="none", hidden=True)
    attention: str | None = setting(
        COMPATIBILITY,
        None,
        "Attention kernels.",
        text,
        choices=("paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"),
        ignored=KERNEL,
        unset="follows from the device",
    )
    use_flash_attention: bool = setting(COMPATIBILITY, True, "Attention kernels.", boolean, ignored=KERNEL)
    prefill_chunking: bool = setting(COMPATIBILITY, True, "Compute prompts in chunks.", boolean, ignored=CHUNKED)
    max_waiting_tokens: int = setting(
        COMPATIBILITY, 20, "Tokens decoded before waiting requests come in.", integer, ignored=CHUNKED
    )
    waiting_served_ratio: float = setting(
        COMPATIBILITY,
        0.3,
        "Waiting to running requests at which a prefill pauses decoding.",
        number,
        ignored=CHUNKED,
    )
    enable_prefill_logprobs: bool = setting(
        COMPATIBILITY,
        False,
        "Compute logprobs of prompts.",
        boolean,
        also=("REQUEST_LOGPROBS",),
        ignored="a request that asks for them gets them",
    )
    allow_image_urls: tuple[str, ...] = setting(
        COMPATIBILITY,
        (),
        "Hosts from which images may be fetched. Repeatable.",
        text,
        env=("TGI_ALLOW_IMAGE_URLS",),
        separator=",",
        ignored=NO_IMAGES,
        unset="none",
    )
    max_image_fetch_size: int = setting(
        COMPATIBILITY, 1_073_741_824, "Largest image that is fetched, in bytes.", count, ignored=NO_IMAGES
    )
    shard_uds_path: str | None = setting(
        COMPATIBILITY,
        None,
        "Socket of the shards.",
        text,
        ignored="sockets are in the run directory, which TGI_RUN names",
        unset="none",
    )
    master_addr: str = setting(COMPATIBILITY, "localhost", "Where the shards meet.", text, ignored=ONE_SHARD)
    master_port: int = setting(COMPATIBILITY, 29500, "Where the shards meet.", tcp_port, ignored=ONE_SHARD)
    usage_stats: str = setting(
        COMPATIBILITY,
        "off",
        "Usage statistics.",
        text,
        choices=("on", "off", "no-stack"),
        ignored="nothing is ever sent",
    )

    # Derived while starting, never given by the user
    run_dir: Path = field(default=Path("."))
    model_dir: Path = field(default=Path("."))  # the resolved model_id
    model_sha: str | None = None  # its commit, if it came from the Hub
    model_source: str = ""  # where it is from, in words
    model_pipeline_tag: str | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # as `generation_config` asks for
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
        values["sampling_defaults"] = SamplingDefaults(*values["sampling_defaults"])
        values["adapters"] = tuple((name, directory) for name, directory in values["adapters"])
        return cls(**values)


OPTIONS: dict[str, Option] = {item.name: item.metadata[OPTION] for item in fields(Settings) if OPTION in item.metadata}
DEFAULTS = Settings()
