"""Statements of the pages for users match the code: links, flags, start lines, rejected fields, numbers."""

import json
import re
import shlex
import string
from pathlib import Path

import pytest

from tests.test_cli import FLAGS
from tgi.api import errors, http_server, rejected_fields, request_parameters, sse
from tgi.api.shapes import openai
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.messages import MessagesRequest
from tgi.api.shapes.responses import ResponsesRequest
from tgi.api.validation import COMPLETION_RULES, OPENAI_RULES, RULES_AFTER_ADMISSION
from tgi.hub.llguidance_tables import LIMITS
from tgi.launcher import main
from tgi.microkernel.messages.protocol import MAX_TOP_TOKENS
from tgi.microkernel.observability import log
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.options import flag
from tgi.microkernel.settings.table import DEFAULT_SPECULATED_TOKENS, MAX_SPECULATED_TOKENS, OPTIONS
from tgi.tokenizer import chat_template
from tgi.tokenizer.structured_output import answer_grammar, grammar, json_schema, json_schema_lark

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
COMPATIBILITY, MIGRATING = PAGES["compatibility.md"], PAGES["migrating.md"]
OURS = {"--max-image-fetch-size", "--api-key-file", "--kserve", "--allowed-image-hosts"}  # flags that TGI does not have
LAUNCHER = {name for name, _, _ in FLAGS if name.startswith("--")} - OURS
# Flags of docker and lm-eval, the latter cut at the underscore of their names.
OTHERS_FLAGS = {"--gpus", "--shm-size", "--model", "--tasks", "--batch"}
VARIABLES = {variable for name, option in OPTIONS.items() for variable in option.over + option.variables(name)}
NOT_SERVED = " is not supported by this server"
# (page, text with a number from the code).
NUMBERS = [
    ("tools.md", f"| tools | {answer_grammar.MAX_TOOLS} |"),
    ("tools.md", f"| size of all tools | {grammar.MAX_GRAMMAR_BYTES} bytes as JSON |"),
    ("tools.md", f"| names in `properties`, all tools together | {answer_grammar.MAX_TOOL_PROPERTIES} |"),
    ("grammars.md", f"| size | {grammar.MAX_GRAMMAR_BYTES} bytes as JSON |"),
    ("grammars.md", f"more than {grammar.MAX_GRAMMAR_BYTES} bytes"),
    ("grammars.md", f"| nesting | {json_schema.MAX_DEPTH} schemas |"),
    ("grammars.md", f"| names in all `properties` | {json_schema.MAX_PROPERTIES} |"),
    ("grammars.md", f"| {json_schema.MAX_CLOSING_STEPS:,} names combined |"),
    ("grammars.md", f"| {grammar.MAX_EBNF_BYTES} bytes, {grammar.MAX_RULES} rules |"),
    ("grammars.md", f"the 64-bit range (±{json_schema.MAX_INTEGER})"),
    ("grammars.md", f"no exponent; {json_schema.DECIMALS} decimal places"),
    (
        "grammars.md",
        f"| {json_schema_lark.MAX_DIGITS} digits before the point, {json_schema_lark.MAX_DIGITS} after it",
    ),
    ("grammars.md", f"{LIMITS.initial_lexer_fuel:,} lexer steps and {LIMITS.max_grammar_size:,} symbols"),
    ("grammars.md", f"{LIMITS.step_lexer_fuel:,} lexer steps, {LIMITS.step_max_items:,} parser items"),
    ("grammars.md", f"| memory of one grammar | {LIMITS.max_lexer_states:,} lexer states"),
    ("grammars.md", f"texts of {grammar.TRIAL_TOKENS} tokens"),
    ("grammars.md", f"That is at most {grammar.TRIAL_COUNT * grammar.TRIAL_TOKENS} masks"),
    ("grammars.md", f"caches the results of the last {grammar.MAX_CACHED_GRAMMARS}."),
    (
        "compatibility.md",
        f"stopped at {chat_template.MAX_OUTPUT_CHARACTERS >> 20} MiB or {chat_template.MAX_RENDER_SECONDS:g} s",
    ),
    ("compatibility.md", f"up to {request_parameters.MAX_BIASES} tokens of the vocabulary"),
    ("compatibility.md", f"up to {openai.MAX_STOP_TOKEN_IDS} ids of the vocabulary"),
    ("compatibility.md", f"up to {openai.MAX_BAD_WORDS} words of {openai.MAX_BAD_WORD_CHARACTERS} characters in all"),
    ("compatibility.md", f"400 once {http_server.MAX_HEAD_BYTES >> 10} KiB have come"),
    ("compatibility.md", f"After {sse.KEEP_ALIVE_SECONDS:g} s without a token the stream opens"),
    ("compatibility.md", f"seconds until there should be room, 1 to {errors.MAX_RETRY_AFTER_SECONDS} |"),
    ("compatibility.md", f"at most {MAX_SPECULATED_TOKENS} a step"),
    ("compatibility.md", f"`--max-top-n-tokens` above {MAX_TOP_TOKENS} |"),
    ("compatibility.md", f"up to {rejected_fields.MAX_LOGGED} of them"),
    ("processes.md", f"between 1 and {errors.MAX_RETRY_AFTER_SECONDS} seconds"),
    ("processes.md", ", ".join(f"`{name}`" for name in WorkerFacts._fields)),
    ("processes.md", f"a message has at most {log.MAX_MESSAGE:,} characters, a field {log.MAX_FIELD:,}"),
    ("processes.md", f"all fields of a record {log.MAX_FIELDS:,}, a traceback {log.MAX_EXCEPTION:,}"),
    ("speculation.md", f"{DEFAULT_SPECULATED_TOKENS} tokens at a time, or --speculate"),
]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """The anchors of a page: its headings as GitHub renders them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    kept = string.ascii_lowercase + string.digits + "-_"
    return {"".join(c for c in heading.lower().replace(" ", "-") if c in kept) for heading in headings}


def named_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def row(page: str, begin: str) -> str:
    """The row of a table with this beginning."""
    (found,) = [line for line in page.splitlines() if line.startswith(f"| {begin}")]
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_have_targets(name: str) -> None:
    here = ROOT if name == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (here / path).resolve() if path else here / name
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", [COMPATIBILITY, MIGRATING], ids=["compatibility", "migrating"])
def test_named_flags_exist(page: str) -> None:
    assert named_flags(page) <= {flag(name) for name in OPTIONS} | OTHERS_FLAGS


def test_every_flag_of_tgi_is_in_the_tables() -> None:
    """Each flag of TGI's launcher is in one of the rows, flags without effect in theirs."""
    kept, silent, refused = (
        named_flags(row(MIGRATING, begin)) for begin in ("keep their meaning", "accepted, without", "refused, or only")
    )
    placed = kept | silent | refused | named_flags(row(MIGRATING, "do more"))
    assert placed >= LAUNCHER
    assert not kept & silent
    assert not refused & (kept | silent)
    ignored = LAUNCHER & {flag(name) for name, option in OPTIONS.items() if option.ignored}
    assert silent == ignored


def start_lines() -> list[str]:
    lines = [line for block in blocks(MIGRATING, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if "text-generation-launcher" in line and not line.startswith("docker")]


def test_start_lines_are_found() -> None:
    assert len(start_lines()) >= 4


@pytest.mark.parametrize("line", start_lines())
def test_start_line_is_accepted(line: str) -> None:
    words = shlex.split(line)
    at = words.index("text-generation-launcher")
    environ = dict(word.split("=", 1) for word in words[:at])
    settings = load_settings(main.make_context("launcher", words[at + 1 :]).params, environ)
    assert settings.model_id == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings.port == 8080


def test_variables_of_the_compose_file_exist() -> None:
    (service,) = blocks(MIGRATING, "yaml")
    named = set(re.findall(r"^ {6}([A-Z_]+):", service, re.MULTILINE))
    assert len(named) > 3
    assert named <= VARIABLES | {"HF_TOKEN"}


@pytest.mark.parametrize("source", blocks(MIGRATING, "python"))
def test_examples_are_valid_python(source: str) -> None:
    compile(source, "migrating.md", "exec")


def test_unsupported_features_are_listed_completely() -> None:
    texts = {
        rule.message
        for rule in (*RULES_AFTER_ADMISSION, *OPENAI_RULES, *COMPLETION_RULES)
        if NOT_SERVED in rule.message
    }
    texts.add(rejected_fields.REJECTION_TEXT.format(name="NAME"))
    section = COMPATIBILITY.partition("## Not served yet")[2]
    assert texts == {text for text in re.findall(r"`` (.+?) ``", section) if NOT_SERVED in text}


def refused(one: rejected_fields.RejectedFields) -> str:
    """The row of the table."""
    route = "both" if one.bodies == rejected_fields.BOTH else "chats" if one.bodies == (ChatRequest,) else "completions"
    named = [
        f"`{name}`" + (f" ({', '.join(f'`{json.dumps(value)}`' for value in neutral)})" if neutral else "")
        for name, neutral in one.fields.items()
    ]
    return f"| {one.topic} | {route} | {', '.join(named)} |"


def test_rejected_fields_are_listed_completely() -> None:
    section = COMPATIBILITY.partition("### Fields of requests to `/v1`")[2].partition("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows == [refused(one) for one in rejected_fields.REJECTED_FIELDS]
    accepted = section.partition("Accepted without effect: ")[2].partition(".\n")[0]
    assert re.findall(r"`(.+?)`", accepted) == sorted(rejected_fields.IGNORED_FIELDS)


PROTOCOLS = {
    "Messages": (MessagesRequest, rejected_fields.MESSAGES_FIELDS),
    "Responses": (ResponsesRequest, rejected_fields.RESPONSES_FIELDS),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_field_of_a_protocol_is_listed(protocol: str) -> None:
    shape, fields = PROTOCOLS[protocol]
    section = COMPATIBILITY.partition(f"## Fields of {protocol}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    served = set(shape.__struct_encode_fields__)
    assert {name for name, here in rows.items() if here.startswith("served")} == served
    assert {name: here for name, here in rows.items() if here.startswith("ignored")} == {
        name: f"ignored: {reason}" for name, reason in fields.ignored.items()
    }
    assert {name: here for name, here in rows.items() if here.startswith("refused")} == {
        name: "refused" + "".join(f", unless it is `{json.dumps(value)}`" for value in neutral)
        for name, neutral in fields.rejected.items()
    }
    assert rows.keys() == served | fields.ignored.keys() | fields.rejected.keys()


@pytest.mark.parametrize(("page", "said"), NUMBERS)
def test_numbers_match_the_code(page: str, said: str) -> None:
    assert said in re.sub(r"\s*\n", " ", PAGES[page])


def test_files_of_the_architecture_exist() -> None:
    """Paths in backquotes are those of files or packages, from the root or from some package on."""
    paths = [path for folder in ("tgi", "scripts", "tests") for path in (ROOT / folder).rglob("*")]
    there = [f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in paths]
    named = re.findall(r"`([\w./]+(?:\.py|/))`", PAGES["architecture.md"])
    assert len(named) > 40
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []
