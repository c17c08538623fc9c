"""The child process that turns a GGUF file into a model directory: `python -P -m tgi.hub.gguf.convert FILE DIR`,
and `packed` behind it for weights in their own bits.

It imports transformers, which costs memory and seconds, and exits. On standard output it says, one JSON list a line,
["progress", stage, percent, bytes] and, if the file is at fault, ["refused", sentence]. It ends when its standard input
does.
"""

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tgi.hub.cache import Progress
from tgi.hub.gguf import architecture, reader, tokenizer, weights
from tgi.kernel.errors import UserError


def convert(file: Path, directory: Path, progress: Progress, *, packed: bool = False) -> None:
    """Fills `directory`, which exists and is empty. `packed` as for weights.write; config.json then says which block
    types have kept their bits, and which not. Raises UserError if the file is at fault."""
    progress("reading", 0)
    source = reader.read(file)
    plan = architecture.plan(source)
    generation = tokenizer.generation_config(source)
    tokenizer_config = tokenizer.tokenizer_config(source, plan.config["max_position_embeddings"])
    described = tokenizer.description(source)
    weights.write(
        source,
        plan.tensors,
        directory / "model.safetensors",
        lambda done, size: progress("importing weights", 100 * done / size, size),
        packed=packed,
    )
    progress("importing tokenizer", 0)
    _write_tokenizer(source, described, directory / "tokenizer.json")
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_json(directory / "generation_config.json", generation)
    if packed and (quantized := _quantization(source, plan)):
        plan.config["quantization_config"] = quantized
    _write_json(directory / "config.json", plan.config)
    progress("importing tokenizer", 100)


def _quantization(source: reader.GGUF, plan: architecture.Plan) -> dict[str, Any]:
    """The entry of config.json for weights in their own bits: block types and how many tensors have them. Empty if
    there are none."""
    kept: Counter[str] = Counter()
    made_bfloat16: Counter[str] = Counter()
    for tensor in {tensor.source: tensor for tensor in plan.tensors}.values():
        counter = made_bfloat16 if weights.form(source, tensor) is None else kept
        counter[source.tensors[tensor.source].type.name] += 1
    if not kept:
        return {}
    return {
        "quant_method": "gguf",
        "kept": dict(kept.most_common()),
        "made_bfloat16": dict(made_bfloat16.most_common()),
    }


def _write_tokenizer(source: reader.GGUF, described: dict[str, Any], path: Path) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    try:
        backend, _ = gguf_tokenizer_mapping.convert_gguf_tokenizer(source.metadata["general.architecture"], described)
    except Exception as error:  # the library documents none; what reaches it has been checked, so the file is odd
        raise UserError(f"{source.path} has a tokenizer that cannot be converted: {error}.") from error
    tokenizer.settle(source, backend, set(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS))
    backend.save(str(path))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(*words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        file, directory, *form = sys.argv[1:]
        packed = form == ["packed"]
        convert(Path(file), Path(directory), lambda *done: _say("progress", *done), packed=packed)
    except UserError as error:
        _say("refused", str(error))
    except OSError as error:  # a full disk, for one
        _say("refused", f"The model could not be written to {sys.argv[2]}: {error}.")
    sys.stdout.flush()
    os._exit(0)  # without waiting for the thread that reads standard input


if __name__ == "__main__":
    main()
