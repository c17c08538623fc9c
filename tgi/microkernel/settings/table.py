"""Every setting of the program, declared once in Settings: flag, environment variables, type, default and meaning.

`loading.load_settings` reads flags and environment and rejects contradictions. To add a setting: a field of
Settings, and docs/configuration.md from scripts/configuration.py. Imported by scripts/install.py before any package is
installed.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tgi.microkernel.messages.sampling_params import SamplingDefaults
from tgi.microkernel.settings.options import (
    OPTION,
    SettingOption,
    address,
    batch_sizes,
    boolean,
    count,
    endpoint,
    integer,
    network,
    number,
    proper_share,
    ray_address,
    seconds,
    setting,
    share,
    size,
    size_or_0,
    tcp_address,
    tcp_addresses,
    tcp_port,
    text,
)

GENERATION_CONFIGS = ("auto", "tgi")  # values of --generation-config other than a directory

# The headings of the help and of docs/configuration.md, in order.
GROUPS = MODEL, SERVING, LIMITS, PERFORMANCE, QUANTIZATION, ADAPTERS, SPECULATION, OPERATIONS, HOSTS, COMPATIBILITY = (
    "Model",
    "Serving",
    "Limits",
    "Performance",
    "Quantization",
    "Adapters",
    "Speculation",
    "Operations",
    "Hosts",
    "Compatibility",
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")

# Names of the forms of tool calls and of reasoning: those of vLLM and SGLang, where the form is known here. A test
# compares them with the tables in tgi/tokenizer/answers/formats.py.
TOOL_CALL_PARSERS = (
    "auto", "hf", "apertus", "apertus2509", "beam", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "deepseek_v41", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4",
    "deepseekv41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "gigachat35", "glm", "glm45", "glm47",
    "gpt-oss", "granite", "granite-20b-fc", "granite4", "harmony", "hermes", "hunyuan", "hunyuan_a13b", "hy_v3",
    "hy_v4", "internlm", "interns1", "iquest_q1", "jamba", "k2_horizon", "kimi_k2", "lfm2", "ling3", "llama3",
    "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax-m2", "minimax_m2",
    "mistral", "mistral-args", "mistral-ids", "nanbeige", "nemotron_json", "nemotron_v3", "olmo3", "openai",
    "phi4_mini_json", "plamo3", "poolside_v1", "pythonic", "qwen", "qwen25", "qwen3_coder", "qwen3_json", "qwen3_xml",
    "response_template", "seed_oss", "spark25", "step3", "step3p5", "step5", "trinity", "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    "auto", "hf", "apertus", "beam", "cohere_command3", "cohere_command4", "deepseek-r1", "deepseek-v3", "deepseek-v4",
    "deepseek-v41", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "dots", "ernie45", "gemma4",
    "gigachat35", "glm45", "glm47", "gpt-oss", "granite", "granite_thinking_parser", "holo2", "hunyuan",
    "hunyuan_a13b", "hy_v3", "hy_v4", "interns1", "iquest_q1", "k2_horizon", "kimi_k2", "ling3", "mimo",
    "minimax", "minimax-m3", "minimax_m2", "minimax_m3", "mistral", "nanbeige",
    "nemotron_3", "nemotron_v3", "none", "olmo3", "openai_gptoss", "plamo3", "poolside_v1", "qwen3", "qwen3-thinking",
    "response_template", "seed_oss", "step3", "step3p5", "step5", "think",
)  # fmt: skip
# Values of --kv-cache-dtype, by the device.
GPU_KV_CACHE_DTYPES, CPU_KV_CACHE_DTYPES = ("fp8_e4m3fn", "fp8_e5m2"), ("bfloat16", "int8")

# Values of --quantize that quantize weights at load -> format. Names of other libraries mean the nearest format.
QUANTIZED_AT_LOAD = {
    "int8": "int8",
    "int4": "int4",
    "eetq": "int8",
    "bitsandbytes": "int8",
    "bitsandbytes-nf4": "int4",
    "bitsandbytes-fp4": "int4",
    "fp8": "fp8",
}

# All values of --quantize. The others name the format of a pre-quantized checkpoint; fp8 may be either.
QUANTIZATIONS = (*QUANTIZED_AT_LOAD, "awq", "compressed-tensors", "exl2", "gptq", "marlin")

CHUNKED = "prompts are always computed in chunks, together with decode steps"

KERNEL = "the device determines the attention kernel"

ONE_SHARD = "there is one shard"

# Draft tokens per step: the default with a draft model, and the maximum (longer drafts gain little).
DEFAULT_SPECULATED_TOKENS, MAX_SPECULATED_TOKENS = 4, 16
# The draft_model_id that means the served model's own layer for multi-token prediction.
MTP = "mtp"

# Defaults per device. Steps are not interrupted: on CPU a long prefill would delay the next token of all requests.
# GPUs have the second number at least, and more by their memory up to the third (tgi/worker/engine/memory.py).
DEFAULT_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096, "large": 16384}

DEFAULT_BATCH_SIZE = {"cpu": 128, "cuda": 256, "large": 1024}


def _per_device(defaults: dict[str, int]) -> str:
    return f"{defaults['cpu']} on CPU, {defaults['cuda']} to {defaults['large']} on a GPU"


@dataclass(frozen=True)
class Settings:
    """The settings of `tgi up` and of every role. Names are TGI's flag names; None means "measured" or "not set"."""

    # Model
    model_id: str | None = setting(
        MODEL, None, "Hub id, local directory or .gguf file.", text, also=("HF_MODEL_ID",), unset="a small demo model"
    )
    models: tuple[str, ...] = setting(
        MODEL,
        (),
        "Several models: NAME=SOURCE, or a TOML file with a table for each. --model-id NAME=SOURCE, repeated, is the "
        "same.",
        text,
        env=("TGI_MODELS",),
        separator=",",
        unset="one model",
    )
    load_models: str = setting(
        MODEL,
        "start",
        "With several models: when each is loaded. A table of the file may say otherwise.",
        text,
        env=("TGI_LOAD_MODELS",),
        choices=("start", "first-use"),
    )
    model_ttl: float | None = setting(
        MODEL,
        None,
        "With several models: seconds without a request after which a model is unloaded.",
        seconds,
        env=("TGI_MODEL_TTL",),
        unset="never",
    )
    max_loaded_models: int | None = setting(
        MODEL,
        None,
        "With several models: how many are loaded at once. For another one the least recently used is unloaded, as it "
        "is where memory is short.",
        count,
        env=("TGI_MAX_LOADED_MODELS",),
        unset="as memory allows",
    )
    revision: str | None = setting(
        MODEL, None, "Branch, tag or commit on the Hub.", text, also=("HF_MODEL_REVISION",), unset="main"
    )
    dtype: str = setting(
        MODEL,
        "auto",
        "Type of weights and activations; auto: the model's, or float32 where torch's CPU kernels emulate it.",
        text,
        choices=DTYPES,
    )
    device: str = setting(
        MODEL,
        "auto",
        "Device of the model; auto: a CUDA GPU if there is one. mps, a GPU of Apple, is refused.",
        text,
        env=("TGI_DEVICE",),
        choices=("auto", "cpu", "cuda", "mps"),
    )
    load_format: str = setting(
        MODEL,
        "auto",
        "dummy: random weights, the same at each start; files with weights are not read, and need not be there. For "
        "benchmarks only.",
        text,
        env=("TGI_LOAD_FORMAT",),
        choices=LOAD_FORMATS,
    )
    trust_remote_code: bool = setting(
        MODEL,
        False,
        "Run the Python code of a model that transformers does not know.",
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
    tool_call_parser: str = setting(
        MODEL,
        "auto",
        "Form of tool calls, by vLLM's and SGLang's names; auto: what the chat template and the vocabulary show, else "
        "the response_template of tokenizer_config.json; hf: the latter.",
        text,
        env=("TGI_TOOL_CALL_PARSER",),
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = setting(
        MODEL,
        "auto",
        "Form of reasoning, by vLLM's and SGLang's names; none: reasoning is text; auto and hf as above.",
        text,
        env=("TGI_REASONING_PARSER",),
        choices=REASONING_PARSERS,
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
        MODEL, None, "Cache directory for Hub models.", text, unset="that of the Hub's library"
    )
    weights_cache_override: str | None = setting(
        MODEL, None, "Directory to read the weight files from.", text, unset="the model's own"
    )
    rope_scaling: str | None = setting(
        MODEL,
        None,
        "Kind of rotary scaling; dynamic is not supported.",
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
    hostname: str = setting(SERVING, "0.0.0.0", "Address or name to listen on.", address, env=("TGI_HOSTNAME",))
    port: int = setting(SERVING, 3000, "Port to listen on.", tcp_port, over=("AIP_HTTP_PORT",), short="-p")
    api_key_file: str | None = setting(
        SERVING,
        None,
        "File with the keys that clients must send (Authorization: Bearer KEY), one per line, each with the weight and "
        "the limits of its client.",
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
    trusted_proxies: tuple[str, ...] = setting(
        SERVING,
        (),
        "Addresses or networks of proxies whose X-Forwarded-For names the client's address. Repeatable.",
        network,
        env=("TGI_TRUSTED_PROXIES",),
        separator=",",
        unset="none",
    )
    ssl_certfile: str | None = setting(
        SERVING,
        None,
        "Serve HTTPS with the certificate chain in this PEM file; it is loaded again when it changes.",
        text,
        env=("TGI_SSL_CERTFILE",),
        unset="HTTP",
    )
    ssl_keyfile: str | None = setting(
        SERVING,
        None,
        "PEM file with the private key of the certificate, without a passphrase.",
        text,
        env=("TGI_SSL_KEYFILE",),
        unset="in --ssl-certfile",
    )
    cors_allow_origin: tuple[str, ...] = setting(
        SERVING, (), "Origins that browsers may call from. Repeatable.", text, separator=",", unset="all"
    )
    ui: bool = setting(SERVING, True, "Serve the page for browsers at / and /ui.", boolean, env=("TGI_UI",))
    api_workers: int = setting(SERVING, 1, "Front end processes on the port.", count, env=("TGI_API_WORKERS",))
    validation_workers: int = setting(SERVING, 2, "Tokenizer processes.", integer)
    media_workers: int = setting(
        SERVING,
        1,
        "Processes that load images, for models that see them; 0: such a model is served without images.",
        integer,
        env=("TGI_MEDIA_WORKERS",),
    )
    image_urls: bool = setting(
        SERVING,
        True,
        "Fetch images from https and http URLs, not from data URLs alone.",
        boolean,
        env=("TGI_IMAGE_URLS",),
    )
    allowed_image_hosts: tuple[str, ...] = setting(
        SERVING,
        (),
        "Hosts that images may be fetched from; *.NAME stands for all below a name. Repeatable.",
        text,
        env=("TGI_ALLOWED_IMAGE_HOSTS",),
        separator=",",
        unset="all with public addresses",
    )
    allow_private_image_hosts: tuple[str, ...] = setting(
        SERVING,
        (),
        "Hosts that images may be fetched from although their addresses are not public. Repeatable.",
        text,
        env=("TGI_ALLOW_PRIVATE_IMAGE_HOSTS",),
        separator=",",
        unset="none",
    )
    prometheus_port: int | None = setting(
        SERVING, None, "Additional port for /metrics.", tcp_port, unset="none; /metrics is on --port"
    )
    reuse_port: bool = setting(
        SERVING,
        False,
        "Let separately started front ends share the port (SO_REUSEPORT).",
        boolean,
        env=("TGI_REUSE_PORT",),
        hidden=True,
    )
    resume_window: float = setting(
        SERVING,
        0.0,
        "Seconds that a stream continues without its client, who may resume it with Last-Event-ID; 0: not at all.",
        number,
        env=("TGI_RESUME_WINDOW",),
    )
    response_ttl: float = setting(
        SERVING,
        3600.0,
        "Seconds without use after which a response of /v1/responses is forgotten; 0: none is kept.",
        number,
        env=("TGI_RESPONSE_TTL",),
    )
    response_store: str = setting(
        SERVING,
        "file",
        "Where responses, files and batches are kept: file, in the run directory, or memory, of the only front end.",
        text,
        env=("TGI_RESPONSE_STORE",),
        choices=("file", "memory"),
    )
    batch_ttl: float = setting(
        SERVING,
        604800.0,
        "Seconds that files, and batches that have ended, are kept; 0: neither are served.",
        number,
        env=("TGI_BATCH_TTL",),
    )
    batch_store_bytes: int = setting(
        SERVING,
        1 << 30,
        "Bytes of all files and batches; results of running batches may take as much again.",
        size,
        env=("TGI_BATCH_STORE_BYTES",),
    )
    disable_grammar_support: bool = setting(SERVING, False, "Reject requests with a grammar.", boolean)
    watermark_gamma: float = setting(
        SERVING, 0.5, "Share of green tokens of the vocabulary in a watermark.", proper_share
    )
    watermark_delta: float = setting(SERVING, 2.0, "Added to the logits of green tokens by a watermark.", number)

    # Limits
    max_concurrent_requests: int = setting(LIMITS, 128, "Concurrent requests; more are rejected with 429.", count)
    request_timeout: float | None = setting(
        LIMITS,
        None,
        "Seconds that a generation may take; then it ends with 504. The header X-Request-Timeout can only shorten it.",
        seconds,
        env=("TGI_REQUEST_TIMEOUT",),
        unset="no limit",
    )
    slow_reader_timeout: float = setting(
        LIMITS,
        120.0,
        "Seconds that a client may not read while a response or a parked stream waits; then its connection is closed.",
        seconds,
        env=("TGI_SLOW_READER_TIMEOUT",),
    )
    max_input_tokens: int | None = setting(LIMITS, None, "Longest prompt.", count, unset="--max-total-tokens less 1")
    max_total_tokens: int | None = setting(
        LIMITS, None, "Longest prompt plus generated tokens.", count, unset="what model and memory allow"
    )
    max_batch_size: int | None = setting(
        LIMITS,
        None,
        "Requests computed concurrently. If it is not given: on a GPU more than 256 only if --max-concurrent-requests "
        "times --max-best-of is more (1024 with 80 GB); fewer of a model with large recurrent states.",
        count,
        unset=_per_device(DEFAULT_BATCH_SIZE),
    )
    max_batch_prefill_tokens: int | None = setting(
        LIMITS,
        None,
        "Tokens computed in one step; at least one per running request. On a GPU by its memory: 8192 with 80 GB.",
        count,
        unset=_per_device(DEFAULT_PREFILL_TOKENS),
    )
    max_batch_total_tokens: int | None = setting(
        LIMITS, None, "Size of the KV cache in tokens.", count, unset="what the memory allows"
    )
    max_client_batch_size: int = setting(LIMITS, 4, "Prompts in one /v1/completions call.", count)
    max_best_of: int = setting(LIMITS, 2, "Largest best_of.", count)
    max_stop_sequences: int = setting(LIMITS, 4, "Stop strings per request.", integer)
    max_top_n_tokens: int = setting(LIMITS, 5, "Largest top_n_tokens.", integer)
    grammar_compile_limit: float = setting(
        LIMITS, 3.0, "Seconds of computation that compiling a grammar may take; more is a 422.", seconds
    )
    payload_limit: int = setting(LIMITS, 2_000_000, "Largest request body in bytes.", size)
    max_images: int = setting(LIMITS, 16, "Images of one prompt.", count, env=("TGI_MAX_IMAGES",))
    max_image_fetch_size: int = setting(LIMITS, 33_554_432, "Largest fetched image in bytes.", size)
    max_image_pixels: int = setting(
        LIMITS, 40_000_000, "Largest image in pixels.", count, env=("TGI_MAX_IMAGE_PIXELS",)
    )
    image_fetch_timeout: float = setting(
        LIMITS, 10.0, "Seconds that fetching an image may take.", seconds, env=("TGI_IMAGE_FETCH_TIMEOUT",)
    )
    read_timeout: float = setting(
        LIMITS,
        30.0,
        "Seconds that the head of a request may take, and each further 32 KiB of its body; then 408.",
        seconds,
        env=("TGI_READ_TIMEOUT",),
    )
    max_connections: int | None = setting(
        LIMITS,
        None,
        "Open connections per front end. Beyond them the longest idle ones are closed, then new ones get 503.",
        count,
        env=("TGI_MAX_CONNECTIONS",),
        unset="16384, or what the limit of open files allows",
    )

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
        unset="1 to --max-batch-size, and steps with prompt chunks or drafts",
    )
    prefix_caching: bool = setting(PERFORMANCE, True, "Share the KV pages of equal prefixes.", boolean)
    prefix_cache_dir: str | None = setting(
        PERFORMANCE,
        None,
        "Directory for KV pages on disk, which outlive the server: a prompt that it has computed before is read.",
        text,
        env=("TGI_PREFIX_CACHE_DIR",),
        unset="pages are kept in memory only",
    )
    prefix_cache_bytes: int = setting(
        PERFORMANCE,
        16 << 30,
        "Bytes of all files in --prefix-cache-dir; the least recently used are removed.",
        size,
        env=("TGI_PREFIX_CACHE_BYTES",),
    )
    packed_weights_bytes: int = setting(
        PERFORMANCE,
        16 << 30,
        "Bytes of all files of packed weights for the CPU kernels, which the next start reads; 0: none are written.",
        size_or_0,
        env=("TGI_PACKED_WEIGHTS_BYTES",),
    )
    step_target: float = setting(
        PERFORMANCE,
        0.2,
        "Target duration in seconds of a step that others wait for; limits prefill chunks.",
        seconds,
        env=("TGI_STEP_TARGET",),
    )
    disable_custom_kernels: bool = setting(
        PERFORMANCE,
        False,
        "Compute with torch only, without this server's kernels, on CPU or CUDA.",
        boolean,
    )
    batch_invariant: bool = setting(
        PERFORMANCE,
        False,
        "On a GPU: the bits of a result do not depend on the other requests of its steps, as they never do on our own "
        "CPU kernels. Costs some speed.",
        boolean,
    )
    cpu: str | None = setting(
        PERFORMANCE,
        None,
        "Limits the instruction set, as if the processor had no better one.",
        text,
        env=("TGI_CPU",),
        choices=("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon"),
        unset="the best that the processor has",
    )
    sharded: str | None = setting(
        PERFORMANCE,
        None,
        "Divide the model among all visible devices (tensor parallelism).",
        text,
        choices=("true", "false"),
        unset="true if several devices are visible",
    )
    num_shard: int | None = setting(
        PERFORMANCE,
        None,
        "Number of devices, or on CPU of processes, among which the model is divided (tensor parallelism).",
        integer,
        also=("SM_NUM_GPUS",),
        unset="the visible devices",
    )

    replicas: int = setting(
        PERFORMANCE,
        1,
        "Schedulers with a worker each, every one with --num-shard devices of its own; tokenizers choose among them.",
        count,
        env=("TGI_REPLICAS",),
    )

    # Quantization
    quantize: str | None = setting(
        QUANTIZATION,
        None,
        "int8, int4 (also by the names eetq, bitsandbytes…) and, on a GPU with 8-bit floats, fp8 quantize at load; the "
        "others name the format of a pre-quantized checkpoint.",
        text,
        also=("HF_MODEL_QUANTIZE",),
        choices=QUANTIZATIONS,
        unset="weights as they are stored",
    )
    kv_cache_dtype: str | None = setting(
        QUANTIZATION,
        None,
        "Type of the KV cache: an 8-bit float on a GPU, bfloat16 or int8 on CPU; fewer bits hold more tokens.",
        text,
        choices=(*GPU_KV_CACHE_DTYPES, *CPU_KV_CACHE_DTYPES),
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
        "Let clients load adapters from directories of this host, and unload them, while the server runs. On several "
        "hosts both front ends and tokenizers need it.",
        boolean,
        env=("TGI_ALLOW_ADAPTER_UPDATES",),
    )

    # Speculation
    speculate: int | None = setting(
        SPECULATION,
        None,
        f"Maximum of draft tokens per request and step, up to {MAX_SPECULATED_TOKENS}.",
        integer,
        unset=f"{DEFAULT_SPECULATED_TOKENS} with a draft model, else 0",
    )
    draft_model_id: str | None = setting(
        SPECULATION,
        None,
        "Draft model with the same vocabulary: Hub id, local directory or .gguf file; the same of an EAGLE-3 head for "
        "the model; or mtp: the model's own layer for multi-token prediction. Without it, n-grams of the request are "
        "drafted.",
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
        OPERATIONS, 90.0, "Seconds that requests in flight have to finish after SIGTERM.", seconds, short="-g"
    )
    start_timeout: float = setting(
        OPERATIONS, 600.0, "Seconds that a process may take to start.", seconds, env=("TGI_START_TIMEOUT",)
    )
    hang_timeout: float = setting(
        OPERATIONS,
        120.0,
        "Upper bound of the seconds without progress after which a process is restarted.",
        seconds,
        env=("TGI_HANG_TIMEOUT",),
    )
    stall_limit: float = setting(
        OPERATIONS,
        60.0,
        "Upper bound of the seconds that a step may take until /health fails.",
        seconds,
        env=("TGI_STALL_LIMIT",),
    )
    journal: str | None = setting(
        OPERATIONS,
        None,
        "Directory for journals of the scheduler's inputs, for `tgi replay`.",
        text,
        env=("TGI_JOURNAL",),
        unset="none is written",
    )
    journal_size: int = setting(
        OPERATIONS,
        1024,
        "Size of all journals in MiB; the oldest files are removed.",
        count,
        env=("TGI_JOURNAL_SIZE",),
    )
    worker: str = setting(
        OPERATIONS,
        "torch",
        "torch; remote: none is started here, one connects from another host (--listen); scripted: a fake worker "
        "with scripted tokens and no model.",
        text,
        env=("TGI_WORKER",),
        choices=("torch", "remote", "scripted"),
        hidden=True,
    )
    scripted_step_us: int = setting(
        OPERATIONS,
        0,
        "Microseconds per step of the scripted worker.",
        integer,
        env=("TGI_SCRIPTED_STEP_US",),
        hidden=True,
    )
    scripted_answers: str | None = setting(
        OPERATIONS,
        None,
        "A JSON file with answers of the scripted worker: a list of pairs of token ids that occur in a prompt in this "
        "order, and the ids of its answer. The first pair that fits a prompt counts.",
        text,
        env=("TGI_SCRIPTED_ANSWERS",),
        hidden=True,
        unset="tokens without meaning",
    )

    # Hosts
    listen: str | None = setting(
        HOSTS,
        None,
        "tcp://ADDRESS:PORT at which the scheduler also accepts workers and tokenizers of other hosts; with --replicas "
        "the further schedulers listen at the next ports. Needs --keys.",
        tcp_address,
        env=("TGI_LISTEN",),
        unset="this host only",
    )
    tokenizer_listen: str | None = setting(
        HOSTS,
        None,
        "tcp://ADDRESS:PORT at which the first tokenizer also accepts front ends of other hosts; further tokenizers "
        "listen at the next ports. Needs --keys.",
        tcp_address,
        env=("TGI_TOKENIZER_LISTEN",),
        unset="this host only",
    )
    connect: tuple[str, ...] = setting(
        HOSTS,
        (),
        "tcp://HOST:PORT on other hosts: for tgi worker that of its scheduler, for tgi tokenizer those of schedulers, "
        "for tgi api those of tokenizers. A list with commas, ranges of ports (tcp://HOST:3100-3103) and names of "
        "several addresses. Needs --keys.",
        tcp_addresses,
        env=("TGI_CONNECT",),
        unset="the processes in the run directory",
    )
    keys: str | None = setting(
        HOSTS,
        None,
        "Key file from tgi keys new: scheduler.key with --listen, tokenizer.key for tokenizers, host.key for workers, "
        "api.key for front ends; or the directory that contains those that are needed.",
        text,
        env=("TGI_KEYS",),
        unset="none",
    )

    group: str | None = setting(
        HOSTS,
        None,
        "For tgi worker with ranks on several hosts: tcp://HOST:PORT at which rank 0 listens and to which the others "
        "connect. The same for all ranks. Needs --num-shard and --keys.",
        tcp_address,
        env=("TGI_GROUP",),
        unset="all ranks on this host",
    )
    rank: int = setting(
        HOSTS,
        0,
        "For tgi worker with --group: the rank that runs here, from 0 to --num-shard - 1.",
        integer,
        env=("TGI_RANK",),
    )

    ray: str | None = setting(
        HOSTS,
        None,
        "For tgi up: HOST:PORT of a Ray cluster on whose devices the workers run; auto: the cluster of this host.",
        ray_address,
        env=("TGI_RAY",),
        unset="workers run on this host",
    )
    ray_cpus: int = setting(
        HOSTS,
        1,
        "Cores that Ray reserves for each rank that computes on CPU, which is also the number of its threads.",
        count,
        env=("TGI_RAY_CPUS",),
    )

    # Compatibility
    kserve: bool = setting(COMPATIBILITY, False, "Serve KServe's v2 routes too.", boolean, env=("TGI_KSERVE",))
    aip_predict_route: str | None = setting(
        COMPATIBILITY, None, "Path of Vertex AI's prediction route.", text, unset="none"
    )
    aip_health_route: str | None = setting(COMPATIBILITY, None, "Path of Vertex AI's health route.", text, unset="none")
    compute_type: str | None = setting(
        COMPATIBILITY, None, "Value of the header x-compute-type.", text, unset="number and kind of the GPUs"
    )
    docker_label: str | None = setting(COMPATIBILITY, None, "docker_label of /info.", text, unset="none")
    git_sha: str | None = setting(COMPATIBILITY, None, "sha of /info.", text, env=("VERGEN_GIT_SHA",), unset="none")
    max_input_length: int | None = setting(
        COMPATIBILITY, None, "Old name of --max-input-tokens.", count, unset="none", hidden=True
    )
    ngrok: bool = setting(COMPATIBILITY, False, "Not supported: rejected.", boolean, hidden=True)
    ngrok_authtoken: str | None = setting(
        COMPATIBILITY, None, "For --ngrok.", text, secret=True, unset="none", hidden=True
    )
    ngrok_edge: str | None = setting(COMPATIBILITY, None, "For --ngrok.", text, unset="none", hidden=True)
    attention: str | None = setting(
        COMPATIBILITY,
        None,
        "Attention kernels.",
        text,
        choices=("paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"),
        ignored=KERNEL,
        unset="determined by the device",
    )
    use_flash_attention: bool = setting(COMPATIBILITY, True, "Attention kernels.", boolean, ignored=KERNEL)
    prefill_chunking: bool = setting(COMPATIBILITY, True, "Compute prompts in chunks.", boolean, ignored=CHUNKED)
    max_waiting_tokens: int = setting(
        COMPATIBILITY, 20, "Tokens decoded before waiting requests are admitted.", integer, ignored=CHUNKED
    )
    waiting_served_ratio: float = setting(
        COMPATIBILITY,
        0.3,
        "Ratio of waiting to running requests at which a prefill pauses decoding.",
        number,
        ignored=CHUNKED,
    )
    enable_prefill_logprobs: bool = setting(
        COMPATIBILITY,
        False,
        "Compute logprobs of prompts.",
        boolean,
        also=("REQUEST_LOGPROBS",),
        ignored="computed for requests that ask for them",
    )
    shard_uds_path: str | None = setting(
        COMPATIBILITY,
        None,
        "Socket of the shards.",
        text,
        ignored="sockets are in the run directory (TGI_RUN)",
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

    # Derived at start, not options
    run_dir: Path = field(default=Path("."))
    served_name: str | None = None  # of one of several models
    pipeline: int = 0  # counts the models that `tgi reload` has started
    replica_index: int = 0  # of a scheduler or worker: its place among the replicas of its pipeline
    given_api_keys: tuple[str, ...] = ()  # api_key without those of api_key_file
    model_dir: Path = field(default=Path("."))  # the resolved model_id
    model_sha: str | None = None  # its commit, if it came from the Hub
    model_source: str = ""  # its origin, as text
    model_pipeline_tag: str | None = None
    sees_images: bool = False  # media processes run
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # resolved from `generation_config`
    draft_model_dir: Path | None = None  # the resolved draft_model_id
    adapters: tuple[tuple[str, str], ...] = ()  # (name, directory) of each of lora_adapters

    @property
    def draft_quantize(self) -> str | None:
        """--quantize for the draft model: what is made at load; formats of checkpoints are for the served model."""
        return self.quantize if self.quantize in QUANTIZED_AT_LOAD else None

    @property
    def needs_weights(self) -> bool:
        """Whether a worker reads the weights of the model's files."""
        return self.load_format != "dummy"

    def to_json(self) -> str:
        """Serializes the settings for the environment of a child process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The inverse of to_json."""
        values: dict[str, Any] = json.loads(text)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        paths = ("run_dir", "model_dir", "draft_model_dir")
        values |= {name: Path(values[name]) for name in paths if values.get(name) is not None}
        values["sampling_defaults"] = SamplingDefaults(*values["sampling_defaults"])
        values["adapters"] = tuple((name, directory) for name, directory in values["adapters"])
        return cls(**values)


OPTIONS: dict[str, SettingOption] = {
    item.name: item.metadata[OPTION] for item in fields(Settings) if OPTION in item.metadata
}

DEFAULTS = Settings()

# The settings that `tgi reload` can change: those of the model, which return to their defaults if they are not given,
# and limits, which stay as they are.
RELOADED_MODEL = (
    "model_id", "revision", "dtype", "load_format", "tokenizer_config_path", "tool_call_parser", "reasoning_parser",
    "generation_config", "weights_cache_override", "rope_scaling", "rope_factor", "quantize", "kv_cache_dtype",
    "lora_adapters", "speculate", "draft_model_id", "draft_model_revision",
)  # fmt: skip
# The settings of a worker that a `tgi worker` on another host is given.
WORKER_GROUPS = (MODEL, LIMITS, PERFORMANCE, QUANTIZATION, ADAPTERS, SPECULATION)
WORKER_OPERATIONS = (
    "json_output",
    "log_level",
    "start_timeout",
    "hang_timeout",
    "worker",
    "scripted_step_us",
    "scripted_answers",
)
NOT_OF_WORKERS = ("sharded", "num_shard", "replicas")  # what they say is said by the number of the commands
RELOADED_LIMITS = (
    "max_input_tokens", "max_total_tokens", "max_batch_size", "max_batch_prefill_tokens", "max_batch_total_tokens",
    "memory_fraction", "cuda_memory_fraction",
)  # fmt: skip
