"""What only OpenAI's routes can ask: no random draws, penalties by counts, biases for single tokens, and vLLM's
parameters for stop tokens, bad words and special tokens."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tgi.api import float32
from tgi.api.shapes.openai import OpenAiRequest

# A request for more biases than this is refused: they travel with each of its generations.
MOST_BIASES = 1024

_ID = re.compile("0|[1-9][0-9]{0,9}")


class Steering(NamedTuple):
    """The values that hold; the defaults are those of a request that asks for nothing."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = MappingProxyType({})
    greedy: bool = False  # whatever the limits are: on TGI's routes a limit alone makes a request sample
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True

    @classmethod
    def of(cls, request: OpenAiRequest) -> "Steering":
        """Of a request whose `logit_bias` has passed the rules. Floats are rounded to float32, as all parameters."""
        return cls(
            float32.rounded(request.frequency_penalty or 0.0),
            float32.rounded(request.presence_penalty or 0.0),
            {int(token): float32.rounded(value) for token, value in biases(request).items()},
            request.temperature == 0,
            request.stop_token_ids or (),
            request.bad_words or (),
            request.skip_special_tokens is not False,
        )


NONE = Steering()


def biases(request: OpenAiRequest) -> Mapping[str, float]:
    """The biases as they were sent. TGI's array form means nothing."""
    return request.logit_bias if isinstance(request.logit_bias, dict) else {}


def is_id(text: str) -> bool:
    """Whether this is a token id in plain decimal digits."""
    return _ID.fullmatch(text) is not None
