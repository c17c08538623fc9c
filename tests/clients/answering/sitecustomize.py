"""A model that answers as its prompt says: the scripted worker of any server with this directory on its PYTHONPATH.

A message of the chat contains SCRIPT and a JSON list of texts, one for each turn of the assistant that follows. In
them RESULT stands for the text of the last turn. A request fails if its grammar does not allow the text. Without a
script, a grammar is answered with a short text that it allows, QUESTION with KNOWN, and all else as the scripted
worker does.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

SCRIPT, RESULT = "Answer with these:", "{result}"
# The answer to a greedy request without a script whose prompt has this question.
QUESTION, KNOWN = "What is the capital of France?", "The capital of France is Paris."
# Tokens that bring a text to its end: what a grammar without a script is answered with.
ENDING = ('"', "}", "]")
THOUGHT_END = "\n</think>\n\n"


def _in_worker() -> None:
    from tgi.worker import main

    configuration = main._fake_worker_config

    def with_answers(settings: Any) -> Any:
        _answer_from_prompts(settings.model_dir)
        return configuration(settings)

    main._fake_worker_config = with_answers  # type: ignore[assignment]


def _answer_from_prompts(model: Path) -> None:
    import numpy as np
    from tokenizers import Tokenizer

    from tgi.hub.llguidance_tables import new_matcher, token_table
    from tgi.microkernel.messages.protocol import decode
    from tgi.worker.fake_worker.fake_worker import FakeRequest, FakeWorker

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    lengths = np.array([len(tokenizer.id_to_token(id) or "") for id in range(tokenizer.get_vocab_size())])
    ending = [tokenizer.token_to_id(text) for text in ENDING]
    table = cache(lambda: token_table(tokenizer, [end], tokenizer.get_vocab_size()))
    answers: dict[int, tuple[FakeRequest, list[int]]] = {}  # by slot
    sample = FakeWorker._sample_one

    def answer(request: FakeRequest) -> list[int]:
        prompt = tokenizer.decode(request.ids[: request.slot.prompt_tokens], skip_special_tokens=False)
        text, sampling = scripted_answer(prompt), decode(request.slot.sampling)
        if text is None and sampling.grammar:
            return [*allowed_by(sampling.grammar), end]
        if text is None and (not sampling.samples or sampling.min_p == 1.0) and not sampling.bad_word_ids:
            text = known_answer(prompt)
        if text is None:
            return []
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if sampling.grammar:
            matcher = new_matcher(table(), sampling.grammar)
            accepted = matcher.try_consume_tokens(ids)
            if accepted < len(ids) or not matcher.is_accepting():
                ahead = tokenizer.decode(ids[:accepted])
                request.fault = f"the grammar does not allow this to go on, or to end, behind {ahead!r}: {text!r}"
        return [*ids, end]

    def allowed_by(grammar: str) -> list[int]:
        """A text of the grammar: each token is the first of ENDING that is allowed, or else the longest one."""
        matcher = new_matcher(table(), grammar)
        ids: list[int] = []
        if matcher.is_accepting():  # as soon as it begins: a tool may be called, but none is
            return tokenizer.encode(KNOWN, add_special_tokens=False).ids  # type: ignore[no-any-return]
        while not matcher.is_accepting():
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            longest = (allowed[: len(lengths)] * lengths).argmax()
            ids.append(next((token for token in ending if allowed[token]), int(longest)))
            matcher.consume_token(ids[-1])
        return ids

    def sample_one(self: FakeWorker, slot: int) -> Any:
        request = self._slots[slot]
        if answers.get(slot, (None,))[0] is not request:
            answers[slot] = request, answer(request)
        ids, at = answers[slot][1], len(request.ids) - request.slot.prompt_tokens
        (token, logprob, tops), draft = sample(self, slot)
        if at < len(ids):
            request.ids[-1] = ids[at]
            tops = [(ids[at] if one == token else one, value) for one, value in tops if one != ids[at]]
            token = ids[at]
        return (token, logprob, tops), draft

    FakeWorker._sample_one = sample_one  # type: ignore[method-assign]


def scripted_answer(prompt: str) -> str | None:
    """The text with which the prompt's latest script goes on. None if it has no script."""
    end = len(prompt)
    while (at := prompt.rfind(SCRIPT, 0, end)) >= 0:
        rest, end = prompt[at + len(SCRIPT) :], at
        try:
            texts, _ = json.JSONDecoder().raw_decode(rest.lstrip())
        except json.JSONDecodeError:  # quoted in a call
            continue
        turn = rest.count("<|im_start|>assistant") - 1
        if turn >= len(texts):
            return f"The script has {len(texts)} answers, and this is number {turn + 1}."
        text = str(texts[turn])
        if prompt.endswith(THOUGHT_END):  # the client wants no reasoning
            text = text.rpartition(THOUGHT_END)[2]
        last = prompt.split("<|im_start|>")[-2].partition("\n")[2].removesuffix("\n").removesuffix("<|im_end|>")
        return text.replace(RESULT, last)
    return None


def known_answer(prompt: str) -> str | None:
    """What follows in KNOWN after a prompt that asks for it or begins it."""
    begun = prompt.rpartition("<|im_start|>assistant\n")[2]
    return KNOWN.removeprefix(begun) if QUESTION in prompt or (begun and KNOWN.startswith(begun)) else None


def _in_forked_process() -> None:
    """A fork server has imported the worker when it forks its process, with this function in it."""
    if "tgi.worker.main" in sys.modules and not installed:
        installed.append("worker")
        _in_worker()


installed: list[str] = []
os.register_at_fork(after_in_child=_in_forked_process)
