"""How models write tool calls and reasoning: a table with one row per form, recognised from template and vocabulary.

A new form is a row of TOOL_CALL_FORMATS: its pieces, the kind of its body, and what its templates contain.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.tokenizer.vocabulary import Vocabulary

# White space that may precede the first piece of an answer, and is not part of it.
WHITESPACE = " \t\r\n"


# Characters of a key without quotes.
MAX_BARE_WORD = 128


class CallPlaceholder(StrEnum):
    """The variable pieces of a tool call."""

    NAME = "<name>"  # the tool's name as a JSON string
    WORD = "<word>"  # the tool's name without quotes
    INDEX = "<index>"  # a number or id that the model counts or invents; not shown
    ARGUMENTS = "<arguments>"  # a JSON object
    FIELDS = "<fields>"  # the arguments as further fields of the object that holds the name: `, "a": 1}`, or only `}`
    TAGS = "<tags>"  # one element per argument, as ToolCallFormat.tags says
    KEYWORDS = "<keywords>"  # Python's keyword arguments: `a=1, b='x'`
    # The rest of an object behind its brace: keys have no quotes, and texts stand between two of ToolCallFormat.quote.
    LITERALS = "<literals>"


class ArgumentTags(NamedTuple):
    """How TAGS writes an argument: open KEY key_end text_start VALUE close. Texts stand without quotes or escapes,
    other values as JSON."""

    open: str
    key_end: str
    close: str
    text_start: str = ""  # precedes a value that is a text …
    json_start: str = ""  # … and any other; where both are equal, the tool's schema says what a value is
    own_lines: bool = False  # a line feed precedes and follows each value


class ToolCallFormat(NamedTuple):
    """How tool calls are written: [marker] before call [between [marker] call]… after.

    Pieces are separated by one space, one newline or nothing. What is a special token of the model's vocabulary is
    written as that token, within a piece too.
    """

    name: str
    call: tuple[str, ...]
    also: tuple[str, ...] = ()  # names of the same form in vLLM and SGLang
    required_signs: tuple[str, ...] = ()  # a template that contains all of them has this format …
    excluding_signs: tuple[str, ...] = ()  # … unless it contains one of these
    token: str = ""  # a token that only vocabularies of models with this format have
    marker: str = ""  # begins the calls; "": no marker
    marker_repeats: bool = False  # the marker precedes every call, not only the first
    bare: bool = False  # calls may begin without the marker, at the beginning of an answer
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    parallel_calls: bool = True  # default if the request does not say whether several calls are allowed
    tags: ArgumentTags = ArgumentTags("", "", "")
    quote: str = ""
    channels: bool = False  # the whole answer consists of messages with headers, see Channels

    @property
    def pieces(self) -> Iterator[str]:
        """All literal pieces."""
        for piece in (self.marker, *self.before, *self.call, *self.between, *self.after, *self.tags[:5], self.quote):
            if piece and not isinstance(piece, CallPlaceholder):
                yield piece

    def spelled(self, names: Mapping[str, str]) -> "ToolCallFormat":
        """The format with other names for its tags, see suffixed_tokens."""
        return self if not names else self._replace(
            call=tuple(_spelled(piece, names) for piece in self.call), marker=_spelled(self.marker, names),
            after=tuple(_spelled(piece, names) for piece in self.after),
            tags=ArgumentTags._make([*(_spelled(piece, names) for piece in self.tags[:5]), self.tags.own_lines]),
        )  # fmt: skip

    def can_express(self, name: str) -> bool:
        """Whether the parser can recover this tool name: an unquoted name ends at the piece that follows it."""
        if CallPlaceholder.WORD not in self.call:
            return True
        if name != name.strip(WHITESPACE):
            return False
        return not any(end in name for end in self.word_ends()) and not (self.channels and " " in name)

    def word_ends(self) -> tuple[str, ...]:
        """The pieces that may follow an unquoted name."""
        at = self.call.index(CallPlaceholder.WORD) + 1
        if self.call[at : at + 1] != (CallPlaceholder.TAGS,):
            return self.call[at : at + 1]
        return (self.tags.open, self.call[at + 1])  # a call without arguments has no tags


_SUFFIXED = re.compile(r"<tool_calls(:[^\s<>]+)>")
_TAG = re.compile(r"</?\w+>")


def suffixed_tokens(tokens: Collection[str]) -> dict[str, str]:
    """The tags of a vocabulary that end in one suffix, such as `<tool_calls:6124c78e>`, by their names without it. The
    checkpoints of Hunyuan have each its own; the dictionary is empty for other models."""
    suffix = next((f"{found[1]}>" for token in sorted(tokens) if (found := _SUFFIXED.fullmatch(token))), None)
    if suffix is None:
        return {}
    return {f"{token.removesuffix(suffix)}>": token for token in tokens if token.endswith(suffix)}


def _spelled(piece: str, names: Mapping[str, str]) -> str:
    return piece if isinstance(piece, CallPlaceholder) else _TAG.sub(lambda tag: names.get(tag[0], tag[0]), piece)


class Channels:
    """The pieces of harmony: START role CHANNEL channel MESSAGE text END, repeated. The recipient of a call stands in
    the header, before the channel or behind it. The first START and role are the end of the prompt."""

    START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
    END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
    PIECES = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
    RECIPIENT = "to=functions."
    REASONING = "analysis"  # the channel of reasoning
    FINAL = "final"  # the channel of the answer
    REASONING_HEADER = CHANNEL + REASONING + MESSAGE


def _json_call(arguments_key: str, name_key: str = "name") -> tuple[str, ...]:
    return (
        "{", f'"{name_key}"', ":", CallPlaceholder.NAME, ",", f'"{arguments_key}"', ":", CallPlaceholder.ARGUMENTS, "}",
    )  # fmt: skip


def _json_list(name: str, marker: str, end: str, *signs: str, key: str = "arguments") -> ToolCallFormat:
    """Calls as a JSON list between two markers."""
    return ToolCallFormat(
        name=name,
        call=_json_call(key),
        required_signs=signs or (marker,),
        marker=marker,
        before=("[",),
        between=(",",),
        after=("]", end) if end else ("]",),
    )


def _dsml(name: str, calls: str, signs: tuple[str, ...], space: str = "", token: str = "｜DSML｜") -> ToolCallFormat:
    """DeepSeek's markup, and GigaChat's with another token. Its elements have `space` behind the token."""
    head = f"{token}{space}"
    return ToolCallFormat(
        name=name,
        call=(f'<{head}invoke name="', CallPlaceholder.WORD, '">', CallPlaceholder.TAGS, f"</{head}invoke>"),
        required_signs=signs,
        marker=f"<{head}{calls}>",
        after=(f"</{head}{calls}>",),
        tags=ArgumentTags(f'<{head}parameter name="', '" string="', f"</{head}parameter>", 'true">', 'false">'),
    )


_FUNCTION = ("<function=", CallPlaceholder.WORD, ">", CallPlaceholder.TAGS, "</function>")
_INVOKE = ('<invoke name="', CallPlaceholder.WORD, '">', CallPlaceholder.TAGS, "</invoke>")
_PARAMETERS = ArgumentTags("<parameter=", ">", "</parameter>")
_NAMED_PARAMETERS = ArgumentTags('<parameter name="', '">', "</parameter>")
_ARG_KEYS = ArgumentTags("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>", "<arg_value>")
_PYTHON_CALL = (CallPlaceholder.WORD, "(", CallPlaceholder.KEYWORDS, ")")
_PLAMO_BODY = "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"

# Elements for single arguments, of forms that are not in the table.
_XML_ARGUMENT_SIGNS = ("<function=", "<arg_key>", "<parameter=")
# Recognition takes the first that matches.
TOOL_CALL_FORMATS = (
    ToolCallFormat(
        name="harmony",
        also=("openai", "gpt-oss"),
        call=(Channels.RECIPIENT, CallPlaceholder.WORD, Channels.MESSAGE, CallPlaceholder.ARGUMENTS),
        required_signs=(Channels.START, Channels.CHANNEL, Channels.MESSAGE),
        parallel_calls=False,
        channels=True,
    ),
    ToolCallFormat(
        name="mistral-ids",
        also=("mistral",),
        call=(CallPlaceholder.WORD, "[CALL_ID]", CallPlaceholder.INDEX, "[ARGS]", CallPlaceholder.ARGUMENTS),
        required_signs=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        marker="[TOOL_CALLS]",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="mistral-args",
        also=("mistral",),
        call=(CallPlaceholder.WORD, "[ARGS]", CallPlaceholder.ARGUMENTS),
        required_signs=("[TOOL_CALLS]", "[ARGS]"),
        marker="[TOOL_CALLS]",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="mistral",
        call=_json_call("arguments"),
        required_signs=("[TOOL_CALLS]",),
        marker="[TOOL_CALLS]",
        before=("[",),
        between=(",",),
        after=("]",),
    ),
    ToolCallFormat(
        name="seed_oss",
        call=(*_FUNCTION, "</seed:tool_call>"),
        required_signs=("<seed:tool_call>",),
        marker="<seed:tool_call>",
        marker_repeats=True,
        tags=_PARAMETERS,
    ),
    ToolCallFormat(
        name="mimo",
        call=(*_FUNCTION, "</tool_call>"),
        required_signs=("<tool_call>", "<function=", ">value_1</parameter>"),
        marker="<tool_call>",
        marker_repeats=True,
        tags=_PARAMETERS,
    ),
    ToolCallFormat(
        name="qwen3_coder",
        also=("qwen3_xml", "step3p5", "step5", "nemotron_v3", "nanbeige"),
        call=(*_FUNCTION, "</tool_call>"),
        required_signs=("<tool_call>", "<function=", "<parameter="),
        marker="<tool_call>",
        marker_repeats=True,
        tags=_PARAMETERS._replace(own_lines=True),
    ),
    ToolCallFormat(
        name="hy_v3",
        also=("hunyuan",),
        call=("<tool_call>", CallPlaceholder.WORD, "<tool_sep>", CallPlaceholder.TAGS, "</tool_call>"),
        required_signs=("<tool_calls", "<tool_sep", "<arg_key"),
        marker="<tool_calls>",
        after=("</tool_calls>",),
        tags=_ARG_KEYS,
    ),
    ToolCallFormat(
        name="hy_v4",
        call=("<tool_call>", CallPlaceholder.WORD, CallPlaceholder.TAGS, "</tool_call>"),
        required_signs=("<tool_calls>", "<arg_key"),
        marker="<tool_calls>",
        after=("</tool_calls>",),
        tags=_ARG_KEYS,
    ),
    ToolCallFormat(
        name="k2_horizon",
        call=("<ifm|tool_call>", CallPlaceholder.WORD, CallPlaceholder.TAGS, "</ifm|tool_call>"),
        required_signs=("<ifm|tool_calls>",),
        marker="<ifm|tool_calls>",
        after=("</ifm|tool_calls>",),
        tags=ArgumentTags(
            "<ifm|arg_key>", "</ifm|arg_key>", "</ifm|arg_value>", "<ifm|arg_value>", "<ifm|arg_value>"
        ),
    ),
    ToolCallFormat(
        name="iquest_q1",
        call=(CallPlaceholder.WORD, CallPlaceholder.TAGS, "</iquest_tool_call>"),
        required_signs=("<iquest_tool_call>",),
        marker="<iquest_tool_call>",
        marker_repeats=True,
        tags=_ARG_KEYS,
    ),
    ToolCallFormat(
        name="glm",
        also=("glm45", "glm47", "glm", "ling3", "poolside_v1", "spark25"),
        call=(CallPlaceholder.WORD, CallPlaceholder.TAGS, "</tool_call>"),
        required_signs=("<tool_call>", "<arg_key>"),
        marker="<tool_call>",
        marker_repeats=True,
        tags=_ARG_KEYS,
    ),
    _dsml("deepseek_v41", "calls", ("｜DSML｜ calls",), " ")._replace(also=("deepseekv41",)),
    _dsml("deepseek_v32", "function_calls", ("｜DSML｜", "function_calls"))._replace(also=("deepseekv32",)),
    _dsml("deepseek_v4", "tool_calls", ("｜DSML｜",))._replace(also=("deepseekv4",)),
    _dsml("gigachat35", "tool_calls", ("｜GCML｜",), token="｜GCML｜"),
    ToolCallFormat(
        name="deepseek_v3",
        also=("deepseekv3",),
        call=(
            "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", CallPlaceholder.WORD, "```json",
            CallPlaceholder.ARGUMENTS, "```", "<｜tool▁call▁end｜>",
        ),
        required_signs=("<｜tool▁call▁begin｜>", "```json"),
        marker="<｜tool▁calls▁begin｜>",
        after=("<｜tool▁calls▁end｜>",),
    ),
    ToolCallFormat(
        name="deepseek_v31",
        also=("deepseekv31",),
        call=(
            "<｜tool▁call▁begin｜>", CallPlaceholder.WORD, "<｜tool▁sep｜>", CallPlaceholder.ARGUMENTS,
            "<｜tool▁call▁end｜>",
        ),
        required_signs=("<｜tool▁call▁begin｜>",),
        token="<｜tool▁calls▁begin｜>",
        marker="<｜tool▁calls▁begin｜>",
        after=("<｜tool▁calls▁end｜>",),
    ),
    ToolCallFormat(
        name="kimi_k2",
        call=(
            "<|tool_call_begin|>", "functions.", CallPlaceholder.WORD, ":", CallPlaceholder.INDEX,
            "<|tool_call_argument_begin|>", CallPlaceholder.ARGUMENTS, "<|tool_call_end|>",
        ),
        required_signs=("<|tool_calls_section_begin|>",),
        token="<|tool_calls_section_begin|>",
        marker="<|tool_calls_section_begin|>",
        after=("<|tool_calls_section_end|>",),
    ),
    ToolCallFormat(
        name="minimax_m2",
        also=("minimax-m2",),
        call=_INVOKE,
        required_signs=("<minimax:tool_call>",),
        marker="<minimax:tool_call>",
        after=("</minimax:tool_call>",),
        tags=_NAMED_PARAMETERS,
    ),
    ToolCallFormat(
        name="dots",
        call=_INVOKE,
        required_signs=("<dots_function_call>",),
        marker="<dots_function_call>",
        after=("</dots_function_call>",),
        tags=_NAMED_PARAMETERS,
    ),
    ToolCallFormat(
        name="minicpm5",
        call=(CallPlaceholder.WORD, '">', CallPlaceholder.TAGS, "</function>"),
        required_signs=('<function name="', '<param name="'),
        marker='<function name="',
        marker_repeats=True,
        tags=ArgumentTags('<param name="', '">', "</param>"),
    ),
    ToolCallFormat(
        name="step3",
        call=(
            "<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", '<steptml:invoke name="', CallPlaceholder.WORD, '">',
            CallPlaceholder.TAGS, "</steptml:invoke>", "<｜tool_call_end｜>",
        ),
        required_signs=("<｜tool_calls_begin｜>",),
        marker="<｜tool_calls_begin｜>",
        after=("<｜tool_calls_end｜>",),
        tags=ArgumentTags('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ),
    ToolCallFormat(
        name="lfm2",
        call=_PYTHON_CALL,
        required_signs=("<|tool_call_start|>",),
        token="<|tool_call_start|>",
        marker="<|tool_call_start|>",
        before=("[",),
        between=(",",),
        after=("]", "<|tool_call_end|>"),
    ),
    ToolCallFormat(
        name="olmo3",
        call=_PYTHON_CALL,
        required_signs=("<function_calls>",),
        marker="<function_calls>",
        after=("</function_calls>",),
    ),
    ToolCallFormat(
        name="plamo3",
        call=(
            "<|plamo:begin_tool_request:plamo|>", "<|plamo:begin_tool_name:plamo|>", CallPlaceholder.WORD,
            "<|plamo:end_tool_name:plamo|>", _PLAMO_BODY, CallPlaceholder.ARGUMENTS,
            "<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>",
        ),
        required_signs=("<|plamo:begin_tool_requests:plamo|>",),
        marker="<|plamo:begin_tool_requests:plamo|>",
        after=("<|plamo:end_tool_requests:plamo|>",),
    ),
    ToolCallFormat(
        name="cohere_command3",
        also=("cohere_command4",),
        call=(
            "{", '"tool_call_id"', ":", '"', CallPlaceholder.INDEX, '"', ",",
            *_json_call("parameters", "tool_name")[1:],
        ),
        required_signs=("<|START_ACTION|>",),
        marker="<|START_ACTION|>",
        before=("[",),
        between=(",",),
        after=("]", "<|END_ACTION|>"),
    ),
    ToolCallFormat(
        name="apertus",
        also=("apertus2509",),
        call=("{", CallPlaceholder.NAME, ":", CallPlaceholder.ARGUMENTS, "}"),
        required_signs=("<|tools_prefix|>",),
        marker="<|tools_prefix|>",
        before=("[",),
        between=(",",),
        after=("]", "<|tools_suffix|>"),
    ),
    ToolCallFormat(
        name="internlm",
        call=("<|plugin|>", *_json_call("arguments"), "<|action_end|>"),
        required_signs=("<|action_start|>", "<|plugin|>", '"arguments"'),
        marker="<|action_start|>",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="interns1",
        call=("<|plugin|>", *_json_call("parameters"), "<|action_end|>"),
        required_signs=("<|action_start|>", "<|plugin|>"),
        marker="<|action_start|>",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="gemma4",
        call=("call:", CallPlaceholder.WORD, "{", CallPlaceholder.LITERALS, "<tool_call|>"),
        required_signs=("<|tool_call>",),
        marker="<|tool_call>",
        marker_repeats=True,
        quote='<|"|>',
    ),
    ToolCallFormat(
        name="functiongemma",
        call=("call:", CallPlaceholder.WORD, "{", CallPlaceholder.LITERALS, "<end_function_call>"),
        required_signs=("<start_function_call>",),
        marker="<start_function_call>",
        marker_repeats=True,
        quote="<escape>",
    ),
    ToolCallFormat(
        name="gigachat3",
        call=_json_call("arguments"),
        required_signs=("<|function_call|>",),
        marker="<|function_call|>",
        parallel_calls=False,
    ),
    ToolCallFormat(
        name="longcat",
        call=(*_json_call("arguments"), "</longcat_tool_call>"),
        required_signs=("<longcat_tool_call>",),
        marker="<longcat_tool_call>",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="granite-20b-fc",
        call=_json_call("arguments"),
        required_signs=("<function_call>",),
        excluding_signs=_XML_ARGUMENT_SIGNS,
        marker="<function_call>",
        marker_repeats=True,
    ),
    _json_list("granite", "<|tool_call|>", ""),
    _json_list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
    _json_list("phi4_mini_json", "functools", "", "functools["),
    _json_list("hunyuan_a13b", "<tool_calls>", "</tool_calls>")._replace(also=("jamba",)),
    ToolCallFormat(
        name="hermes",
        also=("qwen3_json", "qwen25", "qwen", "granite4", "trinity", "ernie45"),
        call=(*_json_call("arguments"), "</tool_call>"),
        required_signs=("<tool_call>",),
        excluding_signs=_XML_ARGUMENT_SIGNS,
        marker="<tool_call>",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="llama4_pythonic",
        call=_PYTHON_CALL,
        also=("pythonic",),
        required_signs=("[func_name1(",),
        marker="<|python_start|>",
        bare=True,
        before=("[",),
        between=(",",),
        after=("]",),
    ),
    ToolCallFormat(
        name="llama3",
        also=("llama3_json", "llama4_json"),
        call=_json_call("parameters"),
        required_signs=('"parameters"',),
        excluding_signs=(*_XML_ARGUMENT_SIGNS, "<atem:"),
        marker="<|python_tag|>",
        bare=True,
        between=(";",),
        parallel_calls=False,  # the family's templates reject a message with more than one call
    ),
)  # fmt: skip
# Only by name: their templates show nothing that others do not have.
NAMED_FORMATS = (
    ToolCallFormat(
        name="xlam", call=_json_call("arguments"), bare=True, before=("[",), between=(",",), after=("]",)
    ),
)  # fmt: skip
# For templates without any of them: TGI's own format, and the one that the default `tool_prompt` asks for.
FALLBACK_FORMATS = (
    ToolCallFormat(
        name="tgi",
        call=("{", '"function"', ":", "{", '"_name"', ":", CallPlaceholder.NAME, CallPlaceholder.FIELDS, "}"),
        bare=True,
        between=("\n",),
        parallel_calls=False,
    ),
    ToolCallFormat(
        name="named", call=_json_call("parameters"), bare=True, between=("\n",), parallel_calls=False
    ),
)  # fmt: skip


# For answers that may begin as the calls of a format: its variant in which calls have their marker.
MARKED_FORMATS = {
    known.name: known._replace(name=f"{known.name}-marked", bare=False)
    for known in TOOL_CALL_FORMATS
    if known.bare and known.marker
}
FORMATS_BY_NAME = {
    known.name: known
    for known in (*TOOL_CALL_FORMATS, *NAMED_FORMATS, *FALLBACK_FORMATS, *MARKED_FORMATS.values())
}  # fmt: skip


class ReasoningTags(NamedTuple):
    """The tags around reasoning."""

    open: str
    close: str


REASONING_TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningTags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<mm:think>", "</mm:think>"),
    ReasoningTags("<ifm|think>", "</ifm|think>"),
    ReasoningTags("Here is my thought process:", "Here is my response:"),
)
# Around the text of an answer behind its reasoning; neither is shown. By names of parsers.
TEXT_TAGS = {"ernie45": ("<response>", "</response>"), "hunyuan_a13b": ("<answer>", "</answer>")}
# Names of reasoning parsers in vLLM and SGLang. harmony (openai_gptoss) has channels in place of tags.
REASONING_PARSERS: dict[str, ReasoningTags | None] = {
    **dict.fromkeys(
        (
            "deepseek-r1", "deepseek-v3", "deepseek-v4", "deepseek-v41", "deepseek_r1", "deepseek_v3", "deepseek_v4",
            "deepseek_v41", "dots", "ernie45", "gigachat35", "glm45", "glm47", "granite_thinking_parser", "holo2",
            "hunyuan", "hunyuan_a13b", "hy_v3", "hy_v4", "interns1", "iquest_q1", "kimi_k2", "ling3", "mimo",
            "minimax", "minimax_m2", "nanbeige",
            "nemotron_3", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "qwen3-thinking", "step3", "step3p5",
            "step5", "think",
        ),
        REASONING_TAGS[0],
    ),
    "mistral": REASONING_TAGS[1],
    "seed_oss": REASONING_TAGS[2],
    "cohere_command3": REASONING_TAGS[3],
    "cohere_command4": REASONING_TAGS[3],
    "apertus": REASONING_TAGS[4],
    "plamo3": REASONING_TAGS[5],
    "gemma4": REASONING_TAGS[6],
    "minimax_m3": REASONING_TAGS[7],
    "minimax-m3": REASONING_TAGS[7],
    "k2_horizon": REASONING_TAGS[8],
    "granite": REASONING_TAGS[9],
    "openai_gptoss": None,
    "gpt-oss": None,
    "none": None,
}  # fmt: skip


class AnswerFormat(NamedTuple):
    """What an answer may contain besides text."""

    call_formats: tuple[ToolCallFormat, ...] = ()
    reasoning_tags: ReasoningTags | None = None
    starts_in_reasoning: bool = False  # the prompt ends with the opening tag or within reasoning
    text_has_grammar: bool = False  # calls stand only at the beginning; markers within text have no meaning
    channels: bool = False  # the answer consists of messages with headers, see Channels
    # The types of the arguments of each tool that may be called (see arguments.argument_types); None: any tool.
    tools: Mapping[str, Mapping[str, list[str]]] | None = None
    text_tags: tuple[str, str] | None = None  # the text may stand between these, of TEXT_TAGS


def reasoning_sampling(
    answer_format: AnswerFormat, tokens: "FormatTokens", budget: int, vocab_size: int
) -> dict[str, Any]:
    """The fields of SamplingParams that end the reasoning of an answer after this many tokens; none without markers
    that a model with this many token ids can write."""
    tags = answer_format.reasoning_tags
    if answer_format.channels:
        tags = ReasoningTags(Channels.REASONING_HEADER, Channels.END)
    if tags is None:
        return {}
    close_ids = tokens.ids_of(tags.close)
    open_ids = [] if answer_format.starts_in_reasoning else tokens.ids_of(tags.open)
    if any(token >= vocab_size for token in (*open_ids, *close_ids)):
        return {}
    return {
        "reasoning_budget": budget,
        "reasoning_open_ids": pack_column(INT32, open_ids),
        "reasoning_close_ids": pack_column(INT32, close_ids),
        "reasoning_special_ids": pack_column(INT32, sorted(tokens.ids & {*open_ids, *close_ids})),
        "reasoning_repeats": answer_format.channels,
    }


def call_prefix(call_format: ToolCallFormat) -> tuple[str, ...]:
    """The literal pieces that identify a call without a marker: up to two, such as the bracket and the first key."""
    pieces = (*call_format.before, *call_format.call)
    variable = next(at for at, piece in enumerate(pieces) if isinstance(piece, CallPlaceholder))
    return pieces[: min(variable, 2 + len(call_format.before))]


# Recognition


@cache
def detect_tool_call_format(template: str, tokens: frozenset[str] = frozenset()) -> ToolCallFormat | None:
    """The format of the calls that a chat template renders, or that a vocabulary with these tokens is made for; None if
    it is none of TOOL_CALL_FORMATS."""
    known = next((known for known in TOOL_CALL_FORMATS if _has_signs(known, template)), None)
    if known is None or known.bare:  # the template shows nothing, or little
        known = next((other for other in TOOL_CALL_FORMATS if other.token in tokens), known)
    return known


def _has_signs(known: ToolCallFormat, template: str) -> bool:
    return all(sign in template for sign in known.required_signs) and not any(
        sign in template for sign in known.excluding_signs
    )


@cache
def detect_reasoning_tags(template: str) -> ReasoningTags | None:
    """The reasoning tags that a chat template contains."""
    return next((tags for tags in REASONING_TAGS if tags.open in template or tags.close in template), None)


class FormatDetector:
    """Finds the formats of one model's answers: what the settings name, else what its files describe or show."""

    def __init__(
        self,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        tokens: Collection[str] = (),
        described: AnswerFormat | None = None,
    ) -> None:
        """`tool_call_parser` and `reasoning_parser` are values of the settings. `tokens` are the added tokens of the
        vocabulary; `described` is what a response template says."""
        self._tool_call_parser = _own_name(tool_call_parser)
        self._reasoning_parser = _own_name(reasoning_parser)
        self._tokens = frozenset(tokens) & {known.token for known in TOOL_CALL_FORMATS if known.token}
        self._names = suffixed_tokens(tokens)
        self.described = described

    @property
    def is_named(self) -> bool:
        """Whether a setting names the format of calls."""
        return self._tool_call_parser != "auto"

    def call_format(self, template: str) -> ToolCallFormat | None:
        """The format of calls; None if it is unknown."""
        known = self._call_format(self._without_suffix(template))
        return None if known is None else known.spelled(self._names)

    def _without_suffix(self, template: str) -> str:
        for name, token in self._names.items():
            template = template.replace(token, name)
        return template

    def _call_format(self, template: str) -> ToolCallFormat | None:
        described = self.described.call_formats if self.described is not None else ()
        if self._tool_call_parser not in ("auto", RESPONSE_TEMPLATE):
            rows = formats_of(self._tool_call_parser)
            own = [known for known in rows if known.name == self._tool_call_parser]
            return next((known for known in rows if _has_signs(known, template)), (own or rows)[0])
        if described and self._tool_call_parser == RESPONSE_TEMPLATE:
            return described[0]
        return detect_tool_call_format(template, self._tokens) or next(iter(described), None)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        """The tags of reasoning; None if there are none."""
        tags = self._reasoning_tags(self._without_suffix(template))
        return None if tags is None else ReasoningTags(*(_spelled(tag, self._names) for tag in tags))

    def _reasoning_tags(self, template: str) -> ReasoningTags | None:
        described = self.described.reasoning_tags if self.described is not None else None
        if self._reasoning_parser not in ("auto", RESPONSE_TEMPLATE):
            return REASONING_PARSERS[self._reasoning_parser]
        if described is not None and self._reasoning_parser == RESPONSE_TEMPLATE:
            return described
        return None if self.channels(template) else detect_reasoning_tags(template) or described

    def text_tags(self, template: str) -> tuple[str, str] | None:
        """The tags around the text of answers: of a named parser, or those of the form of calls that the template
        shows, too."""
        known = self.call_format(template)
        shown = () if known is None else (known.name, *known.also)
        for name, tags in TEXT_TAGS.items():
            named = name in (self._tool_call_parser, self._reasoning_parser)
            if named or (name in shown and all(tag in template for tag in tags)):
                return tags
        return None

    def channels(self, template: str) -> bool:
        """Whether answers consist of messages with headers."""
        known = self.call_format(template)
        return known is not None and known.channels


# The name of the format that tokenizer_config.json describes, as vLLM calls it, and as SGLang does; Beam's has it.
RESPONSE_TEMPLATE = "hf"
RESPONSE_TEMPLATE_NAMES = (RESPONSE_TEMPLATE, "response_template", "beam")


def _own_name(name: str) -> str:
    return RESPONSE_TEMPLATE if name in RESPONSE_TEMPLATE_NAMES else name


def formats_of(name: str) -> list[ToolCallFormat]:
    """The rows that a name stands for. Raises KeyError."""
    rows = [known for known in (*TOOL_CALL_FORMATS, *NAMED_FORMATS) if name == known.name or name in known.also]
    if not rows:
        raise KeyError(name)
    return rows


# Format pieces that are special tokens: ids in grammars, stand-in characters in parsed answers

# In the text that is parsed, a lone surrogate stands for each hidden token (most special tokens); decoded text never
# contains one. All hidden tokens that are no piece of a format share _OTHER_STAND_IN, so that an answer which begins
# with one does not begin with a call.
_FIRST_STAND_IN = 0xD800
_OTHER_STAND_IN = "\udfff"
STAND_IN = re.compile("[\ud800-\udfff]")


class FormatTokens:
    """The format pieces, and the parts of pieces, that a vocabulary has as special tokens.

    `ids` are their token ids, `other_ids` those of all other special tokens except EOS, in ascending order.
    """

    def __init__(self, vocabulary: Vocabulary, described: AnswerFormat | None = None) -> None:
        pieces = {piece for tags in REASONING_TAGS for piece in tags} | {*Channels.PIECES}
        pieces.update(tag for tags in TEXT_TAGS.values() for tag in tags)
        for known in (*TOOL_CALL_FORMATS, *(() if described is None else described.call_formats)):
            pieces.update(known.pieces)
        if described is not None and described.reasoning_tags is not None:
            pieces.update(described.reasoning_tags)
        added = vocabulary.tokenizer.get_added_tokens_decoder()
        pieces.update(suffixed_tokens([token.content for token in added.values()]).values())
        special = ((added[one].content, one) for one in sorted(vocabulary.special_ids) if one in added)
        text = "\n".join(sorted(pieces))
        self._ids = {token: one for token, one in special if token and token in text}
        self._stand_ins = {token: chr(_FIRST_STAND_IN + at) for at, token in enumerate(self._ids)}
        self._stand_ins_by_id = {token_id: self._stand_ins[token] for token, token_id in self._ids.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._tokens = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self.ids = frozenset(self._stand_ins_by_id)
        self.eos_ids = vocabulary.eos_ids
        self._encode: Callable[[str], list[int]] = lambda text: (
            vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        )
        self.other_ids = sorted(vocabulary.special_ids - self._stand_ins_by_id.keys() - vocabulary.eos_ids)

    def parts(self, piece: str) -> list[str | int]:
        """A piece as texts and ids of special tokens."""
        if self._tokens is None:
            return [piece] if piece else []
        return [self._ids.get(part, part) for part in self._tokens.split(piece) if part]

    def ids_of(self, piece: str) -> list[int]:
        """The token ids that write a piece."""
        ids: list[int] = []
        for part in self.parts(piece):
            ids += self._encode(part) if isinstance(part, str) else [part]
        return ids

    def token_id(self, piece: str) -> int | None:
        """The id of a piece that is a special token as a whole."""
        return self._ids.get(piece)

    def piece_text(self, piece: str) -> str:
        """How a piece appears in the text that is parsed: with stand-ins for its special tokens."""
        return piece if self._tokens is None else self._tokens.sub(lambda found: self._stand_ins[found[0]], piece)

    def stand_in(self, token_id: int) -> str:
        """The stand-in of a hidden token in the text that is parsed."""
        return self._stand_ins_by_id.get(token_id, _OTHER_STAND_IN)
