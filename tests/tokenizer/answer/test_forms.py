"""Golden transcripts: the calls of each form as the model's own template writes them, through grammar and parser."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.make_model import SPECIAL_TOKENS
from tests.schemas import validate
from tests.tokenizer.answer.dialogue import (
    accepts,
    format_tokens,
    harness_of,
    merge_parts,
    parsed_answer,
    play_answer,
    rejection,
    start_matcher,
    submit_valid_chat,
)
from tests.tokenizer.harness import API, EOS, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.messages.protocol import Prompted
from tgi.microkernel.settings.table import REASONING_PARSERS, TOOL_CALL_PARSERS
from tgi.tokenizer.answers.arguments import PythonLiteral, argument_types
from tgi.tokenizer.answers.formats import (
    FALLBACK_FORMATS,
    NAMED_FORMATS,
    REASONING_TAGS,
    RESPONSE_TEMPLATE_NAMES,
    TOOL_CALL_FORMATS,
    AnswerFormat,
    Channels,
    FormatDetector,
    FormatTokens,
    detect_tool_call_format,
    formats_of,
)
from tgi.tokenizer.answers.formats import REASONING_PARSERS as NAMES_OF_REASONING
from tgi.tokenizer.answers.parser import AnswerParser
from tgi.tokenizer.chat import TOOL_PROMPT, ChatRenderer
from tgi.tokenizer.chat_template import ChatTemplates
from tgi.tokenizer.vocabulary import Vocabulary

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "metric": {"type": "boolean"},
        "at": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    },
    "required": ["city"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
CITY = 'São </b> "1"\'s'
# Arguments as the parser writes them, where the model has not written JSON.
ONE = {"city": "Ulm", "days": 2, "metric": True, "at": [48.4, 10]}
TWO = [("get_weather", json.dumps(ONE)), ("now", "{}")]
JSON = '{"name": "get_weather", "arguments": {"city": "Ulm", "days": 2, "metric": true, "at": [48.4, 10]}}'
NOW = '{"name": "now", "arguments": {}}'
PARAMETERS = "<parameter=city>{0}Ulm{0}</parameter>\n<parameter=days>{0}2{0}</parameter>\n" + (
    "<parameter=metric>{0}{1}{0}</parameter>\n<parameter=at>{0}[48.4, 10]{0}</parameter>\n"
)
NAMED = (
    '<{0}parameter name="city"{1}>Ulm</{0}parameter>\n<{0}parameter name="days"{2}>2</{0}parameter>\n'
    '<{0}parameter name="metric"{2}>true</{0}parameter>\n<{0}parameter name="at"{2}>[48.4, 10]</{0}parameter>\n'
)

pytestmark = pytest.mark.slow
KEYS = (
    "<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n<arg_key>at</arg_key>\n<arg_value>[48.4, 10]</arg_value>\n"
)
PYTHON = "get_weather(city='Ulm', days=2, metric=True, at=[48.4, 10])"
ARGUMENTS = json.dumps(ONE)


class Form(NamedTuple):
    """Two calls, and what of the model's template shows the form; `text` and `reasoning` may stand before the calls."""

    calls: str
    signs: str
    opening: str = ""  # before the calls, of the whole answer
    reasoning: tuple[str, str] = ("", "")
    mixes: bool = True
    single: bool = False  # only the first of the two calls


def dsml(space: str, calls: str) -> str:
    head = f"｜DSML｜{space}"
    parameters = NAMED.format(head, '" string="true'[1:] + '"', '" string="false'[1:] + '"')
    return (
        f'<{head}{calls}>\n<{head}invoke name="get_weather">\n{parameters}</{head}invoke>\n'
        f'<{head}invoke name="now">\n</{head}invoke>\n</{head}{calls}>'
    )


def qwen(begin: str, end: str, line: str, true: str) -> str:
    return (
        f"{begin}\n<function=get_weather>\n{PARAMETERS.format(line, true)}</function>\n{end}\n"
        f"{begin}\n<function=now>\n</function>\n{end}"
    )


def deepseek(kind: str, fence: str, end: str, between: str) -> str:
    one = f"<｜tool▁call▁begin｜>{kind}get_weather{fence}{ARGUMENTS}{end}<｜tool▁call▁end｜>"
    two = f"<｜tool▁call▁begin｜>{kind}now{fence}{{}}{end}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{one}{between}{two}<｜tool▁calls▁end｜>"


THINK = ("<think>\n", "\n</think>\n\n")
# By the row's name.
FORMS = {
    "harmony": Form(
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "<|start|>assistant<|channel|>analysis<|message|>",
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        mixes=False,
        single=True,
    ),
    "mistral-ids": Form(
        f"[TOOL_CALLS]get_weather[CALL_ID]x1y2z3a4b[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
        "[TOOL_CALLS] [CALL_ID] [ARGS]",
    ),
    "mistral-args": Form(f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", "[TOOL_CALLS] [ARGS]"),
    "mistral": Form(f"[TOOL_CALLS] [{JSON}, {NOW}]", "[TOOL_CALLS]"),
    "seed_oss": Form(qwen("<seed:tool_call>", "</seed:tool_call>", "", "True"), "<seed:tool_call> <seed:think>",
                     reasoning=("<seed:think>", "</seed:think>\n")),
    "mimo": Form(qwen("<tool_call>", "</tool_call>", "", "true"),
                 "<tool_call> <function=a> <parameter=b>value_1</parameter>"),
    "qwen3_coder": Form(qwen("<tool_call>", "</tool_call>", "\n", "True"),
                        "<tool_call>\n<function=a>\n<parameter=b>\n<think>",
                        reasoning=THINK),
    "hy_v3": Form(f"<tool_calls>\n<tool_call>get_weather<tool_sep>\n{KEYS}</tool_call>\n"
                  "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", "<tool_calls> <tool_sep> <arg_key>"),
    "hy_v4": Form(
        f"<tool_calls>\n<tool_call>get_weather\n{KEYS}</tool_call>\n<tool_call>now\n</tool_call>\n</tool_calls>",
                  "<tool_calls> <arg_key> <think>", reasoning=THINK),
    "k2_horizon": Form(
        "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n" + KEYS.replace("arg_", "ifm|arg_")
        + "</ifm|tool_call>\n<ifm|tool_call>now\n</ifm|tool_call>\n</ifm|tool_calls>",
        "<ifm|tool_calls> <ifm|think>", reasoning=("<ifm|think>\n", "</ifm|think>\n"),
    ),
    "iquest_q1": Form(
        f"<iquest_tool_call>get_weather\n{KEYS}</iquest_tool_call>\n<iquest_tool_call>now\n</iquest_tool_call>",
                      "<iquest_tool_call>"),
    "glm": Form(f"<tool_call>get_weather\n{KEYS}</tool_call>\n<tool_call>now\n</tool_call>",
                "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think>", reasoning=THINK),
    "deepseek_v41": Form(dsml(" ", "calls"), "<｜DSML｜ calls>"),
    "deepseek_v32": Form(dsml("", "function_calls"), 'dsml_token = "｜DSML｜" <{{ dsml_token }}function_calls> <think>',
                         reasoning=THINK),
    "deepseek_v4": Form(dsml("", "tool_calls"), "<｜DSML｜tool_calls>"),
    "gigachat35": Form(dsml("", "tool_calls").replace("DSML", "GCML"), "<｜GCML｜tool_calls>"),
    "deepseek_v3": Form(deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
                        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'\n```json"),
    "deepseek_v31": Form(deepseek("", "<｜tool▁sep｜>", "", ""), "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
    "kimi_k2": Form(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>",
    ),
    "minimax_m2": Form(
        '<minimax:tool_call>\n<invoke name="get_weather">\n' + NAMED.format("", "", "")
        + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "toolcall_begin_token = '<minimax:tool_call>' <invoke <think>", reasoning=THINK,
    ),
    "dots": Form(
        '<dots_function_call>\n<invoke name="get_weather">\n' + NAMED.format("", "", "")
        + '</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>', "<dots_function_call>",
    ),
    "minicpm5": Form(
        '<function name="get_weather">\n' + NAMED.format("", "", "").replace("parameter", "param")
        + '</function>\n<function name="now">\n</function>',
        '<function name="a"> <param name="b"> <think>', reasoning=THINK,
    ),
    "step3": Form(
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        + NAMED.format("steptml:", "", "")
        + '</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>", "<｜tool_calls_begin｜>",
    ),
    "lfm2": Form(f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>", "<|tool_call_start|>["),
    "olmo3": Form(f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>", "<function_calls>\nget_weather("),
    "plamo3": Form(
        "<|plamo:begin_tool_requests:plamo|>"
        + "".join(
            f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{arguments}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>" for name, arguments in TWO
        ) + "<|plamo:end_tool_requests:plamo|>",
        "<|plamo:begin_tool_requests:plamo|>",
    ),
    "cohere_command3": Form(
        f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}},\n'
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "<|START_ACTION|> <|START_THINKING|>", reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "apertus": Form(f'<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>',
                    "<|tools_prefix|>"),
    "internlm": Form(f"<|action_start|><|plugin|>\n{JSON}<|action_end|><|action_start|><|plugin|>\n{NOW}<|action_end|>",
                     '<|action_start|><|plugin|>\n{"name": "", "arguments": '),
    "interns1": Form(
        f"<|action_start|> <|plugin|>\n{JSON}<|action_end|>\n<|action_start|> <|plugin|>\n{NOW}<|action_end|>".replace(
            "arguments", "parameters"
        ), "<|action_start|><|plugin|>",
    ),
    "gemma4": Form(
        '<|tool_call>call:get_weather{city:<|"|>Ulm<|"|>,days:2,metric:true,at:[48.4,10]}<tool_call|><|tool_call>call:now{}'
        "<tool_call|>", "<|tool_call> <|channel>thought\n", reasoning=("<|channel>thought\n", "\n<channel|>"),
    ),
    "functiongemma": Form(
        "<start_function_call>call:get_weather{city:<escape>Ulm<escape>,days:2,metric:true,at:[48.4,10]}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>", "<start_function_call>",
    ),
    "gigachat3": Form(f"<|function_call|>{JSON}", "<|function_call|>", single=True),
    "longcat": Form(
        f"<longcat_tool_call>\n{JSON}\n</longcat_tool_call>\n<longcat_tool_call>\n{NOW}\n</longcat_tool_call>",
        "<longcat_tool_call>",
    ),
    "granite-20b-fc": Form(f"<function_call> {JSON} <function_call> {NOW}", "<function_call>"),
    "granite": Form(f"<|tool_call|>[{JSON}, {NOW}]", "<|tool_call|>"),
    "nemotron_json": Form(f"<TOOLCALL>[{JSON}, {NOW}]</TOOLCALL>", "<TOOLCALL>[{{"),
    "phi4_mini_json": Form(f"functools[{JSON}, {NOW}]", 'functools[{"name": '),
    "hunyuan_a13b": Form(f"<tool_calls>[{JSON}, {NOW}]</tool_calls>", "<tool_calls>["),
    "hermes": Form(f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
                   "<tool_call> <think>", reasoning=THINK),
    "llama4_pythonic": Form(f"[{PYTHON}, now()]", "[func_name1(params_name1=1)]", mixes=False),
    "llama3": Form(JSON.replace("arguments", "parameters"), '"parameters"', mixes=False, single=True),
}  # fmt: skip
TABLE = {known.name: known for known in TOOL_CALL_FORMATS}
LINES = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


def template(form: Form) -> str:
    return f"{{# {form.signs.replace('#', '')} #}}{LINES}"


@cache
def special() -> Vocabulary:
    """A vocabulary in which all markers, and DeepSeek's token within them, are special tokens."""
    tokens = {piece for known in TABLE.values() for piece in known.pieces if "<" in piece or piece[0] == "["}
    tokens = {one for one in tokens if "DSML" not in one and one != "[" and "=" not in one and "\n" not in one}
    tokens |= {
        "｜DSML｜",
        "<|plamo:constrain|>",
        "<|plamo:msg|>",
        *Channels.PIECES,
        *(one for tags in (*REASONING_TAGS[:4], REASONING_TAGS[6]) for one in tags),
    }
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_special_tokens(sorted(tokens))
    return Vocabulary(tokenizer, SPECIAL_TOKENS, [2])


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {"text": byte_level, "special": special}
each_form = pytest.mark.parametrize("name", FORMS)
# The grammar of channels needs their tokens.
WRITTEN = [(name, kind) for name in FORMS for kind in VOCABULARIES if name != "harmony" or kind == "special"]
each_written = pytest.mark.parametrize(("name", "kind"), WRITTEN)


def expected(form: Form, reasoning: str = "", text: str = "") -> list[tuple[str, str]]:
    calls = [part for name, arguments in TWO for part in (("call", name), ("arguments", arguments))]
    before = [(kind, one) for kind, one in (("reasoning", reasoning), ("text", text)) if one]
    return before + (calls[:2] if form.single else calls)


TYPES = {name: argument_types(SCHEMAS[name]) for name in SCHEMAS}


def answer_format(name: str, tools: Any = None) -> AnswerFormat:
    known, types = TABLE[name], TYPES
    if tools is not None:
        types = {one["function"]["name"]: argument_types(one["function"].get("parameters")) for one in tools}
    tags = None if known.channels else next((one for one in REASONING_TAGS if one.open in FORMS[name].signs), None)
    return AnswerFormat((known,), tags, channels=known.channels, tools=types)


def parts(name: str, pieces: list[str], complete: bool = True) -> list[tuple[str, str]]:
    parser = AnswerParser(answer_format(name), format_tokens(byte_level()))
    found: list[tuple[Any, str]] = []
    for piece in pieces:
        found += parser.parse_piece(piece)
    return merge_parts(found + parser.finish(complete))


def chat(tools: Any = TOOLS, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "tools": tools, **fields}).encode()


def test_each_row_has_a_transcript_and_is_recognised() -> None:
    assert set(FORMS) == set(TABLE)
    for name, form in FORMS.items():
        found = detect_tool_call_format(template(form))
        assert found is not None
        assert found.name == name


@each_form
def test_transcript_is_parsed_the_same_however_it_is_cut(name: str) -> None:
    form, random = FORMS[name], Random(name)
    open, close = form.reasoning
    spoken = "Let me look: \n" if form.mixes else ""
    whole = (f"{open}So <{close}" if open else "") + spoken + form.calls
    result = expected(form, "So <" if open else "", spoken.rstrip())
    assert parts(name, [whole]) == result
    assert parts(name, list(whole)) == result
    for _ in range(20):
        edges = sorted({0, len(whole), *(random.randrange(len(whole)) for _ in range(random.randrange(1, 12)))})
        assert parts(name, [whole[one:other] for one, other in pairwise(edges)]) == result


@each_form
def test_prose_about_a_marker_is_text(name: str) -> None:
    known, form = TABLE[name], FORMS[name]
    marker = known.marker or "functions."
    for prose in (
        f"Models write `{marker}`, then a call.", f"{marker} is a marker", f"It ends with {marker}",
        f"[1] {marker}{{}}", f"{marker}{{\"name\": 1}} {marker}",
    ):  # fmt: skip
        for pieces in ([prose], list(prose)):
            assert parts(name, pieces) == [("text", prose)]
    if known.marker and not known.bare:
        assert parts(name, [f"Use {marker} so: " + form.calls]) == expected(form, text=f"Use {marker} so:")


@each_form
def test_cut_call_is_no_text(name: str) -> None:
    form, whole = FORMS[name], FORMS[name].calls
    for size in range(1, len(whole)):
        found = parts(name, [whole[:size]], complete=False)
        if found and found[0][0] == "text":  # too short to be told from text
            assert whole.startswith(found[0][1])
            assert len(found) == 1
            assert TABLE[name].marker not in found[0][1] or not TABLE[name].marker
        else:
            kinds = [kind for kind, _ in found]
            assert kinds == ["call", "arguments", "call", "arguments"][: len(kinds)], whole[:size]
            for (_, text), (_, complete) in zip(found, expected(form), strict=False):
                assert complete.startswith(text)


@each_written
def test_grammar_accepts_the_transcript(name: str, kind: str) -> None:
    form, vocabulary = FORMS[name], VOCABULARIES[kind]()
    harness = harness_of(vocabulary, template(form))
    opening, close = form.reasoning
    thought = f"{opening}So <{close}" if opening else ""
    result = expected(form, "So <" if opening else "")
    # Unknown tools, missing and wrong arguments.
    wrong = [
        form.calls.replace("get_weather", "get_news"),
        form.calls.replace("48.4", "x"),
        form.calls.replace("days", "nights"),
    ]
    for choice in ("auto", "required"):
        add = submit_valid_chat(harness, 1, chat(tool_choice=choice, parallel_tool_calls=True))
        assert accepts(add, thought + form.calls, vocabulary)
        for one in wrong:
            assert one != form.calls
            assert not accepts(add, one, vocabulary), one
        assert parsed_answer(play_answer(harness, add, ids_of(thought + form.calls, vocabulary))).parts == result
    add = submit_valid_chat(harness, 1, chat(tool_choice={"type": "none"}, parallel_tool_calls=True))
    spoken = "Let me look, e.g. `{`: " if form.mixes else ""
    prose = "<|channel|>final<|message|>Hello, {you}" if name == "harmony" else "Hello, {you} and [them]."
    assert accepts(add, prose, vocabulary)
    assert accepts(add, spoken + form.calls, vocabulary)
    marker = TABLE[name].marker
    if kind == "text" and marker and form.mixes:
        assert accepts(add, f"Models write `{marker}`. Then" + form.calls, vocabulary)
    required = submit_valid_chat(harness, 1, chat(tool_choice="required"))
    assert not accepts(required, prose, vocabulary)


@pytest.mark.parametrize(
    "name", ["qwen3_coder", "glm", "deepseek_v32", "lfm2", "olmo3", "gemma4", "harmony", "kimi_k2", "minimax_m2"]
)
def test_random_required_calls_are_valid(name: str) -> None:
    vocabulary = special()
    harness = harness_of(vocabulary, template(FORMS[name]))
    properties = {**WEATHER["properties"], "city": {"type": "string", "maxLength": 5, "pattern": "^[A-Z]"}}
    schemas = {**SCHEMAS, "get_weather": {**WEATHER, "properties": properties}}
    tools = [{"type": "function", "function": {"name": one, "parameters": schemas[one]}} for one in schemas]
    blank = {number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, str) and piece.isspace()}
    for seed in range(3):
        random = Random(seed)
        add = submit_valid_chat(harness, 0, chat(tools, tool_choice="required"))
        found, ids = start_matcher(add, vocabulary), []
        opening, close = FORMS[name].reasoning
        ids = ids_of(f"{opening}So{close}", vocabulary) if opening else []
        assert found.consume_tokens(ids)
        for _ in range(600):
            mask = int.from_bytes(found.compute_bitmask(), "little")
            allowed = [number for number in range(mask.bit_length()) if mask >> number & 1]
            if EOS in allowed:
                break
            words = [number for number in allowed if number not in blank]
            ids.append(random.choice(words or allowed))
            assert found.consume_token(ids[-1])
        else:
            raise AssertionError("it never ends")
        spoken = [part for part in parsed_answer(play_answer(harness, add, ids)).parts if part[0] != "reasoning"]
        assert [kind for kind, _ in spoken] == ["call", "arguments"] * (len(spoken) // 2)
        assert spoken
        for (_, called), (_, arguments) in zip(spoken[::2], spoken[1::2], strict=True):
            validate(arguments, schemas[called])


def test_documentation_lists_all_forms() -> None:
    page = (Path(__file__).parents[3] / "docs/tools.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert {*TABLE, *(known.name for known in FALLBACK_FORMATS)} <= listed


def test_settings_name_all_forms() -> None:
    forms = (*TOOL_CALL_FORMATS, *NAMED_FORMATS)
    names = {name for known in forms for name in (known.name, *known.also)}
    assert {*TOOL_CALL_PARSERS} == {"auto", *RESPONSE_TEMPLATE_NAMES, *names}
    assert {*REASONING_PARSERS} == {"auto", *RESPONSE_TEMPLATE_NAMES, *NAMES_OF_REASONING}
    for name in names:
        assert formats_of(name)


def test_settings_choose_the_form() -> None:
    """By name, whatever the template shows; a name of several forms stands for the one that the template shows."""
    for name in {*TOOL_CALL_PARSERS} - {"auto", *RESPONSE_TEMPLATE_NAMES}:
        found = FormatDetector(name, "none").call_format("{{ messages }}")
        assert found is not None
        assert name in (found.name, *found.also)
    args = FormatDetector("mistral").call_format("[TOOL_CALLS] [ARGS]")
    assert args is not None
    assert args.name == "mistral-args"
    assert FormatDetector("hermes", "none").reasoning_tags("<think>") is None
    assert FormatDetector(reasoning_parser="mistral").reasoning_tags("<think>") == REASONING_TAGS[1]
    kimi = FormatDetector(tokens=["<|tool_calls_section_begin|>"]).call_format("{{ tools }}")
    assert kimi is not None
    assert kimi.name == "kimi_k2"


@pytest.mark.parametrize("literal", [True, False], ids=["template with the suffix", "template that adds it"])
@pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
def test_tokens_with_a_suffix(name: str, literal: bool) -> None:
    """Hunyuan's checkpoints have each its own, in all markers."""
    form, suffix = FORMS[name], ":6124c78e"
    bare = [*TABLE["hy_v3"].pieces, *TABLE["hy_v4"].pieces, "<think>", "</think>"]
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_special_tokens(sorted({one.replace(">", f"{suffix}>") for one in bare}))
    vocabulary = Vocabulary(tokenizer, SPECIAL_TOKENS, [2])
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    detector = FormatDetector(tokens=tokens)
    signs = f"{form.signs} <think>"
    shown = re.sub(r"(</?\w+)>", rf"\1{suffix}>", signs) if literal else signs
    call_format, tags = detector.call_format(shown), detector.reasoning_tags(shown)
    assert call_format is not None
    assert tags == (f"<think{suffix}>", f"</think{suffix}>")
    types = {tool["function"]["name"]: argument_types(tool["function"].get("parameters")) for tool in TOOLS}
    whole = re.sub(r"(</?\w+)>", rf"\1{suffix}>", "<think>So</think>" + form.calls)
    suffixed = FormatTokens(vocabulary)
    for cuts in (1, len(whole)):
        size = -(-len(whole) // cuts)
        parser = AnswerParser(AnswerFormat((call_format,), tags, tools=types), format_tokens(byte_level()))
        found = [part for at in range(0, len(whole), size) for part in parser.parse_piece(whole[at : at + size])]
        assert merge_parts(found + parser.finish(True)) == expected(form, "So")
    assert suffixed.token_id(call_format.marker) == vocabulary.tokenizer.token_to_id(f"<tool_calls{suffix}>")


def test_named_form_of_a_template_without_tools() -> None:
    """The server lists the tools, and leaves out the instruction to answer in TGI's form."""
    renderer = ChatRenderer(ChatTemplates({"default": "{{ messages[0].content }}"}, {}), FormatDetector("hermes"))
    rendered = renderer.render_chat(chat())
    assert json.dumps(TOOLS, separators=(",", ":")) in rendered.text
    assert TOOL_PROMPT.strip() not in rendered.text
    assert rendered.answer_format is not None
    assert [known.name for known in rendered.answer_format.call_formats] == ["hermes"]


# --- values that are no JSON ------------------------------------------------------------------------------------------

# How each form writes the argument `a` of the tool `f`.
WRITE = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "dots": '<dots_function_call><invoke name="f"><parameter name="a">{}</parameter></invoke></dots_function_call>',
}
DSML_TEXT = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="{}">{}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
# (schema, what the model writes → the JSON of the value, or None where the grammar refuses it, keywords not enforced)
VALUES: list[tuple[Any, dict[str, str | None], list[str]]] = [
    ({"type": "string"},
     {"Ulm": '"Ulm"', "5": '"5"', "": '""', "a\nb \\ \"</b>": '"a\\nb \\\\ \\"</b>"', "null": '"null"'}, []),
    ({"type": "string", "maxLength": 3}, {"Ulm": '"Ulm"', "Ulmo": None}, []),
    ({"type": "string", "pattern": "^a/+$"}, {"a//": '"a//"', "b": None}, []),
    ({"type": "string", "pattern": "b"}, {"abc": '"abc"', "ac": None}, []),
    ({"enum": ["x", "y z", 3]}, {"x": '"x"', "y z": '"y z"', "3": "3", "y": None}, []),
    ({"$ref": "#/$defs/Unit"}, {"C": '"C"', "K": None}, []),
    ({"type": "integer", "maximum": 9}, {"7": "7", "12": None, "x": None}, []),
    ({"type": "boolean"}, {"true": "true", "False": "false", "no": None}, []),
    ({"type": ["integer", "null"]}, {"null": "null", "None": "null", "4": "4", "x": None}, []),
    ({"type": ["string", "null"]}, {"null": "null", "x": '"x"', "4": '"4"'}, []),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"4": "4", "4x": '"4x"'}, []),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}, {"7": "7"}, ["anyOf"]),
    ({"type": "array", "items": {"type": "string"}}, {'["</arg_value>"]': '["</arg_value>"]', "x": None}, []),
    ({"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
     {'{"b":null}': '{"b":null}', "{}": None}, []),
    ({}, {"x": '"x"', "[1]": "[1]", "None": "null"}, []),
]  # fmt: skip


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize(("schema", "values", "missing"), VALUES)
def test_values_without_quotes(name: str, schema: Any, values: dict[str, str | None], missing: list[str]) -> None:
    vocabulary, harness = byte_level(), harness_of(byte_level(), template(FORMS[name]))
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"Unit": {"enum": ["C", "F"]}}}

    def tools(strict: bool) -> list[Any]:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]

    for text, value in values.items():
        add = submit_valid_chat(harness, 1, chat(tools(False), tool_choice="required"))
        (prompted,) = [message for message in harness.received_by(API) if isinstance(message, Prompted)]
        assert prompted.not_enforced == [f"f#/properties/a/{keyword}" for keyword in missing]
        opening, close = FORMS[name].reasoning
        answer = (f"{opening}So{close}" if opening else "") + WRITE[name].format(text)
        assert accepts(add, answer, vocabulary) == (value is not None), text
        if value is not None:
            found = parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts
            assert found[-1] == ("arguments", f'{{"a": {value}}}')
    if missing:
        assert "cannot be enforced in this model" in rejection(harness, chat(tools(True)))


def test_a_tag_may_say_whether_a_value_is_a_text() -> None:
    name = "deepseek_v32"
    harness = harness_of(byte_level(), template(FORMS[name]))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}]
    add = submit_valid_chat(harness, 1, chat(tools, tool_choice="required"))
    for is_text, text, value in (
        ("true", "5", '"5"'),
        ("false", "5", "5"),
        ("false", "[1]", "[1]"),
        ("false", "x", None),
    ):
        answer = "<think>So</think>" + DSML_TEXT.format(is_text, text)
        assert accepts(add, answer, byte_level()) == (value is not None)
        if value is not None:
            parser = AnswerParser(answer_format(name, tools), format_tokens(byte_level()))
            assert merge_parts(parser.parse_piece(answer))[-1] == ("arguments", f'{{"a": {value}}}')


def test_keys_without_quotes_and_nested_values() -> None:
    where = {
        "type": "object",
        "properties": {"to": {"enum": ["N", "S"]}, "n": {"type": "integer", "minimum": 2}},
        "required": ["to"],
    }
    parameters = {
        "properties": {"at": {"type": "array", "items": where, "minItems": 1, "maxItems": 2}, "any": {}},
        "required": ["at"],
    }
    harness = harness_of(byte_level(), template(FORMS["gemma4"]))
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    add = submit_valid_chat(harness, 1, chat(tools, tool_choice="required"))
    for body, value in (
        ('{at:[{to:<|"|>N<|"|>,n:3},{to:<|"|>S<|"|>}]}', {"at": [{"to": "N", "n": 3}, {"to": "S"}]}),
        ('{at:[{to:<|"|>N<|"|>}],any:{x:[1,<|"|>{"y"<|"|>]}}', {"at": [{"to": "N"}], "any": {"x": [1, '{"y"']}}),
        ('{at:[{to:<|"|>E<|"|>}]}', None), ("{at:[]}", None),
        ('{at:[{to:<|"|>S<|"|>},{to:<|"|>N<|"|>},{to:<|"|>N<|"|>}]}', None),
        ('{at:[{to:<|"|>N<|"|>,n:1}]}', None), ("{any:1}", None),
    ):  # fmt: skip
        answer = f"<|tool_call>call:f{body}<tool_call|>"
        assert accepts(add, answer, byte_level()) == (value is not None), body
        if value is not None:
            for pieces in ([answer], list(answer)):
                parser = AnswerParser(answer_format("gemma4", tools), format_tokens(byte_level()))
                found = merge_parts([part for piece in pieces for part in parser.parse_piece(piece)])
                assert [kind for kind, _ in found] == ["call", "arguments"]
                assert json.loads(found[1][1]) == value


PYTHON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(PYTHON_VALUES, st.integers(1, 5))
def test_python_literals_are_json_however_they_are_cut(value: Any, size: int) -> None:
    literal, rest, written = PythonLiteral(), "", ""
    text = repr(value) + ")"
    for at in range(0, len(text), size):
        rest += text[at : at + size]
        piece, length = literal.convert(rest)
        written, rest = written + piece, rest[length:]
    assert literal.ended
    assert rest == ")"
    assert json.loads(written) == value


@each_form
@pytest.mark.parametrize("character", ["\n", "a"])
def test_a_token_is_parsed_without_those_before_it(name: str, character: str) -> None:
    """Wherever in a call: what is held back is not searched again for each token."""
    whole = FORMS[name].calls
    for size in range(0, len(whole), 37):
        parser = AnswerParser(answer_format(name), format_tokens(byte_level()))
        parser.parse_piece(whole[:size])
        searched = 0
        for _ in range(300):
            parser.parse_piece(character)
            searched += len(parser._rest)
        assert searched <= 100 * 300, whole[:size]


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
def test_final_message_matches_a_grammar(tools: list[Any]) -> None:
    harness, vocabulary = harness_of(special(), template(FORMS["harmony"])), special()
    grammar = json.dumps({"schema": {"properties": {"age": {"type": "integer"}}, "required": ["age"]}}).encode()
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    answers = [
        (thought + final + '{"age": 3}', [("reasoning", "So."), ("text", '{"age": 3}')]),
        (final + '{"age": 3}', [("text", '{"age": 3}')]),
        (final + '{"age": "x"}', None),
        (final + "Hello", None),
        (thought + FORMS["harmony"].calls, expected(FORMS["harmony"], "So.") if tools else None),
    ]
    for answer, parts in answers:
        add = submit_valid_chat(harness, 1, chat(tools), grammar=grammar)
        assert accepts(add, answer, vocabulary) == (parts is not None), answer
        if parts is not None:
            assert parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts == parts


def test_messages_of_an_answer_are_told_by_their_headers() -> None:
    """Preambles and messages to other recipients, an answer without a header, and one that is cut in a header."""
    answers = [
        ("<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Then.<|return|>",
         [("text", "First.\nThen.")]),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", [("reasoning", "{}")]),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", [("call", "now"), ("arguments", "{}")]),
        ("<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", [("text", "{}")]),
        ("Hello <there>", [("text", "Hello <there>")]),
        ("<|channel|>final<|message|>Hi<|end|><|start|>assist", [("text", "Hi")]),
    ]  # fmt: skip
    for answer, result in answers:
        assert parts("harmony", [answer]) == parts("harmony", list(answer)) == result
