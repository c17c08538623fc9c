"""Writes a tiny random encoder-decoder model, with a tokenizer of its kind.

python scripts/make_t5_model.py flan-t5 /tmp/flan-t5
"""

import argparse
from pathlib import Path

from scripts.make_model import TEXT, fill, write_json

# By name: config.json's model_type, the activation of the MLP, and whether embedding and head are one matrix.
KINDS: dict[str, tuple[str, str, bool]] = {
    "t5": ("T5", "relu", True),
    "flan-t5": ("T5", "gated-gelu", False),
    "mt5": ("MT5", "gated-gelu", False),
}
VOCABULARY = 320


def make_t5_model(
    kind: str, directory: Path | str, *, seed: int = 0, dtype: str = "float32", max_distance: int = 40
) -> Path:
    """Writes a model of `kind` (one of KINDS) to `directory` and returns it. More layers decode than encode."""
    import torch
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    name, activation, tied = KINDS[kind]
    widths = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 16, "d_ff": 80, "num_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        **widths,
        num_layers=2,
        num_decoder_layers=3,
        feed_forward_proj=activation,
        tie_word_embeddings=tied,
        relative_attention_max_distance=max_distance,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    fill(model, seed)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if label.endswith(("Attention.o.weight", "wo.weight")):
                weight *= 3  # layers outweigh the embedding, or a tied head would repeat its input forever
    if not tied:  # transformers makes them one
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
        model.config.tie_word_embeddings = False
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def make_tokenizer(directory: Path) -> None:
    """Trains a Unigram model whose texts end in </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def main() -> None:
    """Parses the command line and writes the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_t5_model(arguments.kind, arguments.directory, seed=arguments.seed)


if __name__ == "__main__":
    main()
