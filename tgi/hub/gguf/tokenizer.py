"""The tokenizer of a GGUF file, with what transformers' converter omits completed from the file's metadata."""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tgi.hub.gguf.encoders import ENCODERS
from tgi.hub.gguf.reader import GGUFFile
from tgi.microkernel.errors import UserError

# tokenizer.ggml.pre -> pre-tokenizer. Names as in llama.cpp, src/llama-vocab.cpp.
# GPT-2's, with single digits
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
GPT2 = {
    *("gpt-2", "gpt2", "default", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "exaone4"),
    *("jina-v1-en", "jina-v2-code", "roberta-bpe"),
}
LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
# A word in the vocabulary skips the merges.
WHOLE_WORDS_FIRST = LLAMA3 | {
    *("tekken", "gpt-4o", "llama4", "minicpm5", "youtu", "glm4", "glm5", "granite-embed-multi-97m"),
}
# Merges of characters over the whole text, with spaces written as U+2581, instead of merges of bytes.
CHARACTERS = {"gemma4", "sarvam-moe", "granite-embed-multi-311m"}
BOS_ALWAYS = {"gemma4", "granite-embed-multi-311m"}  # early files say that they add none
BOS_BY_DEFAULT = LLAMA3 | {"tekken", "chameleon"}

# The same as a name that the converter knows.
SAME_SPLIT = {
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), "llama3"),
    "granite-embed-multi-97m": "gpt-4o",
}
# Patterns that isolate their matches, one after the other.
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS_UP_TO_STOPS = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _PUNCTUATED)
_CONTRACTED_WORDS = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS_AND_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
_SPACES = r"\s+(?!\S)|\s+"


def _cased(numbers: str, line_ends: str, without: str = "") -> str:
    """GPT-4o's pattern, which splits a word where a capital follows a small letter. `without` narrows the letters."""
    capital, small = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in (r"Lu}\p{Lt", "Ll"))
    ending = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = "".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{letters}{ending}|" for letters in (f"{capital}*{small}+", f"{capital}+{small}*")
    )
    return words + rf"{numbers}| ?[^\s\p{{L}}\p{{N}}]+[{line_ends}]*|\s*[\r\n]+|" + _SPACES


# Digits in groups of three from the right. The published patterns look ahead to the end of the digits from each place,
# which takes seconds for 10,000 digits. These look ahead once for each run of digits, and cut at the same places.
_FROM_THE_RIGHT = r"\d{1,3}(?=(?>\d{3})*(?!\d))|(?<=\d)\G\d{3}"
_TINY_AYA = (r"(?<!\d)(?=\d++\b)" + _FROM_THE_RIGHT, _cased(r"\p{N}{1,3}", r"\r\n/"))
_SUPERBPE = (
    r"\p{N}+",
    # the last of a run with what follows up to the next group, as in 345½1|234
    r"(?:(?<=\d)\G\d{3}|(?<!\d{3})\d{3}(?=(?>\d{3})*(?!\d)))(?:(?!\d)\p{N}|(?<!\d)\d{1,2}(?=(?>\d{3})*(?!\d)))*",
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SPLITS: dict[str, tuple[str, ...]] = {
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_WORDS_UP_TO_STOPS,)),
    "viking": (_WORDS_UP_TO_STOPS, r"\p{N}"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "seed-coder": (_CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "exaone-moe": (
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "ufakzeka": (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SIGNS_AND_LINES + _SPACES,),
    "laguna": (r"[^\n]+|\n+", _CONTRACTED_WORDS + r"\p{N}|" + _SIGNS_AND_LINES + _SPACES),
    "minicpm5": (r"\p{N}{1,3}", _CONTRACTED_WORDS + r"\p{N}+|" + _SIGNS_AND_LINES + _SPACES),
    "jais-2": (
        _CONTRACTED_WORDS
        + r"\p{N}{1,3}|"
        + _SIGNS_AND_LINES
        + "".join(rf"\s{{{count}}}(?!\S)|" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
        + r"\s",
    ),
    "spark2_5": (*_DEEPSEEK3[:2], _PUNCTUATED.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}"),
    "chameleon": (
        *(r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  "),
        *(r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2_WORDS),
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "superbpe": _SUPERBPE,
    # the model's own pattern; llama.cpp does not split words at capitals
    "kimi-k2": (r"\p{Han}+|" + _cased(r"\p{N}{1,3}", r"\r\n", r"&&[^\p{Han}]"),),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+",
        _cased(r"\p{N}", r"\r\n/"),
    ),
    # the tokenizer's own patterns; llama.cpp takes adjacent scripts for one
    "afmoe": (
        r"(?<!\d)" + _FROM_THE_RIGHT,
        "[\u4e00-\u9fff\u3040-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf]+|[\u0e00-\u0e7f]+|[\u0e80-\u0eff]+"
        "|[\u1780-\u17ff]+|[\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff]+|[\uac00-\ud7af\u1100-\u11ff]+",
        _PUNCTUATED,
    ),
}
REFUSED = {"whitespace": "it drops the spaces of a text"}  # names of llama.cpp that are known, and what is missing

UNIGRAM = "t5"  # the kind of tokenizer that T5 and XLM-RoBERTa have
WORDPIECE = "bert"
SENTINELS = 100  # of T5
# Ids where the file says nothing, as llama.cpp reads it, by the kind of tokenizer.
DEFAULT_IDS: dict[str, dict[str, int]] = {
    UNIGRAM: {"eos": 1, "unknown": 2, "padding": 0},
    WORDPIECE: {"bos": 101, "seperator": 102, "unknown": 100, "padding": 0},
}
SEPARATOR = "seperator"  # as the key is spelled

CONTROL = 3  # token_type of special tokens
NORMAL, UNKNOWN, USER_DEFINED, UNUSED = 1, 2, 4, 5
# Recommended sampling: names of generation_config.json -> keys behind "general.sampling." (gguf-py, constants.py).
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
SPACE = "\u2581"
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def tokenizer_description(file: GGUFFile) -> dict[str, Any]:
    """The checked metadata in the form of transformers' converter. Raises UserError."""
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    tokens = found.get("tokens")
    if not _strings(tokens) or not tokens:
        raise UserError(f"{file.path} has no vocabulary ('tokenizer.ggml.tokens'). Fetch or convert it again.")
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{file.path} has a token twice in its vocabulary. Fetch or convert it again.")
    kind, kinds = found.get("model"), ["gpt2", "llama", "gemma4", UNIGRAM]
    if file.metadata.get("general.architecture") in ENCODERS:
        kinds.append(WORDPIECE)
    if kind not in kinds:
        raise UserError(
            f"{file.path} has a tokenizer of kind {str(kind)[:40]!r}; one of {', '.join(kinds)} was expected."
        )
    if "merges" in found and not (_strings(found["merges"]) and all(m.count(" ") == 1 for m in found["merges"])):
        raise UserError(f"{file.path} has merges that are not pairs. Fetch or convert it again.")
    if "merges" not in found and kind not in ("llama", UNIGRAM, WORDPIECE):
        raise UserError(f"{file.path} has no merges ('tokenizer.ggml.merges'). Fetch or convert it again.")
    for name in ("scores", "token_type"):
        items = found.get(name)
        if items is not None and not (isinstance(items, list) and len(items) == len(tokens)):
            raise UserError(f"{file.path}: 'tokenizer.ggml.{name}' does not have one entry for each token.")
    if kind != WORDPIECE and (kind == UNIGRAM or "merges" not in found) and "scores" not in found:
        raise UserError(f"{file.path} has neither merges nor scores for its tokens. Fetch or convert it again.")
    described = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": pre if isinstance(pre := found.get("pre"), str) else None,
        "tokens": tokens,
        "merges": found.get("merges"),
        "scores": found.get("scores"),
        "token_type": found.get("token_type"),
    }
    return {key: value for key, value in described.items() if value is not None}


def merges_characters(file: GGUFFile) -> bool:
    """Whether the tokenizer is one that `character_tokenizer` makes."""
    return _pre_tokenizer(file) in CHARACTERS


def character_tokenizer(file: GGUFFile, described: Mapping[str, Any]) -> Tokenizer:
    """A BPE of characters with bytes for those that it lacks, as gemma4's; `described` is a tokenizer_description.
    Raises what `tokenizers` raises for merges of tokens that the vocabulary lacks."""
    types = described.get("token_type", [0] * len(described["tokens"]))
    # the converter writes spaces of user-defined tokens plain
    tokens = [
        token.replace(" ", SPACE) if token_type == USER_DEFINED else token
        for token, token_type in zip(described["tokens"], types, strict=True)
    ]
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{file.path} has a token twice in its vocabulary. Fetch or convert it again.")
    unknown = _token(file, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in described["merges"]],
            unk_token=unknown[1] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    for add, normalized, wanted in (
        (tokenizer.add_special_tokens, False, (CONTROL, UNKNOWN)),
        (tokenizer.add_tokens, True, (USER_DEFINED,)),
    ):
        found = [token for token, token_type in zip(tokens, types, strict=True) if token_type in wanted]
        add([AddedToken(token, normalized=normalized) for token in found])
    return tokenizer


def unigram_tokenizer(file: GGUFFile, described: Mapping[str, Any]) -> Tokenizer:
    """That of T5 and XLM-RoBERTa; `described` is a tokenizer_description. Raises what `tokenizers` raises for a
    charsmap that it cannot read."""
    metadata, tokens = file.metadata, list(described["tokens"])
    types = described.get("token_type", [0] * len(tokens))
    # Places of the embedding that the vocabulary leaves. T5's first ones are the sentinels of blanks, counted down.
    left = [number for number, token in enumerate(tokens) if re.fullmatch(r"\[PAD\d+\]", token)]
    left = left if metadata.get("general.architecture") == "t5" else []
    sentinels = {number: f"<extra_id_{SENTINELS - 1 - at}>" for at, number in enumerate(left[:SENTINELS])}
    tokens = [sentinels.get(number, token) for number, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{file.path} has a token twice in its vocabulary. Fetch or convert it again.")
    unknown = _token(file, "unknown")
    # What a character costs that is in no token follows from the least score, which is that of the model's tokens.
    pairs = list(zip(described["scores"], types, strict=True))
    least = min((score for score, kind in pairs if kind != UNUSED), default=0.0)
    scores = [max(score, least) for score, _ in pairs]
    tokenizer = Tokenizer(
        models.Unigram(vocab=list(zip(tokens, scores, strict=True)), unk_id=None if unknown is None else unknown[0])
    )
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        tokenizer.normalizer = normalizers.Precompiled(bytes(one & 0xFF for one in charsmap))
    scheme = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    # XLM-RoBERTa always does; the converter takes that of another setting where it reads tokenizer.json.
    encoder = metadata.get("general.architecture") in ENCODERS
    if encoder or metadata.get("tokenizer.ggml.remove_extra_whitespaces", True):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    else:
        tokenizer.pre_tokenizer = spaces
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = [
        token for number, token in enumerate(tokens) if types[number] in (CONTROL, UNKNOWN) or number in sentinels
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def wordpiece_tokenizer(file: GGUFFile, described: Mapping[str, Any]) -> Tokenizer:
    """That of BERT; `described` is a tokenizer_description. A token that begins a word begins with U+2581 in the file,
    and others, which begin with ## in the model's own vocabulary, begin with neither."""
    types = described.get("token_type", [NORMAL] * len(described["tokens"]))
    pairs = list(zip(described["tokens"], types, strict=True))
    if any(token.startswith(2 * SPACE) and len(token) > 2 for token, kind in pairs if kind == NORMAL):
        raise UserError(
            f"{file.path} has the pieces of a SentencePiece vocabulary as those of WordPiece, as llama.cpp's converter "
            "writes CamemBERT. Use the model's safetensors version instead."
        )
    own = {SPACE: f"##{SPACE}"}  # which no word begins with
    tokens = [
        token if kind == CONTROL else own.get(token) or (token[1:] if token.startswith(SPACE) else f"##{token}")
        for token, kind in pairs
    ]
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{file.path} has a token twice in its vocabulary. Fetch or convert it again.")
    unknown = _token(file, "unknown")
    if unknown is None:
        raise UserError(f"{file.path} has no token for unknown words ('tokenizer.ggml.unknown_token_id').")
    # Early files do not say it, of which those with a cased vocabulary have capitals.
    cased = any(token != token.lower() for token, kind in zip(tokens, types, strict=True) if kind == NORMAL)
    lowercase = bool(file.metadata.get("tokenizer.ggml.normalizer.lowercase", not cased))
    strip = bool(file.metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase))
    tokenizer = Tokenizer(
        models.WordPiece(vocab={token: number for number, token in enumerate(tokens)}, unk_token=tokens[unknown[0]])
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token) for token in added])
    return tokenizer


def complete_tokenizer(file: GGUFFile, tokenizer: Tokenizer, converter_splits: Mapping[str, str]) -> None:
    """Corrects the converter's result: pre-tokenizer, merges, and the tokens added around a text.

    `converter_splits` are the patterns of the names in tokenizer.ggml.pre that the converter already heeds. A name that
    nothing knows is refused, since a wrong split gives a model that talks nonsense.
    """
    metadata = file.metadata
    if metadata.get("tokenizer.ggml.model") == "gpt2" and not merges_characters(file):
        pre = _pre_tokenizer(file)
        known = DIGITS_APART | GPT2 | LLAMA3 | converter_splits.keys() | SPLITS.keys() | SAME_SPLIT.keys()
        if pre in REFUSED:
            raise UserError(
                f"{file.path} has the pre-tokenizer {pre} ('tokenizer.ggml.pre'), unsupported: {REFUSED[pre]}."
            )
        if pre not in known:
            raise UserError(f"{file.path} splits text in the unknown way {str(pre)[:40]!r} ('tokenizer.ggml.pre').")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if pre in DIGITS_APART:
            digits = pre_tokenizers.Digits(individual_digits=True)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        elif pre in GPT2:
            tokenizer.pre_tokenizer = byte_level
        elif pre in SPLITS or pre in SAME_SPLIT:
            patterns = SPLITS.get(pre) or (converter_splits[SAME_SPLIT[pre]],)
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
            bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
        if pre in WHOLE_WORDS_FIRST and isinstance(tokenizer.model, models.BPE):
            tokenizer.model.ignore_merges = True
    elif metadata.get("tokenizer.ggml.model") == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = _frame(file)
    for token, token_type in zip(
        metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False
    ):
        if token_type == CONTROL and tokenizer.token_to_id(token) is None:
            raise UserError(f"{file.path}: the special token {token[:40]!r} was lost in the conversion.")


def tokenizer_config(file: GGUFFile, context: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by name and the chat template."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
    }
    for role, name in ROLES.items():
        token = _token(file, role)
        if token is not None:
            config[f"{name}_token"] = token[1]
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise UserError(f"{file.path}: 'tokenizer.chat_template' is not a text.")
        config["chat_template"] = template
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json: every id that ends a turn, the other special ids, and the recommended sampling."""
    config: dict[str, Any] = {"_from_model_config": True}
    for name, key in SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            # 0.6 stored as float32 reads 0.6000000238418579
            config[name] = float(f"{value:.7g}") if isinstance(value, float) else value
            config["do_sample"] = True
    ends = [token[0] for role in ("eos", "eot", "eom") if (token := _token(file, role)) is not None]
    if ends:
        distinct = list(dict.fromkeys(ends))
        config["eos_token_id"] = distinct if len(distinct) > 1 else distinct[0]
    for role in ("bos", "padding"):
        token = _token(file, role)
        if token is not None:
            config[f"{ROLES[role]}_token_id"] = token[0]
    return config


def _pre_tokenizer(file: GGUFFile) -> str | None:
    """The name of the pre-tokenizer; a kind of tokenizer of its own has the one of its name."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return str(file.metadata.get("tokenizer.ggml.pre", "default"))
    return "gemma4" if kind == "gemma4" else None


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _token(file: GGUFFile, role: str) -> tuple[int, str] | None:
    """The id and text of a special token; None if the file has none."""
    key = f"tokenizer.ggml.{role}_token_id"
    number, tokens = file.metadata.get(key), file.metadata["tokenizer.ggml.tokens"]
    if number is None:
        number = DEFAULT_IDS.get(str(file.metadata.get("tokenizer.ggml.model")), {}).get(role)
    if number is None or number == 0xFFFFFFFF:  # llama.cpp's "none"
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise UserError(f"{file.path}: {key!r} is {str(number)[:40]}, which is not in the vocabulary.")
    return number, tokens[number]


def _adds(file: GGUFFile, role: str) -> bool:
    """Whether a bos or eos token is added to every text; the defaults are llama.cpp's."""
    sentencepiece = file.metadata.get("tokenizer.ggml.model") == "llama"
    if role == "bos" and _pre_tokenizer(file) in BOS_ALWAYS:
        return True
    default = role == "bos" and (sentencepiece or _pre_tokenizer(file) in BOS_BY_DEFAULT)
    default = default or (role == "eos" and file.metadata.get("tokenizer.ggml.model") == UNIGRAM)
    return bool(file.metadata.get(f"tokenizer.ggml.add_{role}_token", default))


def _frame(file: GGUFFile) -> Any:
    """The post-processor: a template with bos and eos, or none. Encoders have one of pairs as well."""
    wordpiece = file.metadata.get("tokenizer.ggml.model") == WORDPIECE
    if wordpiece:
        bos, eos = _token(file, "cls") or _token(file, "bos"), _token(file, SEPARATOR)
    else:
        bos, eos = (_token(file, role) if _adds(file, role) else None for role in ("bos", "eos"))
    if bos is None and eos is None:
        return None
    first, last = [bos[1]] if bos else [], [eos[1]] if eos else []
    between, second = list(last), ["$B:1"] if wordpiece else ["$B"]
    named = [token for token in (bos, eos) if token]
    if not wordpiece and file.metadata.get("tokenizer.ggml.add_sep_token") and (apart := _token(file, SEPARATOR)):
        between.append(apart[1])
        named.append(apart)
    pair = [*first, "$A", *between, *second, *(f"{one}:1" if wordpiece else one for one in last)]
    encoder = file.metadata.get("general.architecture") in ENCODERS
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=pair if encoder else None,
        special_tokens=list({text: number for number, text in named}.items()),
    )
