"""The tools that a chat may call: checked, and made into the grammar of its answer."""

import json
from typing import Any

from tgi.tokenizer.answer.formats import Answer
from tgi.tokenizer.answer.lark import Tool, Writer
from tgi.tokenizer.answer.marks import Marks
from tgi.tokenizer.chat import Chat
from tgi.tokenizer.grammar import MOST_BYTES, GrammarError, GrammarReader, checked, schema_bodies
from tgi.tokenizer.vocabulary import Vocabulary

# As many as OpenAI takes: the time that a grammar takes grows with them.
MOST_TOOLS = 128
# Names of properties in the schemas of all of them: half a second or so, where each call may be written in two forms.
MOST_PROPERTIES = 2000
# A schema with one of these does not say by `properties` alone what its object may hold.
_NOT_PLAIN = {
    "$ref", "allOf", "anyOf", "const", "enum", "maxProperties", "minProperties", "oneOf", "patternProperties",
}  # fmt: skip


class AnswerGrammars:
    """Makes the grammars of answers; may be called from one thread at a time. They are kept, refusals too."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.marks = Marks(vocabulary)
        self._reader = GrammarReader(vocabulary)

    def read(self, asked: bytes, chat: Chat | None) -> str:
        """What a worker reads of the grammar of an answer; "" of none. `asked` is what the client gave. Raises
        GrammarError."""
        if chat is not None and chat.tools:
            if asked:
                raise GrammarError("grammar is not valid: it cannot be used together with tools")
            return self._calls(chat)
        grammar = self._reader.read(asked)
        answer = None if chat is None else chat.answer
        return Writer(self.marks).reasoned(answer, grammar) if grammar and answer is not None else grammar

    def _calls(self, chat: Chat) -> str:
        if (count := len(chat.tools)) > MOST_TOOLS:
            raise GrammarError(f"`tools` is not valid: at most {MOST_TOOLS} tools may be given. Given: {count}")
        described = json.dumps([chat.tools, chat.answer, chat.several]).encode()
        if len(described) > MOST_BYTES:
            raise GrammarError(
                f"`tools` is not valid: it must have at most {MOST_BYTES} bytes. Given: {len(described)}"
            )
        key = b"must " + described if chat.required else described
        try:
            return self._reader.kept(key, lambda: self._made(chat, described))
        except RecursionError:
            raise GrammarError("`tools` is not valid: it is nested too deeply") from None

    def _made(self, chat: Chat, described: bytes) -> str:
        tools = [_tool(name, schema) for name, schema in chat.tools]
        answer = chat.answer or Answer()
        for tool in tools:
            if any(not format.can_tell(tool.name) for format in answer.formats):
                raise GrammarError(
                    f"`tools` is not valid: {tool.name!a} cannot be the name of a tool in this model's form of calls"
                )
        if sum(_properties(schema) for _, schema in chat.tools) > MOST_PROPERTIES:
            raise GrammarError(
                f"`tools` is not valid: their `properties` have more than {MOST_PROPERTIES} names in all"
            )

        def check() -> str:
            self._check(answer, tools, chat.several)
            return ""

        self._reader.kept(b"check " + described, check)
        return Writer(self.marks).calls(answer, tools, chat.several, chat.required)

    def _check(self, answer: Answer, tools: list[Tool], several: bool | None) -> None:
        """Whether a table without special tokens can write calls; if not, whose tool's fault it is."""

        def fault(tools: list[Tool]) -> str:
            return self._reader.fault(Writer(self.marks, only_text=True).calls(answer, tools, several, True))

        answer = Answer(answer.formats)  # reasoning adds nothing that could be wrong
        if together := fault(tools):
            for tool in tools:
                if alone := fault([tool]):
                    raise GrammarError(f"tool `{tool.name}`: cannot compile regex from schema: {alone}")
            raise GrammarError(f"`tools` is not valid: all tools together cannot be compiled: {together}")


def _tool(name: str, given: Any) -> Tool:
    """A tool with this schema of its arguments, which are an object whatever the schema leaves open."""
    if not name or name != name.encode(errors="ignore").decode():
        raise GrammarError(f"`tools` is not valid: {name!a} cannot be the name of a tool")
    if isinstance(given, dict) and given.get("additionalProperties") == "true":
        given = {**given, "additionalProperties": True}  # as TGI wants it said
    try:
        schema = checked({} if given is None or given is True else given)
    except GrammarError as error:
        raise GrammarError(f"tool `{name}`: {error}") from None
    kinds = schema.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise GrammarError(f"tool `{name}`: grammar is not valid: `parameters` must describe an object")
    schema["type"] = "object"
    return Tool(name, _body(schema), _fields(name, schema))


def _fields(name: str, schema: dict[str, Any]) -> str:
    properties = schema.get("properties", {})
    if _NOT_PLAIN & set(schema) or "_name" in properties:
        return ""
    required = ["_name", *schema.get("required", ())]
    return _body({**schema, "properties": {"_name": {"const": name}, **properties}, "required": required})


def _properties(schema: Any) -> int:
    """How many names its `properties` have, at all depths."""
    if isinstance(schema, list):
        return sum(map(_properties, schema))
    if not isinstance(schema, dict):
        return 0
    named = schema.get("properties")
    return (len(named) if isinstance(named, dict) else 0) + sum(map(_properties, schema.values()))


def _body(schema: dict[str, Any]) -> str:
    return json.dumps(schema_bodies(schema)[0])
