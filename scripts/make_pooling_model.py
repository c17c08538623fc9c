#!/usr/bin/env python
"""Makes a small model with random weights that ends in a vector: an ordinary model directory.

    scripts/make_pooling_model.py bert DIR
    scripts/make_pooling_model.py xlm-roberta DIR --classes 1

Without --classes it makes embeddings, with the files of sentence-transformers; with it, it is a classifier, and one
with a single class ranks pairs. The weights come from transformers' classes; the same arguments make the same files.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_model import fill, make_tokenizer, write_json

CONTEXT = 512
VOCAB = 512
HEADS = {"num_attention_heads": 4, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}
GROUPED = {**HEADS, "num_key_value_heads": 2, "head_dim": 32}
# The transformers configuration of each kind, and its entries.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", HEADS),
    "roberta": ("RobertaConfig", {**HEADS, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaConfig", {**HEADS, "type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": ("ModernBertConfig", {**HEADS, "local_attention": 32, "global_attn_every_n_layers": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "use_bidirectional_attention": True, "sliding_window": 32, "sliding_window_pattern": 2},
    ),
    "qwen3": ("Qwen3Config", GROUPED),
}
POOLING = {"gemma3": "mean", "qwen3": "lasttoken", "modernbert": "cls_token", "xlm-roberta": "cls_token"}
DENSE_WIDTH = 96


def make_pooling_model(
    kind: str, directory: Path | str, *, classes: int = 0, seed: int = 0, more: tuple[tuple[str, Any], ...] = ()
) -> Path:
    """Writes a model of `kind` (a key of CONFIGS) to `directory` and returns it. `more`: entries of config.json."""
    import torch
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    name, entries = CONFIGS[kind]
    entries = entries | dict(more)
    context = CONTEXT + (2 if entries.get("pad_token_id") == 1 else 0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = getattr(transformers, name)(**{"vocab_size": VOCAB, "max_position_embeddings": context, **ids, **entries})
    if classes:
        config.num_labels = classes
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        model = transformers.AutoModel.from_config(config)
    torch.nn.Module.eval(model)
    fill(model, seed)
    model.save_pretrained(directory)
    make_tokenizer("llama", directory, VOCAB, CONTEXT)
    add_special_tokens(directory / "tokenizer.json", pairs=kind not in ("gemma3", "qwen3"))
    if not classes:
        write_modules(directory, kind, seed)
    return directory


def add_special_tokens(path: Path, pairs: bool) -> None:
    """Has the tokenizer put special tokens around texts: those of BERT if there are `pairs`, else one at the end."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(path))
    marks = [("<|bos|>", 1), ("<|eos|>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>" if pairs else "$A <|eos|>",
        pair="<|bos|> $A <|eos|> $B:1 <|eos|>:1" if pairs else "$A $B <|eos|>",
        special_tokens=marks,
    )
    tokenizer.enable_truncation(16)  # as in files of the Hub; a server has limits of its own
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))


def write_modules(directory: Path, kind: str, seed: int) -> None:
    """Writes the files of sentence-transformers: pooling, with gemma3 two dense layers, and the normalization."""
    import torch
    from safetensors.torch import save_file

    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    mode = POOLING.get(kind, "mean_tokens" if kind != "gemma3" else "mean")
    pooling: dict[str, Any] = {"word_embedding_dimension": 64}
    # Newer releases of sentence-transformers write one word.
    pooling |= {"pooling_mode": mode} if kind == "gemma3" else {f"pooling_mode_{mode}": True}
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_json(directory / "1_Pooling" / "config.json", pooling)
    if kind == "gemma3":
        generator = torch.Generator().manual_seed(seed)
        for number, (inputs, outputs) in enumerate(((64, DENSE_WIDTH), (DENSE_WIDTH, 64)), 2):
            place = directory / f"{number}_Dense"
            place.mkdir(exist_ok=True)
            weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
            save_file({"linear.weight": weight}, place / "model.safetensors")
            write_json(
                place / "config.json",
                {
                    "in_features": inputs,
                    "out_features": outputs,
                    "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity",
                },
            )
            modules.append(("Dense", place.name))
    if kind != "roberta":
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
        for index, (module, path) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")
    write_json(directory / "config_sentence_transformers.json", {"prompts": {"query": "The question: "}})


def main() -> None:
    """Parses the command line and makes the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--classes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_pooling_model(arguments.kind, arguments.directory, classes=arguments.classes, seed=arguments.seed)


if __name__ == "__main__":
    main()
