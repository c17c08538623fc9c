"""Every setting of the program, once: its flag, environment names, type, default and meaning. Read in one place."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import Any

from tgi.kernel import rundir
from tgi.kernel.errors import UserError

# Marks settings that are worked out while starting.
DERIVED = "derived"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _option(
    default: Any,
    help: str,
    *,
    env: tuple[str, ...] = (),
    parse: Callable[[str], Any] = str,
    choices: tuple[str, ...] = (),
    short: str = "",
    repeat: bool = False,
    ignored: str = "",
) -> Any:
    """One setting. `env` are the environment names read when the flag is absent, besides the flag's own name in upper
    case where that is TGI's; `ignored` says why a setting is accepted and has no effect."""
    meta = {
        "help": help,
        "env": env,
        "parse": parse,
        "choices": choices,
        "short": short,
        "repeat": repeat,
        "ignored": ignored,
    }
    return field(default=default, metadata=meta)


def boolean(text: str) -> bool:
    """An environment variable's truth value. Raises ValueError on anything that is not one."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return value


@dataclass(frozen=True)
class Settings:
    """What `tgi up` and every role run with. Names are TGI's flag names; None means "measured" or "not set"."""

    # The model
    model_id: str | None = _option(
        None, "Hub id, local directory or .gguf file. Without it: the demo model.", env=("HF_MODEL_ID",)
    )
    revision: str | None = _option(None, "Branch, tag or commit on the Hub.", env=("HF_MODEL_REVISION",))
    dtype: str = _option("auto", "Type of weights and activations; auto takes the model's own.", choices=DTYPES)
    device: str = _option("auto", "Where the model runs.", env=("TGI_DEVICE",), choices=("auto", "cpu", "cuda"))
    huggingface_hub_cache: str | None = _option(None, "Where Hub models are kept.")
    cuda_memory_fraction: float = _option(1.0, "Share of the GPU's memory that may be used.", parse=float)
    memory_fraction: float = _option(
        0.9, "Share of the memory that is left after loading that the KV cache may take on CUDA.",
        env=("TGI_WIGGLE_ROOM",), parse=float,
    )  # fmt: skip

    # Limits
    max_concurrent_requests: int = _option(128, "Requests at once; more get a 429.", parse=int)
    max_best_of: int = _option(2, "Largest best_of.", parse=int)
    max_stop_sequences: int = _option(4, "Stop strings per request.", parse=int)
    max_top_n_tokens: int = _option(5, "Largest top_n_tokens.", parse=int)
    max_input_tokens: int | None = _option(None, "Longest prompt; default max_total_tokens - 1.", parse=int)
    max_input_length: int | None = _option(None, "Old name of --max-input-tokens.", parse=int)
    max_total_tokens: int | None = _option(None, "Longest prompt + generation; default: what fits.", parse=int)
    max_batch_prefill_tokens: int | None = _option(None, "Tokens computed in one step.", parse=int)
    max_batch_total_tokens: int | None = _option(None, "Size of the KV cache in tokens.", parse=int)
    max_batch_size: int | None = _option(None, "Requests that run at once.", parse=int)
    max_client_batch_size: int = _option(4, "Prompts in one /v1/completions call.", parse=int)
    max_waiting_tokens: int = _option(20, "Accepted for compatibility.", parse=int, ignored="prefill is chunked")
    waiting_served_ratio: float = _option(0.3, "Accepted for compatibility.", parse=float, ignored="prefill is chunked")
    payload_limit: int = _option(2_000_000, "Largest request body in bytes.", parse=int)

    # The front end
    hostname: str = _option("0.0.0.0", "Address to listen on.", env=("TGI_HOSTNAME",))
    port: int = _option(3000, "Port to listen on.", parse=int, short="-p")
    api_workers: int = _option(1, "Front end processes on the port.", env=("TGI_API_WORKERS",), parse=int)
    validation_workers: int = _option(2, "Tokenizer processes.", parse=int)
    api_key: tuple[str, ...] = _option((), "Bearer key that clients must send. Repeatable.", repeat=True)
    cors_allow_origin: tuple[str, ...] = _option((), "Origins that browsers may call from. Repeatable.", repeat=True)
    compute_type: str = _option("gpu+optimized", "What the header x-compute-type says.")
    reuse_port: bool = _option(
        False, "Let front ends that are started alone share the port (SO_REUSEPORT).", env=("TGI_REUSE_PORT",),
        parse=boolean,
    )  # fmt: skip

    # The scheduler
    prefix_caching: bool = _option(
        True, "Share the KV pages of equal prefixes.", env=("PREFIX_CACHING",), parse=boolean
    )
    step_target: float = _option(
        0.2, "Seconds that a step may take while others wait for their next token.", env=("TGI_STEP_TARGET",),
        parse=_seconds,
    )  # fmt: skip
    stall_limit: float = _option(
        60.0, "Seconds without a finished step, with work in flight, after which /health fails.",
        env=("TGI_STALL_LIMIT",), parse=_seconds,
    )  # fmt: skip

    # The worker
    worker: str = _option(
        "torch", "The real worker, or a scripted one without a model.", env=("TGI_WORKER",),
        choices=("torch", "scripted"),
    )  # fmt: skip
    scripted_step_us: int = _option(
        0, "Microseconds that a step of the scripted worker takes.", env=("TGI_SCRIPTED_STEP_US",), parse=int
    )
    watermark_gamma: float = _option(0.5, "Share of green tokens.", parse=float)
    watermark_delta: float = _option(2.0, "Bias of green tokens.", parse=float)

    # Running it
    graceful_termination_timeout: float = _option(
        90.0, "Seconds that requests in flight may take after SIGTERM.", parse=_seconds, short="-g"
    )
    start_timeout: float = _option(
        600.0, "Seconds that a process may take to start.", env=("TGI_START_TIMEOUT",), parse=_seconds
    )
    hang_timeout: float = _option(
        120.0, "Seconds without a sign of life after which a process is replaced.", env=("TGI_HANG_TIMEOUT",),
        parse=_seconds,
    )  # fmt: skip
    json_output: bool = _option(False, "Log in JSON, one object per line.", parse=boolean)
    log_level: str = _option("info", "debug, info, warn or error.", env=("LOG_LEVEL",))

    # Derived while starting, never given by the user
    run_dir: Path = field(default=Path("."), metadata={DERIVED: True})
    model_dir: Path = field(default=Path("."), metadata={DERIVED: True})  # the resolved model_id

    def __post_init__(self) -> None:
        """Argument errors with TGI's texts."""

        def must(condition: bool, text: str) -> None:
            if not condition:
                raise UserError(f"Invalid argument: {text}")

        must(
            self.max_input_tokens is None or self.max_input_length is None or self.model_dir != Path("."),
            "Both `max_input_tokens` and `max_input_length` are set. "
            "Please define only `max_input_tokens` as `max_input_length is deprecated for naming consistency.`",
        )
        if self.max_input_length is not None:
            object.__setattr__(self, "max_input_tokens", self.max_input_length)
        if self.max_input_tokens is not None and self.max_total_tokens is not None:
            must(self.max_input_tokens < self.max_total_tokens, "`max_input_tokens` must be < `max_total_tokens`")
        if self.max_total_tokens is not None and self.max_batch_total_tokens is not None:
            must(
                self.max_total_tokens <= self.max_batch_total_tokens,
                f"`max_total_tokens` must be <= `max_batch_total_tokens`. "
                f"Given: {self.max_total_tokens} and {self.max_batch_total_tokens}",
            )
        for name in (
            "validation_workers", "api_workers", "max_concurrent_requests", "max_input_tokens", "max_total_tokens",
            "max_batch_prefill_tokens", "max_batch_total_tokens", "max_batch_size", "max_best_of", "payload_limit",
            "max_client_batch_size",
        ):  # fmt: skip
            value = getattr(self, name)
            must(value is None or value > 0, f"`{name}` must be > 0")
        for name in (
            "graceful_termination_timeout", "start_timeout", "hang_timeout", "step_target", "stall_limit",
        ):  # fmt: skip
            value = getattr(self, name)
            must(0 < value < inf, f"`{name}` must be a number of seconds above 0. Given: {value}")
        must(0 <= self.port < 65536, f"`port` must be a port number. Given: {self.port}")
        try:
            ip_address(self.hostname)
        except ValueError:
            must(False, f"`hostname` must be an IP address. Given: {self.hostname}")

    def to_json(self) -> str:
        """For a child process's environment."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The settings that a supervisor passed on."""
        values = json.loads(text)
        for name in ("api_key", "cors_allow_origin"):
            values[name] = tuple(values[name])
        values["max_input_length"] = None
        return cls(**values | {"run_dir": Path(values["run_dir"]), "model_dir": Path(values["model_dir"])})


def environment_names(name: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The environment variables of a setting, in the order in which they count."""
    # HOSTNAME is set by every container; names that are ours alone carry the prefix that `env` gives them.
    own = () if name == "hostname" or any(env.startswith("TGI_") for env in metadata["env"]) else (name.upper(),)
    return own + tuple(metadata["env"])


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from command line flags (those that were given), then the environment, then defaults.

    Raises UserError for a value that does not parse.
    """
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        meta = setting.metadata
        if DERIVED in meta:
            continue
        if flags.get(setting.name) not in (None, ()):
            values[setting.name] = flags[setting.name]
            continue
        for variable in environment_names(setting.name, meta):
            # honcho gives each of its processes a PORT of its own.
            if variable == "PORT" and "HONCHO_PROCESS_NAME" in environ:
                continue
            if environ.get(variable):
                values[setting.name] = _parse(variable, environ[variable], meta)
                break
        else:
            assert setting.default is not MISSING
            values[setting.name] = setting.default
    return Settings(**values, run_dir=rundir.default(values["port"]))


def _parse(variable: str, text: str, meta: Mapping[str, Any]) -> Any:
    if meta["repeat"]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        value = meta["parse"](text)
    except ValueError as error:
        raise UserError(f"The environment variable {variable} cannot be used: {error}", code=2) from error
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(
            f"The environment variable {variable} is {text!r}; expected one of {', '.join(meta['choices'])}", 2
        )
    return value
