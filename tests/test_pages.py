"""What the pages for users say is so: links lead somewhere, flags exist, start lines are taken, refusals are these."""

import json
import re
import shlex
import string
from pathlib import Path

import pytest

from tests.test_cli import FLAGS
from tgi.api import fields, protocol, router, sse, steering
from tgi.api.shapes import openai
from tgi.api.shapes.chat import ChatRequest
from tgi.api.validation import COMPLETIONS, OPENAI, RULES
from tgi.hub.grammar import LIMITS
from tgi.kernel import log
from tgi.kernel.arguments import load
from tgi.kernel.messages import MOST_TOPS
from tgi.kernel.option import flag
from tgi.kernel.settings import DRAFTS, MOST_SPECULATED, OPTIONS
from tgi.kernel.summary import Served
from tgi.launcher import main
from tgi.tokenizer import closing, ebnf, grammar, schema, schema_lark, template
from tgi.tokenizer.answer import tools

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
COMPATIBILITY, MIGRATING = PAGES["compatibility.md"], PAGES["migrating.md"]
OURS = {"--max-image-fetch-size", "--api-key-file", "--kserve", "--allow-image-urls"}  # flags that TGI has not
LAUNCHER = {name for name, _, _ in FLAGS if name.startswith("--")} - OURS
# Of docker, pip, apt, and of lm-eval, whose names go on behind an underscore.
OTHERS_FLAGS = {"--gpus", "--shm-size", "--no-cache-dir", "--no-install-recommends", "--model", "--tasks", "--batch"}
VARIABLES = {variable for name, option in OPTIONS.items() for variable in option.over + option.variables(name)}
NOT_SERVED = " is not supported by this server"
# What pages say of numbers that stand in the code.
NUMBERS = [
    ("tools.md", f"| tools | {tools.MOST_TOOLS} |"),
    ("tools.md", f"| size of all of them | {grammar.MOST_BYTES} bytes as JSON |"),
    ("tools.md", f"| names in all `properties` of all of them | {tools.MOST_PROPERTIES} |"),
    ("grammars.md", f"| size | {grammar.MOST_BYTES} bytes as JSON |"),
    ("grammars.md", f"more than {grammar.MOST_BYTES} bytes"),
    ("grammars.md", f"| nesting | {schema.MOST_DEPTH} schemas |"),
    ("grammars.md", f"| names in all `properties` | {schema.MOST_PROPERTIES} |"),
    ("grammars.md", f"| {closing.MAX_STEPS:,} names passed between them |"),
    ("grammars.md", f"| {ebnf.MAX_BYTES} bytes, {ebnf.MAX_RULES} rules |"),
    ("grammars.md", f"64 bits (±{schema.MAX_WHOLE})"),
    ("grammars.md", f"Behind the point there are {schema.DECIMALS} digits"),
    ("grammars.md", f"| {schema_lark.MAX_DIGITS} digits before the point, {schema_lark.MAX_DIGITS} behind it"),
    ("grammars.md", f"{LIMITS.initial_lexer_fuel:,} steps of the lexer and {LIMITS.max_grammar_size:,} symbols"),
    ("grammars.md", f"{LIMITS.step_lexer_fuel:,} steps of the lexer, {LIMITS.step_max_items:,} items of the parser"),
    ("grammars.md", f"| memory of one grammar | {LIMITS.max_lexer_states:,} states of the lexer"),
    ("grammars.md", f"texts of {grammar.TRIAL_TOKENS} tokens each"),
    ("grammars.md", f"That is {grammar.TRIALS * grammar.TRIAL_TOKENS} masks at most"),
    ("grammars.md", f"keeps the answers to the last {grammar.KEPT}."),
    ("compatibility.md", f"stopped at {template.MAX_CHARACTERS >> 20} MiB or {template.MAX_SECONDS:g} s"),
    ("compatibility.md", f"up to {steering.MOST_BIASES} tokens of the vocabulary"),
    ("compatibility.md", f"up to {openai.MAX_STOP_TOKEN_IDS} ids of the vocabulary"),
    ("compatibility.md", f"up to {openai.MAX_BAD_WORDS} words of {openai.MAX_BAD_WORD_CHARACTERS} characters in all"),
    ("compatibility.md", f"400 once {protocol.MAX_HEAD_BYTES >> 10} KiB have come"),
    ("compatibility.md", f"After {sse.KEEP_ALIVE_SECONDS:g} s without a token the stream opens"),
    ("compatibility.md", f"seconds until there should be room, 1 to {router.LONGEST_RETRY} |"),
    ("compatibility.md", f"at most {MOST_SPECULATED} a step"),
    ("compatibility.md", f"`--max-top-n-tokens` above {MOST_TOPS} |"),
    ("compatibility.md", f"up to {fields.MAX_LOGGED} of them"),
    ("processes.md", f"between 1 and {router.LONGEST_RETRY} seconds"),
    ("processes.md", ", ".join(f"`{name}`" for name in Served._fields)),
    ("processes.md", f"a message holds at most {log.MAX_MESSAGE:,} characters, a field {log.MAX_FIELD:,}"),
    ("processes.md", f"all fields of a record {log.MAX_FIELDS:,}, a traceback {log.MAX_EXCEPTION:,}"),
    ("speculation.md", f"{DRAFTS} at a time, or --speculate"),
]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Where links into a page may lead: its headings, as they become addresses."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    kept = string.ascii_lowercase + string.digits + "-_"
    return {"".join(c for c in heading.lower().replace(" ", "-") if c in kept) for heading in headings}


def named_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def row(page: str, begin: str) -> str:
    """The line of a table that begins so."""
    (found,) = [line for line in page.splitlines() if line.startswith(f"| {begin}")]
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    here = ROOT if name == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (here / path).resolve() if path else here / name
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", [COMPATIBILITY, MIGRATING], ids=["compatibility", "migrating"])
def test_flags_that_are_named_exist(page: str) -> None:
    assert named_flags(page) <= {flag(name) for name in OPTIONS} | OTHERS_FLAGS


def test_every_flag_of_tgi_is_placed() -> None:
    """Each flag of TGI's launcher stands in one of the rows, and those without effect in theirs."""
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


def test_there_are_start_lines() -> None:
    assert len(start_lines()) >= 4


@pytest.mark.parametrize("line", start_lines())
def test_a_start_line_is_taken(line: str) -> None:
    words = shlex.split(line)
    at = words.index("text-generation-launcher")
    environ = dict(word.split("=", 1) for word in words[:at])
    settings = load(main.make_context("launcher", words[at + 1 :]).params, environ)
    assert settings.model_id == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings.port == 8080


def test_variables_of_the_compose_file_exist() -> None:
    (service,) = blocks(MIGRATING, "yaml")
    named = set(re.findall(r"^ {6}([A-Z_]+):", service, re.MULTILINE))
    assert len(named) > 3
    assert named <= VARIABLES | {"HF_TOKEN"}


@pytest.mark.parametrize("source", blocks(MIGRATING, "python"))
def test_examples_are_python(source: str) -> None:
    compile(source, "migrating.md", "exec")


def test_what_is_not_served_is_listed_and_nothing_else() -> None:
    texts = {rule.detail for rule in (*RULES, *OPENAI, *COMPLETIONS) if NOT_SERVED in rule.detail}
    texts.add(fields.REFUSAL.format(name="NAME"))
    section = COMPATIBILITY.partition("## Not served yet")[2]
    assert texts == {text for text in re.findall(r"`` (.+?) ``", section) if NOT_SERVED in text}


def refused(one: fields.Refused) -> str:
    """Its row of the table."""
    route = "both" if one.bodies == fields.BOTH else "chats" if one.bodies == (ChatRequest,) else "completions"
    named = [
        f"`{name}`" + (f" ({', '.join(f'`{json.dumps(value)}`' for value in neutral)})" if neutral else "")
        for name, neutral in one.fields.items()
    ]
    return f"| {one.what} | {route} | {', '.join(named)} |"


def test_fields_that_are_refused_are_listed_and_nothing_else() -> None:
    section = COMPATIBILITY.partition("### Fields of requests to `/v1`")[2]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows == [refused(one) for one in fields.REFUSED]
    accepted = section.partition("Accepted without effect: ")[2].partition(".\n")[0]
    assert re.findall(r"`(.+?)`", accepted) == sorted(fields.WITHOUT_EFFECT)


@pytest.mark.parametrize(("page", "said"), NUMBERS)
def test_numbers_are_those_of_the_code(page: str, said: str) -> None:
    assert said in re.sub(r"\s*\n", " ", PAGES[page])
