"""Grammars of arguments that are not one JSON object: values between tags, and Python's keyword arguments.

LarkRules names the parts of one grammar. A text value has no quotes: it ends with its closing tag, which it cannot
contain. A value is written as a text or as JSON according to its types, as the parser reads it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from tgi.tokenizer.answers.arguments import JSON_TYPES, is_never_text, is_text, resolve, value_types
from tgi.tokenizer.answers.formats import MAX_BARE_WORD, WHITESPACE, ArgumentTags, FormatTokens
from tgi.tokenizer.structured_output.json_schema import MAX_INTEGER
from tgi.tokenizer.structured_output.json_schema_lark import field_sequence

# Says nothing about what is valid.
_ANNOTATIONS = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "example", "examples",
    "nullable", "readOnly", "title", "type", "writeOnly", "x-guidance",
}  # fmt: skip
# Of a whole object of arguments, enforced or without a meaning for its values.
_OBJECT_KEYWORDS = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$ref"}
# Of a text without quotes.
_TEXT_KEYWORDS = _ANNOTATIONS | {"enum", "const", "minLength", "maxLength", "pattern", "$ref"}
_IDENTIFIER = re.compile(r"\w+")
# A text in Python's single quotes.
_PYTHON_TEXT = r"""/'([^'\\\x00-\x1F]|\\['"\\nrt])*'/"""

# The library's entry of a grammar for a value of this schema.
SchemaEntry = Callable[[dict[str, Any]], str]


class LarkRules:
    """The rules, terminals and further grammars of one grammar. Methods return names, or the text of a rule's body."""

    def __init__(self, format_tokens: FormatTokens | None) -> None:
        """None writes special tokens as text, so that the grammar can be tried out with a table without them."""
        self._format_tokens = format_tokens
        self._rules: dict[str, str] = {}  # names by body
        self._terminals: dict[str, str] = {}  # names by body
        self._grammars: dict[str, str] = {}  # names of further entries of `grammars`, by entry

    def definitions(self) -> str:
        """All rules and terminals."""
        return "".join(f"{name}{body}\n" for body, name in [*self._terminals.items(), *self._rules.items()])

    def grammars(self) -> list[dict[str, Any]]:
        """The further entries of `grammars`."""
        return [{**json.loads(entry), "name": name} for entry, name in self._grammars.items()]

    def rule(self, body: str, options: str = "") -> str:
        """The rule with this body."""
        return self._rules.setdefault(f"{options}: {body}", f"r{len(self._rules)}")

    def recursive_rule(self, body: Callable[[str], str]) -> str:
        """A rule whose body is made of its own name."""
        name = f"again{len(self._rules)}"
        return self._rules.setdefault(f": {body(name)}", name)

    def terminal(self, body: str) -> str:
        """The terminal with this body."""
        return self._terminals.setdefault(f": {body}", f"T{len(self._terminals)}")

    def object(self, grammar: str) -> str:
        """The rule that refers to a separate entry of `grammars`."""
        return self.rule(f"@{self._grammars.setdefault(grammar, f'object{len(self._grammars)}')}")

    def parts(self, piece: str) -> list[str | int]:
        """A piece as texts and ids of special tokens."""
        return [piece] if self._format_tokens is None else self._format_tokens.parts(piece)

    def is_special(self, piece: str) -> bool:
        """Whether a piece contains a special token."""
        return any(isinstance(part, int) for part in self.parts(piece))

    def piece(self, piece: str) -> str:
        """A literal piece."""
        return " ".join(_quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in self.parts(piece))

    def text_up_to(self, text: str, marker: str) -> str:
        """Text of this terminal up to the first such marker, and the marker."""
        first, *others = self.parts(marker)
        if isinstance(first, int):
            return f"{text} {self.piece(marker)}"
        if others:  # the special token decides where the text ends
            rest = marker.removeprefix(first)
            return f"{self.terminal(f'{text} {_quoted(first)}')} {self.piece(rest)}"
        return self.rule(f"{text} {_quoted(marker)}", "[lazy]")


class ArgumentRules:
    """Writes the arguments of tools into a grammar."""

    def __init__(self, lark: LarkRules, entry: SchemaEntry) -> None:
        self._lark = lark
        self._entry = entry

    def tags(self, tags: ArgumentTags, schema: dict[str, Any], types: Mapping[str, list[str]]) -> str:
        """One element per argument, in the order of `properties`; "" if there are none."""
        properties, required, others = _members(schema, schema)
        elements = []
        for name in properties | required:
            if tags_can_express(tags, name):
                value = properties.get(name, True)
                element = self._element(tags, _quoted(name), value, schema, types.get(name))
                elements.append(element if name in required else f"({element})?")
        if others:
            key = r"/[^<>=\"'\x00-\x20]{1,64}/"
            if known := " | ".join(map(_quoted, properties | required)):
                key = f"({key} & ~({known}))"
            elements.append(f"({self._element(tags, key, True, schema, None)})*")
        return self._lark.rule(" ".join(elements)) if elements else ""

    def _element(self, tags: ArgumentTags, key: str, value: Any, root: dict[str, Any], types: list[str] | None) -> str:
        options = []  # how the value begins, and the rest
        if not is_never_text(types):
            options.append((tags.text_start, self._text(tags, value, root, types)))
        if is_never_text(types) or (tags.text_start != tags.json_start and not is_text(types)):
            options.append((tags.json_start, self._json(tags, value, root, types)))
        head: list[str | tuple[str]] = [("GAP",), tags.open, (key,), tags.key_end]
        if tags.text_start == tags.json_start:
            ((start, rest),) = options
            gap: list[str | tuple[str]] = [("GAP",), start] if start else []
            opening = self._join(*head, *gap, "\n" if tags.own_lines else "")
            return self._lark.rule(f"{opening} {rest}")
        choices = (f"{self._lark.piece(start)} {rest}" for start, rest in options)
        return self._lark.rule(f"{self._join(*head)} ({' | '.join(choices)})")

    def _json(self, tags: ArgumentTags, value: Any, root: dict[str, Any], types: list[str] | None) -> str:
        schema = _with_definitions(value, root)
        if not is_never_text(types) and tags.text_start != tags.json_start:
            schema = {"type": [one for one in types or JSON_TYPES if one != "string"]}
        options = [self._lark.object(self._entry(schema)), *_constants(value, root, types)]
        close = ("\n" if tags.own_lines else "") + tags.close
        return f"({' | '.join(options)}) {self._lark.piece(close)}"

    def _text(self, tags: ArgumentTags, value: Any, root: dict[str, Any], types: list[str] | None) -> str:
        """A value without quotes, and its closing tag."""
        close = ("\n" if tags.own_lines else "") + tags.close
        return self.text_before(close, tags.close, resolve(value, root), types)

    def text_before(self, close: str, tag: str, target: Any, types: list[str] | None) -> str:
        """A text and what closes it; it cannot contain this tag."""
        first, *others = self._lark.parts(close)
        text = f"ANY & ~(ANY {_quoted(tag)} ANY)"
        if (listed := _listed(target)) is not None:
            texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in listed]
            text = " | ".join(_quoted(one) for one in texts if tag not in one) or text
        elif is_text(types) and isinstance(target, dict):
            text = " & ".join([text, *_text_limits(target)])
        if isinstance(first, int):
            return f"{self._lark.terminal(text)} {self._lark.piece(close)}"
        rest = close.removeprefix(first)
        terminal = self._lark.terminal(f"({text}) {_quoted(first)}")
        return f"{terminal} {self._lark.piece(rest)}" if others else terminal

    def _join(self, *pieces: "str | tuple[str]") -> str:
        """Pieces without anything between them; adjacent texts become one terminal. A tuple has the body of one."""
        run: list[str] = []
        written: list[str] = []

        def end_run() -> None:
            if run:
                written.append(self._lark.terminal(" ".join(run)))
                run.clear()

        for piece in pieces:
            if isinstance(piece, tuple):
                run.append(piece[0])
                continue
            for part in self._lark.parts(piece):
                if isinstance(part, str):
                    run.append(_quoted(part))
                else:
                    end_run()
                    written.append(f"<[{part}]>")
        end_run()
        return " ".join(written)

    def keywords(self, schema: dict[str, Any], types: Mapping[str, list[str]]) -> str:
        """Python's keyword arguments, in the order of `properties`."""
        properties, required, others = _members(schema, schema)
        fields = []
        for name in properties | required:
            if _IDENTIFIER.fullmatch(name):
                value = self._keyword_value(properties.get(name, True), schema, types.get(name))
                key = self._lark.terminal(f'{_quoted(name)} GAP "=" GAP')
                fields.append((self._lark.rule(f"{key} {value}"), name in required))
        comma = self._lark.terminal('GAP "," GAP')
        if others:
            key = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
            if known := " | ".join(map(_quoted, properties | required)):
                key = f"({key} & ~({known}))"
            key = self._lark.terminal(f'{key} "="')
            pair = self._lark.rule(f"{key} {self._keyword_value(True, schema, None)}")
            fields.append((f"{pair} ({comma} {pair})*", False))
        return self._lark.rule(field_sequence(fields, comma, self._lark.rule)) if fields else ""

    def _keyword_value(self, value: Any, root: dict[str, Any], types: list[str] | None) -> str:
        options = [self._lark.object(self._entry(_with_definitions(value, root))), *_constants(value, root, types)]
        if not is_never_text(types):
            target = resolve(value, root)
            listed = _listed(target)
            if listed is not None:
                texts = [one for one in listed if isinstance(one, str) and not re.search(r"['\\\x00-\x1f]", one)]
                options += [_quoted(f"'{one}'") for one in texts]
            elif not isinstance(target, dict) or not set(target) - _ANNOTATIONS:
                options.append(self._lark.terminal(_PYTHON_TEXT))
        return f"({' | '.join(options)})"


class LiteralRules:
    """Writes the arguments of tools as objects whose keys have no quotes and whose texts stand between two quotes of
    the model's own."""

    def __init__(self, lark: LarkRules, arguments: ArgumentRules, entry: SchemaEntry, quote: str) -> None:
        self.unenforced: list[str] = []  # pointers to keywords
        self._lark = lark
        self._arguments = arguments
        self._entry = entry
        self._quote = quote

    def members(self, schema: dict[str, Any]) -> str:
        """The members of the object of arguments, and its closing brace."""
        return self._members(schema, schema, "#", 0)

    def _members(self, schema: Any, root: dict[str, Any], path: str, depth: int) -> str:
        properties, required, others = _members(schema, root)
        fields = []
        for name in properties | required:
            if literals_can_express(name):
                pointer = f"{path}/properties/{_pointer_token(name)}"
                value = self._value(properties.get(name, True), root, pointer, depth + 1)
                key = self._lark.terminal(_quoted(f"{name}:"))
                fields.append((self._lark.rule(f"{key} {value}"), name in required))
        if others:
            if _constraints(others):
                self.unenforced.append(f"{path}/additionalProperties")
            known = "".join(f" & ~{_quoted(name)}" for name in properties | required)
            pair = self._lark.rule(f"{self._lark.terminal(f'({_LITERAL_KEY}{known}) {_COLON}')} {self._any()}")
            fields.append((f'{pair} ("," {pair})*', False))
        self._report(schema, root, path, _OBJECT_KEYWORDS)
        return self._lark.rule(f'{field_sequence(fields, _COMMA, self._lark.rule)} "}}"')

    def _value(self, value: Any, root: dict[str, Any], path: str, depth: int) -> str:
        target = resolve(value, root)
        types = value_types(value, root)
        if depth > MAX_LITERAL_DEPTH or not isinstance(target, dict) or types is None:
            self.unenforced += [path] * bool(_constraints(target))
            return self._any()
        listed = _listed(target)
        options = []
        scalars = [one for one in types if one not in ("string", "array", "object")]
        if "string" in types:
            texts = {"enum": [one for one in listed if isinstance(one, str)]} if listed is not None else target
            options.append(self._text(texts))
        if scalars:
            kept = {word: one for word, one in target.items() if word in _NUMBER_KEYWORDS}
            if listed is not None:
                kept = {"enum": [one for one in listed if not isinstance(one, (str, list, dict))]}
            options.append(self._lark.object(self._entry({"type": scalars, **kept})))
        if "array" in types:
            item = self._value(target.get("items", True), root, f"{path}/items", depth + 1)
            least, most = target.get("minItems", 0), target.get("maxItems")
            further = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else max(0, most - 1)}}}'
            items = further if least else f"({further})?"
            options.append('"[" "]"' if most == 0 else f'"[" {items} "]"')
        if "object" in types:
            options.append(f'"{{" {self._members(target, root, path, depth)}')
        self._report(target, root, path, _VALUE_KEYWORDS)
        return self._lark.rule(" | ".join(options))

    def _text(self, schema: dict[str, Any]) -> str:
        quote = self._quote
        return f"{self._lark.piece(quote)} {self._arguments.text_before(quote, quote, schema, ['string'])}"

    def _any(self) -> str:
        scalar = self._lark.object(self._entry({"type": ["integer", "number", "boolean", "null"]}))
        text, key = self._text({}), self._lark.terminal(f"{_LITERAL_KEY} {_COLON}")
        return self._lark.recursive_rule(
            lambda name: (
                f'{scalar} | {text} | "[" ({name} ("," {name})*)? "]" | "{{" ({key} {name} ("," {key} {name})*)? "}}"'
            )
        )

    def _report(self, schema: Any, root: dict[str, Any], path: str, enforced: Set[str]) -> None:
        target = resolve(schema, root)
        self.unenforced += [f"{path}/{word}" for word in _constraints(target) if word not in enforced]


# Depth of objects and lists whose schemas are enforced.
MAX_LITERAL_DEPTH = 6
_COMMA, _COLON = '","', '":"'
_LITERAL_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_NUMBER_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_VALUE_KEYWORDS = _OBJECT_KEYWORDS | _TEXT_KEYWORDS | _NUMBER_KEYWORDS | {"items", "minItems", "maxItems"}


def literals_can_express(name: str) -> bool:
    """Whether a name can be a key without quotes."""
    return len(name) <= MAX_BARE_WORD and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.\-]*", name) is not None


def tags_can_express(tags: ArgumentTags, name: str) -> bool:
    """Whether the parser can recover this name of an argument."""
    return bool(name) and name == name.strip(WHITESPACE) and tags.key_end not in name and "\n" not in name


def keywords_can_express(name: str) -> bool:
    """Whether a name can be that of a keyword argument in Python."""
    return _IDENTIFIER.fullmatch(name) is not None


def unenforced(schema: dict[str, Any], types: Mapping[str, list[str]], as_text: bool) -> list[str]:
    """Pointers to the keywords of a checked schema that a call without a JSON object does not enforce. `as_text`:
    values may be texts without quotes."""
    target = resolve(schema, schema)
    found = [f"#/{word}" for word in (target if isinstance(target, dict) else ()) if word not in _OBJECT_KEYWORDS]
    properties, _, others = _members(schema, schema)
    if isinstance(others, dict) and set(others) - {"description", "title"}:
        found.append("#/additionalProperties")
    for name, value in properties.items() if as_text else ():
        words = resolve(value, schema)
        if is_never_text(types.get(name)) or not isinstance(words, dict):
            continue
        allowed = _TEXT_KEYWORDS if is_text(types.get(name)) else _ANNOTATIONS | {"enum", "const", "$ref"}
        pointer = _pointer_token(name)
        found += [f"#/properties/{pointer}/{word}" for word in _constraints(words) if word not in allowed]
    return found


def _constraints(schema: Any) -> list[str]:
    """The keywords that constrain values besides their types; the limits of 64 bits are those of all integers, and a
    union of types is no more than its types."""
    if not isinstance(schema, dict):
        return [] if schema is True else ["not"]

    def says_types_alone(word: str, value: Any) -> bool:
        if word in ("anyOf", "oneOf"):
            return not any(map(_constraints, value))
        return word in _ANNOTATIONS or (word in ("minimum", "maximum") and abs(value) == MAX_INTEGER)

    return [word for word, value in schema.items() if not says_types_alone(word, value)]


def unenforced_literals(schema: dict[str, Any]) -> list[str]:
    """Pointers to the keywords of a checked schema that LiteralRules does not enforce."""
    lark = LarkRules(None)
    literals = LiteralRules(lark, ArgumentRules(lark, json.dumps), json.dumps, "'")
    literals.members(schema)
    return [*dict.fromkeys(literals.unenforced)]


def _pointer_token(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _members(schema: Any, root: dict[str, Any]) -> tuple[dict[str, Any], dict[str, None], Any]:
    """`properties`, `required` and `additionalProperties` (false: none) of an object."""
    target = resolve(schema, root)
    if not isinstance(target, dict):
        return {}, {}, True
    properties = {name: value for name, value in target.get("properties", {}).items() if value is not False}
    return properties, dict.fromkeys(target.get("required", ())), target.get("additionalProperties", True)


def _with_definitions(value: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema of one argument, in which references to definitions of the whole schema are valid."""
    schema = {} if value is True else value
    return {**{word: root[word] for word in ("$defs", "definitions") if word in root}, **schema}


def _constants(value: Any, root: dict[str, Any], types: list[str] | None) -> list[str]:
    """Python's constants that a value may be, next to those of JSON."""
    if _listed(resolve(value, root)) is not None:
        return []
    allowed = ("boolean", "null") if types is None else types
    return ['"True"', '"False"'] * ("boolean" in allowed) + ['"None"'] * ("null" in allowed)


def _listed(schema: Any) -> Sequence[Any] | None:
    """The values of `enum` or `const`."""
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _text_limits(schema: dict[str, Any]) -> list[str]:
    """Terminals that a text of this schema matches."""
    limits = []
    if "minLength" in schema or "maxLength" in schema:
        limits.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if pattern := schema.get("pattern"):
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[1 if begins else 0 : -1 if ends else None]
        around = ["" if begins else "(?s:.)*", "" if ends else "(?s:.)*"]
        escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner).replace("\n", "\\n")
        limits.append(f"/{around[0]}({escaped}){around[1]}/")
    return limits


def _quoted(text: str) -> str:
    """A text as a terminal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
