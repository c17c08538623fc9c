"""The generation parameters of a request on their way from the api, which checks them, to the worker, which obeys."""

from typing import NamedTuple

# The fields that limit what is drawn from, each of which makes a request sample.
LIMITS = ("top_k", "top_p", "typical_p", "min_p")


class SamplingDefaults(NamedTuple):
    """The sampling parameters that the model's generation_config.json recommends, under its names. Requests on /v1 that
    lack a field of the same name get the value. None: the config says nothing."""

    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0 and -1: off
    top_p: float | None = None
    min_p: float | None = None  # 0: off
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """Those that the config names."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Sampling(NamedTuple):
    """How one request draws its tokens. Off values are the defaults; formulas in worker/sampling.py.

    Travels from api to worker; the scheduler hands it on undecoded (encoded as a message of its own).
    """

    seed: int  # uint64; always given, drawn by the api when the client sent none
    do_sample: bool = False  # draw at temperature 1 even if no field below asks for sampling
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    top_n: int = 0  # with each token, this many of the likeliest ones (more where several share the last place)
    choice: int = 0  # which of several answers to one prompt; each has noise of its own from the same seed
    typical_p: float = 1.0
    frequency_penalty: float = 0.0  # TGI's: by a token's share of all ids so far
    count_penalty: float = 0.0  # OpenAI's frequency_penalty: by how often a token was generated
    presence_penalty: float = 0.0  # OpenAI's: once for each token that was generated
    bias_ids: bytes = b""  # int32, each id once: OpenAI's logit_bias
    biases: bytes = b""  # float32, same length
    grammar: str = ""  # what the generated text must match, as worker/grammar.py reads it; "": anything
    watermark: bool = False
    min_new_tokens: int = 0  # until so many are generated, none of `end_ids` is drawn
    end_ids: bytes = b""  # int32; filled in by the tokenizer, and only where min_new_tokens asks for it
    adapter: str = ""  # the name of a LoRA adapter; "": the model alone
    adapter_digest: bytes = b""  # Adapter.digest, as the api knows it; the tokenizer corrects it unless ids are resumed
    min_p: float = 0.0  # tokens below this share of the largest probability are not drawn
    bad_word_ids: bytes = b""  # int32: token sequences that are not generated, one after another; from the tokenizer
    bad_word_lengths: bytes = b""  # int32: the tokens of each of these sequences

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random (sampling.md, "which requests sample"); greedy otherwise."""
        limited = any(getattr(self, name) != self._field_defaults[name] for name in LIMITS)
        return self.do_sample or self.temperature != 1.0 or limited

    def unlimited(self) -> "Sampling":
        """The same without the limits on what is drawn from."""
        return self._replace(**{name: self._field_defaults[name] for name in LIMITS})
