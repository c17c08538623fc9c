"""Chat templates in the style of model families with tool calls, and the format of their calls."""

import json
from functools import cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from scripts.make_model import SPECIAL_TOKENS
from tests.tokenizer.vocabularies import byte_level
from tgi.tokenizer.vocabulary import Vocabulary

MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]


@cache
def marked() -> Vocabulary:
    """A byte-level vocabulary with the markers of all families as special tokens."""
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_special_tokens(MARKERS)
    return Vocabulary(tokenizer, SPECIAL_TOKENS, [2])


VOCABULARIES = {"text": byte_level, "special": marked}

HERMES = """
{%- if tools %}<|system|># Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>
{%- else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# Reasons unless `enable_thinking` is false.
THINKING = (
    HERMES.replace(
        "{{ m.content or",
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or",
    )
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
LLAMA = """
{%- if tools %}<|system|>Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MISTRAL = """
{%- for m in messages %}
{%- if m.role == 'user' and tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"""
ARGS = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls -%}
[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"""
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


class Family(NamedTuple):
    """`each` is a call, with NAME and ARGS (or FIELDS) for its name and arguments."""

    template: str
    each: str
    between: str = ""
    before: str = ""
    after: str = ""
    mixes: bool = True  # whether text may precede calls
    usual: bool = True  # whether several calls are allowed by default

    def write(self, *calls: tuple[str, str]) -> str:
        """An answer with these calls: the name, and the arguments as JSON."""
        return self.before + self.between.join(self._one(*call) for call in calls) + self.after

    def _one(self, name: str, arguments: str) -> str:
        fields = arguments[1:-1] and f", {arguments[1:-1]}"
        return (
            self.each.replace("NAME", name)
            .replace("FIELDS", fields)
            .replace("ARGS", arguments)
            .replace("[args]", "[ARGS]")
        )


_HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
FAMILIES = {
    "hermes": Family(HERMES, _HERMES, "\n"),
    "thinking": Family(THINKING, _HERMES, "\n"),
    "llama": Family(LLAMA, '{"name": "NAME", "parameters": ARGS}', "; ", mixes=False, usual=False),
    "python-tag": Family(LLAMA, '{"name": "NAME", "parameters": ARGS}', "; ", "<|python_tag|>", usual=False),
    "mistral": Family(MISTRAL, '{"name": "NAME", "arguments": ARGS}', ", ", "[TOOL_CALLS] [", "]"),
    "mistral-args": Family(ARGS, "[TOOL_CALLS]NAME[args]ARGS"),
    "named": Family(PLAIN, '{"name": "NAME", "parameters": ARGS}', "\n", mixes=False, usual=False),
    "tgi": Family(PLAIN, '{"function": {"_name": "NAME"FIELDS}}', "\n", mixes=False, usual=False),
}


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 7]}},
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
SUN = ("weather", '{"city": "Ul\\"}m", "days": 2}')
NOW = ("time", "{}")


def chat(tools: list[dict[str, Any]] | None = None, **fields: Any) -> bytes:
    """A chat as the api sends it."""
    given = TOOLS if tools is None else tools
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "tools": given, **fields}).encode()
