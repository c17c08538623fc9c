"""The command line: flags of TGI's launcher on all commands that run roles, help, and error messages."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tgi import __version__
from tgi.cli import COMMANDS_OF_OTHERS, FLAGS_OF_OTHERS, SECTIONS, main, settings_options
from tgi.launcher import main as launcher
from tgi.microkernel.settings.options import flag
from tgi.microkernel.settings.table import DEFAULTS, GROUPS, OPTIONS, Settings
from tgi.server import MEDIA_PACKAGES, WORKER_PACKAGES

ROOT = Path(__file__).parent.parent

# All flags of TGI 3.3.6's launcher: (setting, values, expected value).
# fmt: off
FLAGS: list[tuple[str, list[str], Any]] = [
    ("--model-id", ["a/b"], "a/b"), ("--revision", ["v1"], "v1"), ("--validation-workers", ["3"], 3),
    ("--sharded", ["false"], "false"), ("--num-shard", ["1"], 1), ("--quantize", ["awq"], "awq"),
    ("--quantize", ["bitsandbytes-nf4"], "bitsandbytes-nf4"), ("--speculate", ["0"], 0),
    ("--dtype", ["float16"], "float16"), ("--dtype", ["bfloat16"], "bfloat16"),
    ("--kv-cache-dtype", ["fp8_e4m3fn"], "fp8_e4m3fn"), ("--trust-remote-code", [], True),
    ("--max-concurrent-requests", ["5"], 5), ("--max-best-of", ["3"], 3), ("--max-stop-sequences", ["0"], 0),
    ("--max-top-n-tokens", ["6"], 6), ("--max-input-tokens", ["10"], 10), ("--max-input-length", ["10"], 10),
    ("--max-total-tokens", ["11"], 11), ("--waiting-served-ratio", ["1.2"], 1.2),
    ("--max-batch-prefill-tokens", ["4096"], 4096), ("--max-batch-total-tokens", ["8192"], 8192),
    ("--max-waiting-tokens", ["0"], 0), ("--max-batch-size", ["8"], 8), ("--cuda-graphs", ["1,2,4"], (1, 2, 4)),
    ("--cuda-graphs", ["0"], (0,)), ("--hostname", ["::"], "::"), ("--port", ["80"], 80), ("-p", ["80"], 80),
    ("--prometheus-port", ["9000"], 9000), ("--shard-uds-path", ["/tmp/s"], "/tmp/s"),
    ("--master-addr", ["h"], "h"), ("--master-port", ["1"], 1), ("--huggingface-hub-cache", ["/d"], "/d"),
    ("--weights-cache-override", ["/w"], "/w"), ("--disable-custom-kernels", [], True),
    ("--cuda-memory-fraction", ["0.5"], 0.5), ("--rope-scaling", ["linear"], "linear"), ("--rope-factor", ["2"], 2.0),
    ("--json-output", [], True), ("--otlp-endpoint", ["http://o:1"], "http://o:1"),
    ("--otlp-service-name", ["n"], "n"),
    ("--cors-allow-origin", ["a", "--cors-allow-origin", "b"], ("a", "b")), ("--api-key", ["k"], ("k",)),
    ("--api-key", ["k", "--api-key", "l,m"], ("k", "l,m")), ("--watermark-gamma", ["0.4"], 0.4),
    ("--watermark-delta", ["1.5"], 1.5), ("--ngrok", [], True), ("--ngrok-authtoken", ["t"], "t"),
    ("--ngrok-edge", ["e"], "e"), ("--tokenizer-config-path", ["t.json"], "t.json"),
    ("--disable-grammar-support", [], True), ("--env", [], True), ("-e", [], True),
    ("--max-client-batch-size", ["9"], 9), ("--lora-adapters", ["a,b"], "a,b"),
    ("--usage-stats", ["no-stack"], "no-stack"),
    ("--payload-limit", ["1000"], 1000), ("--enable-prefill-logprobs", [], True),
    ("--graceful-termination-timeout", ["5"], 5.0), ("-g", ["5"], 5.0), ("--max-image-fetch-size", ["7"], 7),
    ("--api-key-file", ["f"], "f"), ("--kserve", [], True), ("--allowed-image-hosts", ["h"], ("h",)),
]
MISTAKES = [
    (["--nonsense"], 2, "No such option"),
    (["--model-idd", "x"], 2, "Did you mean one of: '--draft-model-id', '--model-id', '--models'?"),
    (["--model-id"], 2, "requires an argument"),
    (["--model-id", ""], 2, "it is empty"),
    (["--api-key", " "], 2, "it is empty"),
    (["--dtype", "int3"], 2, "'int3' is not one of auto, float32, bfloat16, float16"),
    (["--quantize", "gptqq"], 2, "'gptqq' is not one of int8"),
    (["--ray", "local"], 2, "'local' is not an address such as 192.0.2.1:6379, nor auto"),
    (["--ray", ""], 2, "'' is not an address such as 192.0.2.1:6379, nor auto"),
    (["--ray", "ray://192.0.2.1:10001"], 2, "is not an address such as 192.0.2.1:6379, nor auto"),
    (["--ray", "192.0.2.1"], 2, "'192.0.2.1' is not an address such as 192.0.2.1:6379, nor auto"),
    (["--port", "70000"], 2, "'70000' is not a port number"),
    (["--port", ""], 2, "'' is not a whole number"),
    (["--num-shard", "-1"], 2, "'-1' is below 0"),
    (["--cuda-graphs", "0,4"], 2, "'0' is not above 0; give numbers above 0 with commas between them, or 0 alone"),
    (["--otlp-endpoint", "foo"], 2, "'foo' is not an address of a collector, such as http://127.0.0.1:4317"),
    (["--usage-stats", "maybe"], 2, "'maybe' is not one of on, off, no-stack"),
    (["--json-output", "true"], 2, "unexpected extra argument"),
    (["--log-level", "loud"], 2, "Unknown log level 'loud'"),
    (["--max-input-tokens", "10", "--max-total-tokens", "10"], 1, "`max_input_tokens`(10) must be <"),
    (["--sharded", "true", "--num-shard", "1"], 1, "`sharded` is true but `num_shard` <= 1"),
]
# fmt: on


@pytest.mark.parametrize(("name", "values", "expected"), FLAGS, ids=lambda item: str(item))
def test_flag_of_tgi_is_accepted(name: str, values: list[str], expected: Any) -> None:
    taken: dict[str, Any] = {}

    @click.command()
    @settings_options
    def command(**flags: Any) -> None:
        taken.update({key: value for key, value in flags.items() if value not in (None, ())})

    result = CliRunner().invoke(command, [name, *values])
    assert result.exit_code == 0, result.output
    assert list(taken.values()) == [expected]


def helped(command: str, flag: str, columns: int) -> str:
    arguments = [flag] if command == "launcher" else [command, flag]
    result = CliRunner().invoke(launcher if command == "launcher" else main, arguments, terminal_width=columns)
    assert result.exit_code == 0
    return result.output


def shown_flags(text: str) -> set[str]:
    """The flags at the beginnings of lines."""
    return {
        name for line in text.splitlines() if re.match(r"  -", line) for name in re.findall(r"--[a-z-]+", line[:60])
    }


@pytest.mark.parametrize("command", ["up", "api", "tokenizer", "scheduler", "worker", "launcher"])
def test_every_setting_is_an_option_of_every_role(command: str) -> None:
    everything = helped(command, "--help-all", 110)
    assert {flag(name) for name in OPTIONS} <= shown_flags(everything)
    for name, option in OPTIONS.items():
        assert all(variable in everything for variable in option.over + option.variables(name))
        assert option.short in everything
    assert "--run-dir" not in everything
    usual = shown_flags(helped(command, "--help", 110))
    for name, option in OPTIONS.items():
        assert (flag(name) in usual) is not bool(option.hidden or option.ignored)


@pytest.mark.parametrize("columns", [80, 110])
@pytest.mark.parametrize("request_for", ["--help", "--help-all"])
def test_help_is_grouped_and_fits_the_terminal(request_for: str, columns: int) -> None:
    lines = helped("up", request_for, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert [line[:-1] for line in lines if re.fullmatch(r"[A-Z][a-z]+:", line)] == [*GROUPS, "Help"]


def test_every_setting_has_a_group_and_a_described_default() -> None:
    order = [GROUPS.index(option.group) for option in OPTIONS.values()]
    assert order == sorted(order), "settings stand in the order of their groups"
    for name, option in OPTIONS.items():
        default = getattr(DEFAULTS, name)
        assert option.default(default), name
        assert not (option.unset and default not in (None, ())), f"{name} has a default, and words for none"
        assert "default" not in option.help.split(), f"{name} says its default twice"


def test_every_command_has_a_section() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(main.commands)
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert [title for title in re.findall(r"^(.+):$", shown, re.MULTILINE) if title != "Options"] == list(SECTIONS)


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=lambda item: str(item))
def test_mistake_is_reported_in_one_message(arguments: list[str], code: int, message: str) -> None:
    for command in (launcher, main):
        result = CliRunner().invoke(command, arguments if command is launcher else ["up", *arguments])
        assert message in result.output
        assert "Traceback" not in result.output
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer-config-path", "/nowhere"], "/nowhere is no file"),
        (["--weights-cache-override", "/nowhere"], "/nowhere is not a directory"),
        (["--model-id", "/nowhere"], "'/nowhere' does not exist"),
        (
            ["--hostname", "192.0.2.1"],
            "Give --hostname an address of this machine",
        ),  # TEST-NET-1, assigned to no interface
    ],
)
def test_missing_resource_is_reported_in_one_message(
    arguments: list[str], message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tgi.launcher", "--hostname", "127.0.0.1", "--port", "0"]
    command += ["--model-id", str(tiny_llama), *arguments]
    done = subprocess.run(command, env=os.environ | {"TGI_RUN": str(tmp_path)}, capture_output=True, text=True)
    assert message in done.stderr.splitlines()[-1]
    assert [line for line in done.stderr.splitlines() if "INFO" in line or "Traceback" in line] == []
    assert done.returncode == 1


def test_the_model_may_be_an_argument_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("tgi.server.run_server", lambda settings, roles: served.append(settings))
    for arguments in (["owner/tiny", "--port", "1"], ["--port", "1", "--model-id", "owner/tiny"]):
        assert CliRunner().invoke(main, ["up", *arguments], env={"MODEL_ID": "another/one"}).exit_code == 0
        assert served.pop().model_id == "owner/tiny"
    for arguments, message in (
        (["a", "--model-id", "b"], "Two models are named: a and --model-id b."),
        (["a", "b"], "unexpected extra argument (b)"),
        (["--json-output", "true"], "unexpected extra argument (true): a flag that is on or off takes no value."),
        ([""], "it is empty"),
    ):
        result = CliRunner().invoke(main, ["up", *arguments])
        assert (result.exit_code, message in result.output) == (2, True), result.output
    assert served == []


@pytest.mark.parametrize("name", COMMANDS_OF_OTHERS)
def test_commands_of_other_servers_are_named_here(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--port", "1"])
    assert result.exit_code == 2
    assert f"No such command {name!r}. Here it is " in result.output
    assert name not in main.commands
    (command,) = re.findall(r"`tgi (?!--)(\S+)`", result.output) or ["up"]
    assert command in main.commands


@pytest.mark.parametrize("name", FLAGS_OF_OTHERS)
def test_flags_of_other_servers_are_named_here(name: str) -> None:
    assert name not in {flag(own) for own in OPTIONS}
    for command, arguments in ((main, ["up", name, "2"]), (launcher, [f"{name}=2"])):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 2
        assert f"No such option {name!r}. Here it is {flag(FLAGS_OF_OTHERS[name])}." in result.output


def test_ps_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGI_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["ps"])
    assert (result.stdout, result.stderr, result.exit_code) == ("", "You have no running tgi server.\n", 0)
    assert json.loads(CliRunner().invoke(main, ["ps", "--json"]).stdout) == []


def test_top_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGI_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["top", "--once"])
    assert (result.stdout, result.exit_code) == ("You have no running tgi server.\n", 0)
    assert json.loads(CliRunner().invoke(main, ["top", "--json"]).stdout) == []
    result = CliRunner().invoke(main, ["top"])
    assert (result.stdout, result.exit_code) == ("", 2)
    assert result.stderr == "Error: `tgi top` needs a terminal. Print one frame with --once, or --json.\n"


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130), (b"", 128 + signal.SIGTERM)])
def test_top_ends_and_restores_the_terminal(key: bytes, code: int, tmp_path: Path) -> None:
    """By q, Ctrl-C and SIGTERM; and while it is stopped by Ctrl-Z."""
    environment = os.environ | {"TGI_RUN": str(tmp_path / "run"), "XDG_RUNTIME_DIR": str(tmp_path), "TERM": "xterm"}
    outer, inner = os.openpty()
    before = termios.tcgetattr(inner)
    command = [sys.executable, "-m", "tgi", "top", "--seconds", "60"]

    def take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if a shell has started the test run in the background
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that the terminal turns its key into SIGINT

    process = subprocess.Popen(
        command, env=environment, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        preexec_fn=take_terminal,
    )  # fmt: skip
    shown = b""
    while b"no running tgi server" not in shown:
        shown += os.read(outer, 4096)
    assert termios.tcgetattr(inner)[3] & termios.ICANON == 0
    os.write(outer, b"\x1a")  # Ctrl-Z
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    assert termios.tcgetattr(inner) == before
    process.send_signal(signal.SIGCONT)
    while termios.tcgetattr(inner) == before:
        time.sleep(0.01)
    os.write(outer, b"x")  # another key shows the next frame
    if key:
        os.write(outer, key)
    else:
        process.terminate()
    assert process.wait(60) == code
    assert termios.tcgetattr(inner) == before
    while not shown.endswith(b"\x1b[?25h\x1b[?1049l"):
        shown += os.read(outer, 4096)
    os.close(outer)
    os.close(inner)


def test_launcher_has_tgi_s_name() -> None:
    result = CliRunner().invoke(launcher, ["--version"])
    assert (result.exit_code, result.output) == (0, f"text-generation-launcher {__version__}\n")


@pytest.mark.parametrize("command", ["tgi", "text-generation-launcher"])
@pytest.mark.parametrize("module", ["click", "tgi.microkernel.settings.table", "tgi.server", ""])
def test_ctrl_c_during_imports_is_silent(command: str, module: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry, _, function = scripts[command].partition(":")
    arguments = ["--version"] if module != "tgi.server" else ["up"] if command == "tgi" else []
    script = f"""
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes may ignore SIGINT

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.argv = [{command!r}, *{arguments!r}]
from {entry} import {function}
sys.exit({function}())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    if module:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(command)
        assert done.stdout.endswith(f" {__version__}\n")


def test_help_imports_no_heavy_modules() -> None:
    script = (
        "import sys, tgi.cli, tgi.launcher; "
        "print([name for name in ('zmq', 'torch', 'falcon', 'huggingface_hub', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_worker_packages_match_the_requirements() -> None:
    lines = (ROOT / "requirements" / "worker.txt").read_text().splitlines()
    packages = {line.partition(">")[0].replace("pillow", "PIL") for line in lines if not line.startswith("#")}
    assert packages == {*WORKER_PACKAGES, *MEDIA_PACKAGES}


def test_flags_and_variables_are_unique() -> None:
    shorts = [option.short for option in OPTIONS.values() if option.short]
    variables = [name for key, option in OPTIONS.items() for name in option.over + option.variables(key)]
    assert len(set(shorts)) == len(shorts)
    assert len(set(variables)) == len(variables)
    derived = {"run_dir", "model_dir", "model_sha", "model_source", "model_pipeline_tag", "sampling_defaults"}
    derived |= {
        "draft_model_dir",
        "adapters",
        "given_api_keys",
        "pipeline",
        "replica_index",
        "sees_images",
        "served_name",
    }
    assert set(OPTIONS) | derived == set(vars(Settings()))


def test_watermark_command(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("Some words that nobody has marked, and some more of them.")
    runner = CliRunner()
    told = runner.invoke(main, ["watermark", str(file), "--model-id", str(tiny_llama), "--gamma", "0.3"])
    assert told.exit_code == 0, told.output
    assert "No watermark was found of this model with gamma 0.3 on cpu (z must be above 4)." in told.stdout
    piped = runner.invoke(main, ["watermark", "--json", "--model-id", str(tiny_llama)], input=file.read_text())
    assert json.loads(piped.stdout)["marked"] is False
    for arguments, text, said in (
        (["--gamma", "1"], "a", "--gamma is 1; it must be above 0 and below 1"),
        ([], "", "this text has none. Give a longer text."),
        (["--gamma", "0.000001"], "Hello", "none of"),
    ):
        refused = runner.invoke(main, ["watermark", "--model-id", str(tiny_llama), *arguments], input=text)
        assert refused.exit_code == 1
        assert said in refused.output


def test_download_weights_prints_the_directory(tiny_llama: Path) -> None:
    arguments = [str(tiny_llama), "--extension", ".safetensors", "--no-auto-convert", "--logger-level", "ERROR"]
    result = CliRunner().invoke(main, ["download-weights", *arguments, "--json-output"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tiny_llama}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--merge-lora"], "--merge-lora is not supported"),
        (["--extension", ".bin"], "the extension .bin are not read"),
        (["--logger-level", "loud"], "Unknown log level 'loud'"),
    ],
)
def test_download_weights_rejects_unsupported_options(tiny_llama: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["download-weights", str(tiny_llama), *arguments])
    assert result.exit_code != 0
    assert said in result.output


def test_download_weights_rejects_pickled_weights_with_advice(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    result = CliRunner().invoke(main, ["download-weights", str(tmp_path)])
    assert result.exit_code == 1
    assert "Only safetensors are served. Convert them" in result.output
