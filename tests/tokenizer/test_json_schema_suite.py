"""JSON Schema's own test suite for draft 2020-12: what a schema forbids, no text of its grammar has; nor names that it
does not know, where it lists some."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.models import model
from tests.schemas import SUITE, strays, validate
from tgi.hub.card import read_card
from tgi.hub.grammar import matcher, token_table
from tgi.hub.tokens import read_tokenizer
from tgi.tokenizer.grammar import GrammarError, GrammarReader
from tgi.tokenizer.vocabulary import Vocabulary

KEYWORDS = sorted({case[0] for case in SUITE})
WALKS = 3
LONGEST = 100  # tokens of a walk; one that gets no further is not looked at
# Keywords of which no schema is accepted: each case names the one that cannot be enforced.
NEVER = {
    "contains", "defs", "dependentRequired", "dependentSchemas", "dynamicRef", "not", "propertyNames", "refRemote",
    "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip


class Judge:
    """A model's tokens, and what holds texts to a schema with them."""

    def __init__(self) -> None:
        card = read_card(model("llama"))
        self.vocabulary = Vocabulary.load(card)
        self.reader = GrammarReader(self.vocabulary)
        (self.eos,) = card.eos_token_ids
        self.table: LLTokenizer = token_table(read_tokenizer(card), [self.eos], 0)

    def matcher(self, schema: Any) -> LLMatcher:
        return matcher(self.table, self.reader.read(json.dumps({"schema": schema}).encode()))

    def accepts(self, start: LLMatcher, value: Any) -> bool:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        ids = self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        walk = start.deep_copy()
        return walk.try_consume_tokens(ids) == len(ids) and bool(walk.is_accepting())

    def walk(self, start: LLMatcher, draw: random.Random) -> str | None:
        """A text of tokens that the masks allow, ended where they allow the end; None if it does not get there."""
        walk, ids = start.deep_copy(), list[int]()
        for _ in range(LONGEST):
            mask = np.unpackbits(np.frombuffer(walk.compute_bitmask(), np.uint8), bitorder="little")
            if mask[self.eos] and (draw.random() < 0.5 or mask.sum() == 1):
                return str(self.vocabulary.tokenizer.decode(ids))
            mask[self.eos] = 0
            ids.append(int(draw.choice(np.flatnonzero(mask))))
            assert walk.consume_token(ids[-1])
        return None


@cache
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_is_accepted_is_enforced(keyword: str) -> None:
    draw, accepted = random.Random(keyword), 0
    for name, what, schema, values in SUITE:
        if name != keyword:
            continue
        try:
            start = judge().matcher(schema)
        except GrammarError:
            continue
        accepted += 1
        for value, valid in values:
            # Formats are enforced here, and only remarks in the suite, so its values say nothing of them.
            allowed = valid and not strays(value, [schema], schema)
            assert allowed or keyword == "format" or not judge().accepts(start, value), f"{what}: {value!r}"
        for _ in range(WALKS):
            text = judge().walk(start, draw)
            if text is not None:
                validate(text, schema)
                assert not strays(json.loads(text), [schema], schema), text
    assert (accepted == 0) == (keyword in NEVER)


def test_most_of_what_is_accepted_is_not_narrowed() -> None:
    """Keys come in the order of the schema, whole numbers without a point, formats as they are specified, and objects
    are closed: all else that is valid can be written."""
    written = missed = 0
    for keyword, _, schema, values in SUITE:
        try:
            start = judge().matcher(schema)
        except GrammarError:
            continue
        valid = [value for value, valid in values if valid and not strays(value, [schema], schema)]
        found = [judge().accepts(start, value) for value in valid if keyword != "format"]
        written += sum(found)
        missed += len(found) - sum(found)
    assert written > 300
    assert missed < 20
