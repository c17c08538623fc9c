"""Settings: names of TGI's launcher, precedence of sources, and error messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.loading import (
    count_visible_devices,
    ineffective_flags,
    load_served_models,
    load_settings,
    non_default_settings,
    replica_devices,
    to_environment,
    worker_settings,
)
from tgi.microkernel.settings.lora_adapters import named_adapters
from tgi.microkernel.settings.options import HIDDEN, resolve_value, tcp_address, tcp_addresses
from tgi.microkernel.settings.table import DEFAULTS, OPTIONS, Settings

# TGI's names without a flag, and those that are read for a flag: variable, text, setting, value.
# fmt: off
VARIABLES = [
    ("HF_MODEL_ID", "a/b", "model_id", "a/b"),
    ("HF_MODEL_REVISION", "v1", "revision", "v1"),
    ("HF_MODEL_TRUST_REMOTE_CODE", "true", "trust_remote_code", True),
    ("SM_NUM_GPUS", "1", "num_shard", 1),
    ("PAYLOAD_LIMIT", "3MiB", "payload_limit", 3 << 20),
    ("TGI_PREFIX_CACHE_BYTES", "2 gb", "prefix_cache_bytes", 2_000_000_000),
    ("AIP_HTTP_PORT", "8080", "port", 8080),
    ("AIP_PREDICT_ROUTE", "/predict", "aip_predict_route", "/predict"),
    ("AIP_HEALTH_ROUTE", "/alive", "aip_health_route", "/alive"),
    ("DOCKER_LABEL", "sha-1", "docker_label", "sha-1"),
    ("VERGEN_GIT_SHA", "abc", "git_sha", "abc"),
    ("REQUEST_LOGPROBS", "1", "enable_prefill_logprobs", True),
    ("PREFIX_CACHING", "0", "prefix_caching", False),
    ("PREFILL_CHUNKING", "0", "prefill_chunking", False),
    ("USE_FLASH_ATTENTION", "False", "use_flash_attention", False),
    ("ATTENTION", "flashinfer", "attention", "flashinfer"),
    ("TGI_WIGGLE_ROOM", "0.8", "memory_fraction", 0.8),
    ("CUDA_MEMORY_FRACTION", "0.5", "cuda_memory_fraction", 0.5),
    ("COMPUTE_TYPE", "cpu", "compute_type", "cpu"),
    ("LOG_LEVEL", "warn", "log_level", "warn"),
    ("LOG_COLORIZE", "1", "log_colorize", True),
    ("MAX_IMAGE_FETCH_SIZE", "9", "max_image_fetch_size", 9),
    ("WEIGHTS_CACHE_OVERRIDE", "/w", "weights_cache_override", "/w"),
    ("TGI_HOSTNAME", "127.0.0.1", "hostname", "127.0.0.1"),
    ("TGI_HOSTNAME", "localhost", "hostname", "127.0.0.1"),
    ("TGI_KSERVE", "true", "kserve", True),
    ("CUDA_GRAPHS", "1,2, 4", "cuda_graphs", (1, 2, 4)),
    ("CORS_ALLOW_ORIGIN", "http://a, http://b", "cors_allow_origin", ("http://a", "http://b")),
    ("API_KEY", "one, two", "api_key", ("one, two",)),
    ("API_KEY", "one\ntwo\n", "api_key", ("one", "two")),
    ("JSON_OUTPUT", "TRUE", "json_output", True),
]
REFUSED = [
    ({"max_input_tokens": 10, "max_total_tokens": 10}, "`max_input_tokens`(10) must be < `max_total_tokens`(10)"),
    ({"max_input_length": 10, "max_total_tokens": 9}, "`max_input_tokens`(10) must be < `max_total_tokens`(9)"),
    ({"max_input_tokens": 1, "max_input_length": 2},
     "Both `max_input_tokens` (1) and `max_input_length` (2) are set. Please define only `max_input_tokens` as "),
    ({"max_total_tokens": 10, "max_batch_total_tokens": 9},
     "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 10 and 9"),
    ({"max_total_tokens": 1}, "`max_total_tokens` must be >= 2"),
    ({"validation_workers": 0}, "`validation_workers` must be > 0"),
    ({"max_top_n_tokens": 1025}, "`max_top_n_tokens` must be <= 1024. Given: 1025"),
    ({"sharded": "true", "num_shard": 1}, "`sharded` is true but `num_shard` <= 1"),
    ({"num_shard": 0}, "`num_shard` cannot be < 1"),
    ({"prefix_cache_dir": "d", "prefix_caching": False}, "`prefix_cache_dir` is set, but `prefix_caching` is off"),
    ({"prefix_cache_dir": "d", "replicas": 2}, "`prefix_cache_dir` is for one worker of one rank"),
    ({"prefix_cache_dir": "d", "num_shard": 2}, "`prefix_cache_dir` is for one worker of one rank"),
    ({"num_shard": 2, "quantize": "exl2"}, "Sharding is currently not supported with `exl2` quantization"),
    ({"ngrok": True}, "`ngrok-authtoken` must be set when using ngrok tunneling"),
    ({"ngrok": True, "ngrok_authtoken": "t"}, "`ngrok-edge` must be set when using ngrok tunneling"),
    ({"ngrok": True, "ngrok_authtoken": "t", "ngrok_edge": "e"}, "ngrok tunnels are not supported"),
    ({"lora_adapters": "a, b=c=d"}, "Invalid LoRA adapter format: b=c=d"),
    ({"lora_adapters": "a@b@c"}, "Invalid LoRA adapter format: a@b@c"),
    ({"lora_adapters": "a,"}, "Invalid LoRA adapter format: an empty name. Give ID, "),
    ({"lora_adapters": "a= @c"}, "Invalid LoRA adapter format: a= @c"),
    ({"lora_adapters": "tgi=/lora"}, "A LoRA adapter cannot be called tgi"),
    ({"lora_adapters": "a=b,c,a@d"}, "Two LoRA adapters are called a"),
    ({"quantize": "exl2"}, "not supported"),
    ({"device": "mps"}, "`device` is mps, but the worker has no attention over a paged KV cache for Apple's GPU"),
    ({"speculate": 17}, r"`speculate` must be <= 16. Given: 17"),
    ({"speculate": 0, "draft_model_id": "small"}, "the draft model would draft nothing"),
    ({"draft_model_revision": "main"}, "no `draft_model_id` is given"),
    ({"rope_scaling": "dynamic"}, "Use --rope-scaling linear"),
    ({"rope_factor": 0.5}, "`rope_factor` must be >= 1"),
    ({"aip_health_route": "health"}, "`aip_health_route` must begin with a slash"),
    ({"api_key_file": "/nowhere/keys"}, "`api_key_file` /nowhere/keys cannot be read"),
    ({"model_ttl": 5.0, "model_id": "m"}, "`model_ttl` is for models with a name. Name it: --model-id NAME=m"),
    ({"models": ("a=x",), "model_id": "m"}, "Name this one as well: --model-id NAME=m"),
    ({"models": ("a=x", "a=y")}, "two models a"),
    ({"models": ("a=x",), "ray": "auto"}, "`ray` and several models exclude each other"),
    ({"models": ("/nowhere.toml",)}, "'/nowhere.toml' is neither NAME=SOURCE nor a file that can be read"),
    ({"models": tuple(f"m{number}=x" for number in range(65))}, "65 models; a server has at most 64"),
]
# The content of a file of models, and what is said about it.
REFUSED_MODELS = [
    ("model-id = 'x'", "must consist of a table for each model"),
    ("[a", "is not TOML"),
    ("['a b']\nmodel-id = 'x'", "the name 'a b'"),
    ("[a]", "a: `model-id` is missing"),
    ("[a]\nmodel-id = 'x'\nport = 1", "a: `port` is no setting of one model"),
    ("[a]\nmodel-id = 'x'\nttl = -1", "a: '-1' is not a number of seconds"),
    ("[a]\nmodel-id = 'x'\nload = 'later'", "a: `load` is 'later'. It must be one of start, first-use"),
    ("[a]\nmodel-id = 'x'\nquantize = 'int3'", "a: 'int3' is not one of"),
    ("[a]\nmodel-id = 'x'\nspeculate = 17", "`speculate` must be <= 16"),
]
UNREADABLE = [
    ("MAX_BATCH_SIZE", "many", "'many' is not a whole number"),
    ("MAX_BATCH_SIZE", "-1", "'-1' is not above 0"),
    ("MAX_STOP_SEQUENCES", "-1", "'-1' is below 0"),
    ("MAX_CONCURRENT_REQUESTS", "0", "'0' is not above 0"),
    ("PAYLOAD_LIMIT", "2 iB", "'2 iB' is not a number of bytes, such as 2000000, 2GB or 512MiB"),
    ("TGI_PREFIX_CACHE_BYTES", "0GB", "'0' is not above 0"),
    ("DTYPE", "int3", "'int3' is not one of auto, float32"),
    ("SHARDED", "maybe", "'maybe' is not one of true, false"),
    ("TRUST_REMOTE_CODE", "perhaps", "'perhaps' is neither true nor false"),
    ("TGI_HOSTNAME", "not a host", "'not a host' is neither an IP address, such as 127.0.0.1, nor a name"),
    ("TGI_HOSTNAME", "a..b", "'a..b' is neither an IP address"),
    ("PORT", "tcp://10.0.0.1:80", "is not a whole number"),
    ("PORT", "70000", "'70000' is not a port number: they go from 0 to 65535"),
    ("PORT", "-1", "'-1' is not a port number"),
    ("GRACEFUL_TERMINATION_TIMEOUT", "inf", "'inf' is not a number"),
    ("TGI_START_TIMEOUT", "0", "'0' is not a number of seconds above 0 and at most 1000000000"),
    ("TGI_STEP_TARGET", "nan", "'nan' is not a number"),
    ("TGI_WIGGLE_ROOM", "1.5", "'1.5' is not above 0 and at most 1"),
    ("CUDA_GRAPHS", "1,two", "'two' is not a whole number; give numbers above 0 with commas between them"),
    ("CUDA_GRAPHS", "-1", "'-1' is not above 0"),
    ("CUDA_GRAPHS", "4,0", "'0' is not above 0; give numbers above 0 with commas between them, or 0 alone for none"),
    ("OTLP_ENDPOINT", "http://collector", "'http://collector' is not an address of a collector"),
    ("OTLP_ENDPOINT", "grpc://collector:4317", "is not an address of a collector, such as http://127.0.0.1:4317"),
    ("OTLP_ENDPOINT", "http://collector:4318/v1/traces", "is not an address of a collector"),
    ("OTLP_ENDPOINT", "collector:70000", "is not an address of a collector"),
    ("WATERMARK_GAMMA", "1", "'1' is not above 0 and below 1"),
    ("WATERMARK_DELTA", "inf", "'inf' is not a number"),
]
# fmt: on


def test_settings_of_a_worker_on_another_host_travel_as_variables() -> None:
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "cuda_graphs": (1, 2),
        "lora_adapters": "a=/a,b",
        "prefix_caching": False,
    }
    server = replace(DEFAULTS, port=1, api_key=("secret",), replicas=2, worker="scripted", cpu="avx2", **given)
    connect: dict[str, Any] = {"connect": ("tcp://192.0.2.1:1", "tcp://192.0.2.2:2"), "keys": "k", "num_shard": 1}
    variables = to_environment(worker_settings(server, connect))
    read = load_settings({}, variables)
    assert read == replace(DEFAULTS, run_dir=read.run_dir, worker="scripted", cpu="avx2", **given, **connect)
    assert "secret" not in " ".join(variables.values())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://collector:4317/", "http://collector:4317"),
        ("HTTPS://collector", "https://collector"),
        ("collector:4317", "http://collector:4317"),
        ("[::1]:4317", "http://[::1]:4317"),
    ],
)
def test_forms_of_otlp_endpoint(text: str, address: str) -> None:
    assert load_settings({}, {"OTLP_ENDPOINT": text}).otlp_endpoint == address


def test_flag_overrides_environment_overrides_default() -> None:
    assert load_settings({}, {}) == Settings(run_dir=load_settings({}, {}).run_dir)
    assert load_settings({}, {"MAX_INPUT_TOKENS": "7"}).max_input_tokens == 7
    assert load_settings({"max_input_tokens": 9}, {"MAX_INPUT_TOKENS": "7"}).max_input_tokens == 9
    assert load_settings({"prefix_caching": True}, {"PREFIX_CACHING": "0"}).prefix_caching


@pytest.mark.parametrize(("variable", "text", "name", "value"), VARIABLES)
def test_variables_of_tgi(variable: str, text: str, name: str, value: Any) -> None:
    assert getattr(load_settings({}, {variable: text}), name) == value


def test_hub_variables_have_lower_precedence() -> None:
    assert load_settings({}, {"HF_MODEL_ID": "a/b", "MODEL_ID": "c/d"}).model_id == "c/d"
    assert load_settings({}, {"MAX_INPUT_LENGTH": "7"}).max_input_tokens == 7
    assert load_settings({"port": 1}, {"AIP_HTTP_PORT": "8080", "PORT": "2"}).port == 8080


def test_forms_of_lora_adapters() -> None:
    text = "owner/a, owner/b@v1 , c=/lora/c,d = /lora/d@main"
    assert load_settings({}, {"LORA_ADAPTERS": text}).lora_adapters == text
    assert named_adapters(text) == [
        ("owner/a", None, None),
        ("owner/b", None, "v1"),
        ("c", "/lora/c", None),
        ("d", "/lora/d", "main"),
    ]
    assert named_adapters(None) == []


def test_hostname_and_honcho_port_are_ignored() -> None:
    assert load_settings({}, {"HOSTNAME": "3f2a"}).hostname == "0.0.0.0"
    assert load_settings({}, {"ENV": "production"}).env is False
    assert load_settings({}, {"PORT": "80"}).port == 80
    assert load_settings({}, {"PORT": "5000", "HONCHO_PROCESS_NAME": "api.1"}).port == 3000


def test_empty_variable_counts_as_not_set_except_api_key() -> None:
    assert load_settings({}, {"REVISION": "", "PORT": " ", "JSON_OUTPUT": ""}) == load_settings({}, {})
    with pytest.raises(UserError, match="API_KEY is empty"):
        load_settings({}, {"API_KEY": ""})
    assert load_settings({"api_key": ("k",)}, {"API_KEY": ""}).api_key == ("k",)


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_contradictory_or_unsupported_settings_are_rejected(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="Invalid argument: ") as caught:
        load_settings(flags, {})
    assert said in str(caught.value)


@pytest.mark.parametrize(("content", "said"), REFUSED_MODELS)
def test_a_file_of_models_that_cannot_be_used(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(content)
    with pytest.raises(UserError, match="Invalid argument: ") as caught:
        load_settings({"models": (str(tmp_path / "models.toml"),)}, {})
    assert said in str(caught.value)


def test_models_have_settings_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        "[b]\nmodel-id = 'x'\nttl = 0\nload = 'first-use'\nmax-total-tokens = 9\nlora-adapters = ['y=1', 'z=2']"
    )
    settings = load_settings({"models": ("a=/m=1", str(file)), "model_ttl": 5.0, "dtype": "bfloat16"}, {})
    a, b = load_served_models(settings)
    assert (a.name, a.settings.model_id, a.ttl, a.at_start) == ("a", "/m=1", 5.0, True)
    assert (b.ttl, b.at_start, b.settings.max_total_tokens, b.settings.lora_adapters) == (None, False, 9, "y=1,z=2")
    assert {one.settings.dtype for one in (a, b)} == {"bfloat16"}
    assert load_served_models(load_settings({}, {})) == []


@pytest.mark.parametrize(("variable", "text", "said"), UNREADABLE)
def test_invalid_variable_is_named(variable: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"The environment variable {variable} cannot be used") as caught:
        load_settings({}, {variable: text})
    assert said in str(caught.value)


def test_neutral_values_of_unsupported_settings_are_accepted() -> None:
    load_settings({"sharded": "false", "num_shard": 1, "speculate": 0, "rope_scaling": "linear"}, {})


def test_sharded_counts_devices() -> None:
    for environ, said in [({}, "only found 0"), ({"CUDA_VISIBLE_DEVICES": "3"}, "only found 1 CUDA devices")]:
        with pytest.raises(UserError, match="not enough cuda devices: `sharded` is true but") as caught:
            load_settings({"sharded": "true"}, environ)
        assert said in str(caught.value)
    assert load_settings({"sharded": "true"}, {"NVIDIA_VISIBLE_DEVICES": "0,1"}).num_shard == 2
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert load_settings({}, two).num_shard == 2
    assert load_settings({"num_shard": 3}, two).num_shard == 3
    for one in ({"sharded": "false"}, {"num_shard": 1}, {"device": "cpu"}, {"worker": "scripted"}):
        assert load_settings(one, two).num_shard in (None, 1)
    assert load_settings({}, {}).num_shard is None


def test_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert count_visible_devices({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "0,1"}) == 1
    assert count_visible_devices({"ZE_AFFINITY_MASK": "0,1,2"}) == 3
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_visible_devices({"NVIDIA_VISIBLE_DEVICES": "all"}) == 0
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    program.chmod(0o755)
    assert count_visible_devices({"NVIDIA_VISIBLE_DEVICES": "all"}) == 2


def test_api_keys_from_flags_variables_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\n three \n")
    assert load_settings({"api_key": ("one",)}, {"TGI_API_KEY_FILE": str(file)}).api_key == ("one", "two", "three")
    file.write_bytes("\ufeffone\r\n\r\ntwo\r\n".encode())  # as editors of Windows write it
    assert load_settings({"api_key_file": str(file)}, {}).api_key == ("one", "two")
    for empty in ("\n \n", "\ufeff"):
        file.write_text(empty)
        with pytest.raises(UserError, match="holds no key"):
            load_settings({"api_key_file": str(file)}, {})


def test_non_default_settings_hide_secrets() -> None:
    given = {"api_key": ("sesame",), "ngrok_authtoken": "sesame", "model_id": "m", "max_best_of": DEFAULTS.max_best_of}
    assert non_default_settings(load_settings(given, {})) == {
        "model_id": "m",
        "api_key": HIDDEN,
        "ngrok_authtoken": HIDDEN,
    }
    assert non_default_settings(Settings()) == {}


def test_ineffective_flags() -> None:
    assert ineffective_flags(Settings()) == {}
    asked = Settings(max_waiting_tokens=3, master_addr="10.0.0.1", max_best_of=3)
    assert ineffective_flags(asked) == {
        "--max-waiting-tokens": OPTIONS["max_waiting_tokens"].ignored,
        "--master-addr": "there is one shard",
    }


def test_settings_json_round_trip() -> None:
    given = {"api_key": ("k",), "max_input_length": 5, "port": 1234, "cuda_graphs": (1, 2), "log_colorize": False}
    settings = replace(load_settings(given, {}), adapters=(("a", "/lora/a"), ("b", "/lora/b")))
    assert Settings.from_json(settings.to_json()) == settings
    drafting = replace(settings, draft_model_dir=Path("/models/small"))
    assert Settings.from_json(drafting.to_json()) == drafting


def test_default_of_speculate_with_a_draft_model() -> None:
    assert load_settings({}, {}).speculate is None
    assert load_settings({"draft_model_id": "small"}, {}).speculate == 4
    assert load_settings({"draft_model_id": "small", "speculate": 2}, {}).speculate == 2


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_are_valid_values(name: str) -> None:
    default, option = getattr(DEFAULTS, name), OPTIONS[name]
    if default in (None, ()):
        return
    for variable in option.over + option.variables(name):
        assert resolve_value(name, option, None, None, {variable: str(default)}) == default


@pytest.mark.parametrize(
    ("changes", "environ", "devices"),
    [
        ({"replicas": 1}, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({"replicas": 2}, {"CUDA_VISIBLE_DEVICES": "4,5"}, "4"),
        ({"replicas": 2, "replica_index": 1}, {"NVIDIA_VISIBLE_DEVICES": "4,5"}, "5"),
        ({"replicas": 2, "replica_index": 1, "num_shard": 2}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2,3"),
        ({"replicas": 2, "replica_index": 1, "device": "cpu"}, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"replicas": 2, "replica_index": 1, "worker": "scripted"}, {"CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_each_replica_has_devices_of_its_own(
    changes: dict[str, Any], environ: dict[str, str], devices: str | None
) -> None:
    assert replica_devices(replace(Settings(), **changes), environ) == devices


def test_replicas_need_enough_devices() -> None:
    with pytest.raises(UserError, match="2 replicas with 1 devices each need more than the 1 visible devices"):
        replica_devices(replace(Settings(), replicas=2, replica_index=1), {"CUDA_VISIBLE_DEVICES": "0"})
    two = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert load_settings({"replicas": 2}, two).num_shard == 2


def test_each_replica_listens_at_a_port_of_its_own() -> None:
    given: dict[str, Any] = {"replicas": 3, "worker": "remote", "keys": "x"}
    load_settings(given | {"listen": "tcp://0.0.0.0:65533"}, {})
    with pytest.raises(UserError, match="would listen at port 65536"):
        load_settings(given | {"listen": "tcp://0.0.0.0:65534"}, {})


def test_each_tokenizer_listens_at_a_port_of_its_own() -> None:
    given: dict[str, Any] = {"validation_workers": 2, "keys": "x"}
    load_settings(given | {"tokenizer_listen": "tcp://0.0.0.0:65534"}, {})
    with pytest.raises(UserError, match="the last tokenizer would listen at port 65536"):
        load_settings(given | {"tokenizer_listen": "tcp://0.0.0.0:65535"}, {})
    with pytest.raises(UserError, match="`tokenizer_listen` is set without `keys`"):
        load_settings({"tokenizer_listen": "tcp://0.0.0.0:1"}, {})


def test_addresses_of_other_hosts() -> None:
    environ = {
        "TGI_CONNECT": "tcp://10.0.0.1:3100-3102, tcp://[2001:db8::1]:65535,tcp://name.example:7",
        "TGI_KEYS": "x",
    }
    assert load_settings({}, environ).connect == (
        "tcp://10.0.0.1:3100", "tcp://10.0.0.1:3101", "tcp://10.0.0.1:3102", "tcp://[2001:db8::1]:65535",
        "tcp://name.example:7",
    )  # fmt: skip
    wrong = (
        "",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:1-",
        "tcp://a:2-1",
        "tcp://a:1-300",
        "tcp://a:65535-65536",
        "tcp://a:1,",
    )
    hosts = ("tcp://a b:1", "tcp://*:1", "tcp://::1:1", "tcp://[:::::]:1", "tcp://[1.2.3.4]:1", "tcp://a?b:1")
    for text in (*wrong, "ipc://a:1", *hosts):
        for parse in (tcp_address, tcp_addresses):
            with pytest.raises(ValueError, match="is not an address"):
                parse(text)
    with pytest.raises(UserError, match="`connect` is set without `keys`"):
        load_settings({}, {"TGI_CONNECT": "tcp://a:1"})
