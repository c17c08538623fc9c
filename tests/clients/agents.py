"""Agent programs, unmodified, against a real server: a prompt in, a call of a tool out, a file written.

    scripts/check-agents [NAME...] [--log DIRECTORY]

Each program is installed from npm or PyPI at a pinned version and runs in a home and a folder of its own. Behind the
server is the fake worker with scripted answers: reasoning, a call of the program's own tool that writes a file, then a
sentence. A proxy records what the program sends. The result is a table, that of docs/agents.md.

Not a test: the programs take minutes to install and 2.6 GB.
"""

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from tokenizers import AddedToken, Tokenizer

from tests.clients.environments import ROOT, agent_program, pinned, python_program
from tests.live.server import Server
from tests.models import demo_model

PROMPT = "Write the word Hello to the file hello.txt."
CONTENT = "Hello from the agent\n"
FINAL = "The file is written."
KEY = "the-key"
TIMEOUT_SECONDS = 180
CONTEXT = 1 << 18

# Tokens of the template by which the scripted worker recognises a prompt.
TOOLS, RESULT, THINKING = "<|tools|>", "<|result|>", "<|thinking|>"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
<|tools|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Calls: <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<|result|>{{ message.content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<|thinking|>{% else %}<think>

</think>

{% endif %}{% endif %}"""


class Program(NamedTuple):
    """An agent program. Texts are templates for str.replace: @URL@, @KEY@, @HOME@, @FOLDER@ and @FILE@."""

    name: str
    package: str
    version: str
    protocol: str
    command: Sequence[str]  # behind the prompt's place, "@PROMPT@"
    calls: Sequence[tuple[str, Mapping[str, Any]]]  # tools and arguments, one after the other; the last writes the file
    text: str = FINAL  # the answer to prompts without tools
    files: Mapping[str, str] = {}  # in its home
    environment: Mapping[str, str] = {}
    python: str = ""  # its environment, if it is from PyPI


PROGRAMS = (
    Program(
        "Codex", "@openai/codex", "0.171.0", "Responses",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "@PROMPT@"),
        [("multi_agent_v1.close_agent", {"target": "x"}), ("exec_command", {"cmd": "printf '@CONTENT@' > hello.txt"})],
        files={".codex/config.toml": """\
model = "local"
model_provider = "tgi"
web_search = "disabled"

[model_providers.tgi]
name = "tgi"
base_url = "@URL@/v1"
wire_api = "responses"
env_key = "TGI_KEY"
"""},
        environment={"TGI_KEY": "@KEY@"},
    ),
    Program(
        "Claude Code", "@anthropic-ai/claude-code", "2.1.332", "Messages",
        ("claude", "-p", "@PROMPT@", "--permission-mode", "acceptEdits"),
        [
            ("ToolSearch", {"query": "select:WebFetch,NotebookEdit"}),
            ("Write", {"file_path": "@FILE@", "content": "@CONTENT@"}),
        ],
        environment={
            "ANTHROPIC_BASE_URL": "@URL@", "ANTHROPIC_AUTH_TOKEN": "@KEY@", "ANTHROPIC_MODEL": "local",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "local", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT // 2),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Program(
        "OpenCode", "opencode-ai", "1.18.33", "Chat Completions",
        ("opencode", "run", "-m", "tgi/local", "@PROMPT@"),
        [("write", {"filePath": "@FILE@", "content": "@CONTENT@"})],
        files={".config/opencode/opencode.json": json.dumps({
            "provider": {"tgi": {
                "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "@URL@/v1", "apiKey": "@KEY@"},
                "models": {"local": {}},
            }},
        })},
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    Program(
        "Qwen Code", "@qwen-code/qwen-code", "0.24.4", "Chat Completions",
        ("qwen", "--yolo", "-p", "@PROMPT@"),
        [("write_file", {"file_path": "@FILE@", "content": "@CONTENT@"})],
        environment={"OPENAI_BASE_URL": "@URL@/v1", "OPENAI_API_KEY": "@KEY@", "OPENAI_MODEL": "local"},
    ),
    Program(
        "Continue", "@continuedev/cli", "1.5.47", "Chat Completions",
        ("cn", "--config", "@HOME@/config.yaml", "--auto", "-p", "@PROMPT@"),
        [("Write", {"filepath": "@FILE@", "content": "@CONTENT@"})],
        files={"config.yaml": """\
name: tgi
version: 1.0.0
schema: v1
models:
  - {name: local, provider: openai, model: local, apiBase: "@URL@/v1", apiKey: "@KEY@", capabilities: [tool_use]}
"""},
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    Program(
        "Cline", "cline", "3.0.65", "Chat Completions",
        ("cline", "@PROMPT@"),
        [("editor", {"path": "@FILE@", "new_text": "@CONTENT@"})],
        files={".cline/data/settings/providers.json": json.dumps({
            "version": 1, "lastUsedProvider": "openai-compatible", "modes": {},
            "providers": {"openai-compatible": {
                "settings": {
                    "provider": "openai-compatible", "apiKey": "@KEY@", "model": "local", "baseUrl": "@URL@/v1",
                },
                "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual",
            }},
        })},
    ),
    Program(
        "pi", "@mariozechner/pi-coding-agent", "0.73.1", "Chat Completions",
        ("pi", "--provider", "tgi", "--model", "local", "-p", "@PROMPT@"),
        [("write", {"path": "@FILE@", "content": "@CONTENT@"})],
        files={".pi/agent/models.json": json.dumps({
            "providers": {"tgi": {
                "baseUrl": "@URL@/v1", "api": "openai-completions", "apiKey": "@KEY@", "models": [{"id": "local"}],
            }},
        })},
    ),
    Program(
        "aider", *pinned("aider"), "Chat Completions",
        ("sh", "-ec", """\
git init -q && echo Goodbye > hello.txt && git add . && git -c user.name=a -c user.email=a commit -qm First
aider --model openai/local --edit-format diff --no-show-model-warnings --no-check-update --analytics-disable \\
    --yes-always --message "$1" hello.txt
git show --stat --format= | grep -q hello.txt  # it commits what it has changed
""", "sh", "@PROMPT@"),
        (),
        text=f"{FINAL}\n\nhello.txt\n```\n<<<<<<< SEARCH\nGoodbye\n=======\n{CONTENT}>>>>>>> REPLACE\n```\n",
        environment={
            "OPENAI_API_BASE": "@URL@/v1", "OPENAI_API_KEY": "@KEY@", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        python="aider",
    ),
    Program(
        "LiteLLM's proxy", *pinned("litellm-proxy"), "all three, whole and streamed",
        ("python", "-P", str(ROOT / "tests/clients/through_litellm.py"), "@HOME@/config.yaml", "@PROMPT@", "@FILE@"),
        [("write", {"content": "@CONTENT@"})],
        files={"config.yaml": """\
model_list:
  - model_name: local
    litellm_params: {model: openai/local, api_base: "@URL@/v1", api_key: "@KEY@"}
"""},
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(32)}"},
        python="litellm-proxy",
    ),
)  # fmt: skip


# --- the model --------------------------------------------------------------------------------------------------------


def make_model(directory: Path) -> Tokenizer:
    """A model directory with the demo model's vocabulary and no weights."""
    source = demo_model()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (TOOLS, RESULT, THINKING)])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, more in (
        ("config.json", {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "model_max_length": CONTEXT}),
    ):
        given = json.loads((source / name).read_text()) | more
        given.pop("quantization_config", None)
        (directory / name).write_text(json.dumps(given))
    return tokenizer


def scripted_answers(
    tokenizer: Tokenizer, calls: Sequence[tuple[str, Mapping[str, Any]]], text: str
) -> list[tuple[list[int], list[int]]]:
    """The calls one after the other where a prompt has tools, then a sentence, or the text where it has none; reasoning
    before all where it is on."""

    def ids(*texts: str) -> list[int]:
        return tokenizer.encode("".join(texts), add_special_tokens=False).ids  # type: ignore[no-any-return]

    thoughts = "<think>\nA tool writes files.\n</think>\n\n"
    rules: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for done in range(len(calls), -1, -1):  # the results that a prompt has
        answer, after = FINAL, (TOOLS, *[RESULT] * done)
        if done < len(calls):
            name, arguments = calls[done]
            answer = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        rules += [((*after, THINKING), (thoughts, answer)), (after, (answer,))]
    rules += [((THINKING,), (thoughts, text)), ((), (text,))]
    return [(ids(*after), ids(*answer, "<|im_end|>")) for after, answer in rules]


# --- what a program sends ---------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """A request and the answer to it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    answer: bytes


class Recorder(ThreadingHTTPServer):
    """A proxy on loopback that records what passes it."""

    daemon_threads = True

    def __init__(self, server: Server) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.target = server.port
        self.exchanges: list[Exchange] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Recorder"]:
        """Records until the block ends."""
        thread = threading.Thread(target=self.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class RecordingHandler(BaseHTTPRequestHandler):
    """Passes each request on, and its answer back as it comes."""

    server: Recorder

    def handle_any(self) -> None:
        """One request."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        passed = {name: value for name, value in headers.items() if name not in ("host", "connection")}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=TIMEOUT_SECONDS)
        connection.request(self.command, self.path, body or None, passed)
        answer = connection.getresponse()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        received = []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program has left
            while piece := answer.read1(1 << 16):
                received.append(piece)
                self.wfile.write(piece)
        connection.close()
        self.server.exchanges.append(
            Exchange(self.command, self.path, headers, body, answer.status, b"".join(received))
        )

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_OPTIONS = handle_any

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the exchanges are kept."""


# --- a program --------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How a program has fared."""

    program: Program
    fault: str  # "" if it has written the file and told the final sentence
    exchanges: list[Exchange]
    output: str


def check(program: Program, log: Path | None) -> Outcome:
    """Runs a program once against a server of its own."""
    if program.python:
        directories: tuple[Path, ...] = (python_program(program.python),)
    else:
        directories = agent_program(program.package, program.version)[::-1]
    with tempfile.TemporaryDirectory(prefix="tgi-agents-") as scratch:
        model, home, folder = (Path(scratch) / name for name in ("model", "home", "folder"))
        for each in (model, home, folder):
            each.mkdir()
        tokenizer = make_model(model)
        target = folder / "hello.txt"
        places = {"@FILE@": str(target), "@FOLDER@": str(folder), "@HOME@": str(home), "@KEY@": KEY, "@PROMPT@": PROMPT}

        def filled(text: str, **more: str) -> str:
            for place, value in (places | more).items():
                text = text.replace(place, value)
            return text

        given = json.dumps(program.calls)
        calls = json.loads(filled(given, **{"@CONTENT@": json.dumps(CONTENT)[1:-1]}))
        answers = Path(scratch) / "answers.json"
        answers.write_text(json.dumps(scripted_answers(tokenizer, calls, program.text)))
        flags = ("--model-id", str(model), "--load-format", "dummy", "--worker", "scripted",
                 "--scripted-answers", str(answers),
                 "--max-total-tokens", str(CONTEXT // 2), "--api-key", KEY, "--tool-call-parser", "hermes",
                 "--reasoning-parser", "qwen3", "--max-batch-prefill-tokens", "16384")  # fmt: skip
        with Server(Path(scratch) / "run", *flags) as server, Recorder(server).running() as recorder:
            server.start().wait_until_ready()
            places["@URL@"] = recorder.url
            for name, text in program.files.items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(filled(text))
            environment = {name: filled(value) for name, value in program.environment.items()}
            binaries = [*map(str, directories), os.environ["PATH"]]
            environment |= {"PATH": os.pathsep.join(binaries), "HOME": str(home), "TERM": "dumb", "NO_COLOR": "1"}
            fault = ""
            try:
                done = subprocess.run(
                    [filled(part) for part in program.command], cwd=folder, env=environment, timeout=TIMEOUT_SECONDS,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                output = done.stdout
                if done.returncode:
                    fault = f"ended with {done.returncode}"
            except subprocess.TimeoutExpired as late:
                output, fault = (late.output or b"").decode(), f"has not ended after {TIMEOUT_SECONDS} s"
            end_daemons(home)
            if not target.exists():
                fault = fault or "no file written"
            elif target.read_text().strip() != CONTENT.strip():
                fault = fault or f"the file says {target.read_text()[:80]!r}"
            if FINAL not in output:
                fault = fault or "the final sentence is missing"
            exchanges = recorder.exchanges
        if log is not None:
            write_log(log / (program.python or program.package.rsplit("/")[-1]), exchanges, output)
    return Outcome(program, fault, exchanges, output)


def end_daemons(home: Path) -> None:
    """Ends what a program has left running, which has its home: Cline's hub, for one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


def write_log(directory: Path, exchanges: Sequence[Exchange], output: str) -> None:
    """All that a program has sent and got, one file per request."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "output.txt").write_text(output)
    for number, exchange in enumerate(exchanges):
        head = [f"{exchange.method} {exchange.path}", *(f"{name}: {value}" for name, value in exchange.headers.items())]
        try:
            body = json.dumps(json.loads(exchange.body), indent=1)
        except ValueError:
            body = exchange.body.decode(errors="replace")
        text = "\n".join([*head, "", body, "", f"=> {exchange.status}", exchange.answer.decode(errors="replace")])
        (directory / f"{number:02}.txt").write_text(text)


def main() -> None:
    """Prints a row per program, and exits with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="of programs or their packages (all)")
    parser.add_argument("--log", type=Path, help="a directory for all that the programs send and get")
    arguments = parser.parse_args()
    wanted = [one for one in PROGRAMS if not arguments.names or {one.name, one.package} & {*arguments.names}]
    failed = False
    print("| program | package | protocol | requests | result |\n|---|---|---|---|---|", flush=True)
    for program in wanted:
        outcome = check(program, arguments.log)
        refused = [one for one in outcome.exchanges if one.status >= 400]
        told = outcome.fault or "writes the file"
        if refused:
            told += f"; {len(refused)} refused: " + "; ".join(
                f"{one.method} {one.path} {one.status} {one.answer[:200].decode(errors='replace')}"
                for one in refused[:3]
            )
        print(
            f"| {program.name} | `{program.package}` {program.version} | {program.protocol} | "
            f"{len(outcome.exchanges)} | {told} |",
            flush=True,
        )
        if outcome.fault:
            failed = True
            print(outcome.output[-2000:], file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
