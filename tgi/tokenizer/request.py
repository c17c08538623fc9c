"""One request as the tokenizer keeps it: all that is needed to begin it again below, and its text so far."""

from array import array
from collections.abc import Iterator
from enum import StrEnum

from tgi.kernel.answer import Part, Prompted, PromptTokens
from tgi.kernel.link import Peer
from tgi.kernel.messages import Add, End, Generate, PromptLogprobs, Reason, encode
from tgi.kernel.pack import INT32, ints, pack
from tgi.tokenizer.answer.division import Division
from tgi.tokenizer.answer.marks import Marks
from tgi.tokenizer.columns import Columns
from tgi.tokenizer.decode import CONTEXT, Decoder, decoder
from tgi.tokenizer.encode import Prompt
from tgi.tokenizer.prompts import PromptTeller
from tgi.tokenizer.stop import Curtain, StopMatcher
from tgi.tokenizer.vocabulary import Vocabulary


class Stage(StrEnum):
    """Where a request is, seen from here."""

    ENCODING = "encoding"  # its text is in the encoding thread
    HELD = "held"  # encoded, waiting for the limits
    LIVE = "live"  # with the scheduler, or will be as soon as there is one
    CANCELLING = "cancelling"  # the scheduler was told; its End is awaited, and passed on
    ENDED = "ended"  # the api has its End, or is gone; the scheduler's End is awaited


class Request:
    """`rid` is this tokenizer's number towards the scheduler; `asked.rid` is the api's.

    `reason` is set by the token that ends the request, in TGI's order: length, then EOS, then a stop string. Where
    stop strings are hidden they come first, so that none is ever in the text. So do the stop tokens of the request.
    With `max_new_tokens` 0 it is set when the api has been sent all that it wants of the prompt. `held` characters at
    the end of `texts` must not be shown yet. `hidden` says whether the text of the latest token is left out of `texts`.

    A stop string that is complete before `min_new_tokens` are generated is text like any other.
    """

    __slots__ = (
        "_asked_stop_ids", "_curtain", "_decoder", "_hidden", "_least", "_stop", "api", "asked", "chats", "division",
        "generated", "held", "hidden", "last", "max_new_tokens", "prompt", "reason", "received", "rid", "stage",
        "stop_ids", "submitted", "teller", "texts", "validation_us",
    )  # fmt: skip

    def __init__(self, rid: int, api: Peer, asked: Generate, received: float) -> None:
        self.rid = rid
        self.api = api
        self.asked = asked
        self.received = received  # seconds on this process's clock
        self.submitted = received
        self.stage = Stage.ENCODING
        self.chats = bool(asked.chat)
        self.prompt = Prompt(b"", 0, 0)
        self.max_new_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.validation_us = 0
        self.teller: PromptTeller | None = None  # of the prompt's tokens, if they are wanted
        self.generated = array(INT32)
        self.texts: list[str] = []  # of the tokens that are not hidden
        self.hidden = False
        self.reason: Reason | None = None
        self.last: Columns | None = None  # the last tokens: they go up with the End, since the api shows both as one
        self.held = 0
        self._curtain = Curtain(asked.stop) if asked.hide_stop and any(asked.stop) else None
        self._stop = StopMatcher(asked.stop) if self._curtain is None and any(asked.stop) else None
        self._asked_stop_ids = frozenset(ints(asked.stop_token_ids))
        self._hidden: frozenset[int] = frozenset()  # ids whose text is left out
        self._decoder: Decoder | None = None
        self._least = 0  # tokens that come before any stop string counts
        self.division: Division | None = None  # if the answer is divided: to be given each token that is pushed

    def encoded(self, prompt: Prompt) -> None:
        """The prompt is there, and what it was made of, which may be megabytes, is not needed any more."""
        self.stage = Stage.HELD
        self.prompt = prompt
        sampling = self.asked.sampling._replace(grammar=prompt.grammar)
        self.asked = self.asked._replace(
            inputs="", chat=b"", grammar=b"", input_ids=b"", bad_words=[], sampling=sampling
        )

    def begin(self, vocabulary: Vocabulary, marks: Marks, max_new_tokens: int, drawable: int) -> None:
        """The request has passed its checks. What was generated in an earlier life is decoded, not to be sent. No id
        from `drawable` on can be drawn."""
        self.stage = Stage.LIVE
        self.max_new_tokens = max_new_tokens
        self.stop_ids = self._asked_stop_ids | (frozenset() if self.asked.ignore_eos else vocabulary.eos_ids)
        self._least = self.asked.sampling.min_new_tokens
        sampling = self.asked.sampling
        if self._least:
            end_ids = pack(INT32, sorted(number for number in self.stop_ids if number < drawable))
            sampling = sampling._replace(end_ids=end_ids)
        if words := [word for word in self.prompt.bad_words if max(word) < drawable]:
            ids = pack(INT32, [number for word in words for number in word])
            sampling = sampling._replace(bad_word_ids=ids, bad_word_lengths=pack(INT32, map(len, words)))
        self.asked = self.asked._replace(sampling=sampling)
        if self.asked.skip_special_tokens:
            self._hidden = vocabulary.special
        if self.asked.hide_stop and not self.stop_ids <= self._hidden:
            self._hidden |= self.stop_ids
        if self.asked.prompt_from is not None:
            self.teller = PromptTeller(self.asked, self.prompt, vocabulary)
        self._decoder = decoder(vocabulary, ints(self.prompt.ids[-4 * CONTEXT :]))
        if self.prompt.answer is not None:
            self.division = Division(self.prompt.answer, marks)
            if not marks.ids <= self._hidden:
                self._hidden |= marks.ids
        for number in ints(self.asked.resume):
            if self.reason is None:
                text = self.push(number)
                if self.division is not None:
                    self.division.push(number, text, self.held, self.hidden)

    def prompted(self) -> Iterator[Prompted | PromptTokens]:
        """What the api is told of the prompt before anything comes from the scheduler. To be called once."""
        prompt = self.prompt
        if self.chats or prompt.text:
            divided = prompt.answer is not None
            yield Prompted(self.asked.rid, prompt.tokens, prompt.characters, divided, prompt.text)
            self.prompt = prompt._replace(text="")
        if self.teller is not None:
            yield from self.teller.first()
        self._end_scored()

    def tell(self, told: PromptLogprobs) -> Iterator[PromptTokens]:
        """The next tokens of the prompt for the api."""
        if self.teller is not None:
            yield from self.teller.tell(told)
        self._end_scored()

    def _end_scored(self) -> None:
        """Where no token is to be generated, the last one of the prompt that is told is the end."""
        if self.max_new_tokens == 0 and (self.teller is None or self.teller.next >= self.prompt.tokens):
            self.reason = Reason.LENGTH

    def push(self, number: int) -> str:
        """Takes the next generated id and returns the text to show for it; sets `reason` if it is the last."""
        assert self._decoder is not None
        self.generated.append(number)
        text = self._decoder.feed(number)
        if len(self.generated) >= self.max_new_tokens and number not in self._asked_stop_ids:
            self.reason = Reason.LENGTH
        elif number in self.stop_ids:
            self.reason = Reason.EOS
        elif self._stop is not None and (match := self._stop.feed(text, self._long_enough)) is not None:
            self.reason = Reason.STOP
            text = text[: match.end]
        self.hidden = number in self._hidden
        if text and not self.hidden:
            self.texts.append(text)
        if self._curtain is not None:
            self._hide(self._curtain.feed(text, self.hidden, self._long_enough), self._curtain.held)
        return text

    @property
    def _long_enough(self) -> bool:
        """Whether a stop string counts."""
        return len(self.generated) >= self._least

    def _hide(self, length: int | None, held: int) -> None:
        """`length` is that of the final text, if a stop string is complete."""
        self.held = held
        if length is not None:
            self.reason = Reason.STOP
            self.texts = ["".join(self.texts)[:length]]

    def add(self) -> Add:
        """This request for the scheduler, with the ids generated so far."""
        return Add(
            self.rid,
            self.prompt.ids,
            self.max_new_tokens,
            encode(self.asked.sampling),
            pack(INT32, sorted(self.stop_ids)),
            self.generated.tobytes(),
            salt=self.asked.sampling.adapter_digest,
            trace=self.asked.trace,
            prompt_from=0 if self.teller is None else self.teller.next,
            prompt_top_n=self.asked.prompt_top_n,
        )

    def end(self, reason: str, message: str = "", below: End | None = None) -> End:
        """This request's End for the api. `below` is the scheduler's, for what was measured there."""
        return End(
            self.asked.rid,
            reason,
            message,
            "".join(self.texts),
            self.prompt.tokens,
            len(self.generated),
            below.cached_tokens if below else 0,
            self.validation_us,
            below.queue_us if below else 0,
            below.inference_us if below else 0,
            [] if self.division is None else [Part(0, *found) for found in self.division.end(self.reason)],
        )
