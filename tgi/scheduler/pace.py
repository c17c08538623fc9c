"""How many prompt tokens go into a step, learned from the steps so far: no more than fit while others wait for their
next token, and not many more than it takes to be worth a step."""

# Weight of the newest step in the running averages.
NEWEST = 0.2
# A step whose prompt tokens take so many times what a step takes anyhow is worth it: a larger one saves little more.
WORTH = 16


class Pace:
    """Averages of what a step costs: with decode rows alone, and each prompt token on top of that."""

    def __init__(self, target_us: float) -> None:
        self._target_us = target_us
        self._decode_us = 0.0  # a step of decode rows alone
        self._token_us = 0.0  # a prompt token on top

    def learn(self, decode_rows: int, prefill_tokens: int, step_us: int) -> None:
        """A step with these rows took this long. 0: the worker did not measure."""
        if step_us <= 0:
            return
        if not prefill_tokens:
            self._decode_us = _average(self._decode_us, step_us)
            return
        base = self._decode_us if decode_rows else 0.0
        self._token_us = _average(self._token_us, max(step_us - base, 0.0) / prefill_tokens)

    def prefill_tokens(self, at_least: int, at_most: int) -> int:
        """Prompt tokens for a step with decode rows, so that the step meets its target; between the two bounds."""
        if not self._token_us:
            return at_most
        return int(min(at_most, max(at_least, (self._target_us - self._decode_us) / self._token_us)))

    def enough_tokens(self, at_most: int) -> int:
        """With so many prompt tokens a step is worth what it costs anyhow: one at least, since some prompt has to come
        first; `at_most` as long as that is not known."""
        if not self._token_us or not self._decode_us:
            return at_most
        return int(min(at_most, WORTH * self._decode_us / self._token_us)) or 1


def _average(old: float, new: float) -> float:
    return new if not old else old + NEWEST * (new - old)
