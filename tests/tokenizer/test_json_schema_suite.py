"""The JSON Schema test suite for draft 2020-12: no text of a grammar is invalid, or has property names that its schema
does not list."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.models import model
from tests.schemas import SUITE, has_unlisted_names, validate
from tgi.hub.llguidance_tables import new_matcher, token_table
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.tokenizer.structured_output.grammar import GrammarError, GrammarValidator
from tgi.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

KEYWORDS = sorted({case[0] for case in SUITE})
WALKS = 3
LONGEST = 100  # tokens of a random text; longer ones are not evaluated
# Keywords that are always rejected: the error of each case names the keyword.
NEVER = {
    "contains", "defs", "dependentRequired", "dependentSchemas", "dynamicRef", "refRemote", "unevaluatedItems",
    "unevaluatedProperties",
}  # fmt: skip


class Judge:
    """A model's tokens, and the grammars of schemas with them."""

    def __init__(self) -> None:
        config = read_model_config(model("llama"))
        self.vocabulary = Vocabulary.load(config)
        self.validator = GrammarValidator(self.vocabulary)
        (self.eos,) = config.eos_token_ids
        self.table: LLTokenizer = token_table(read_tokenizer(config), [self.eos], 0)

    def matcher(self, schema: Any) -> LLMatcher:
        return new_matcher(self.table, self.validator.validate(json.dumps({"schema": schema}).encode()).text)

    def accepts(self, start: LLMatcher, value: Any) -> bool:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        ids = self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        walk = start.deep_copy()
        return walk.try_consume_tokens(ids) == len(ids) and bool(walk.is_accepting())

    def walk(self, start: LLMatcher, draw: random.Random) -> str | None:
        """A random text of allowed tokens that ends as soon as EOS is allowed; None if it gets too long."""
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
def test_accepted_schemas_are_enforced(keyword: str) -> None:
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
            # Formats are enforced here, but only annotations in the suite.
            allowed = valid and not has_unlisted_names(value, [schema], schema)
            assert allowed or keyword == "format" or not judge().accepts(start, value), f"{what}: {value!r}"
        for _ in range(WALKS):
            text = judge().walk(start, draw)
            if text is not None:
                validate(text, schema)
                assert not has_unlisted_names(json.loads(text), [schema], schema), text
    assert (accepted == 0) == (keyword in NEVER)


def test_most_valid_values_can_be_generated() -> None:
    """Keys have the order of the schema, integers have no point, formats are enforced, and objects are closed. All
    other valid values can be generated."""
    written = missed = 0
    for keyword, _, schema, values in SUITE:
        try:
            start = judge().matcher(schema)
        except GrammarError:
            continue
        valid = [value for value, valid in values if valid and not has_unlisted_names(value, [schema], schema)]
        found = [judge().accepts(start, value) for value in valid if keyword != "format"]
        written += sum(found)
        missed += len(found) - sum(found)
    assert written > 300
    assert missed < 20
