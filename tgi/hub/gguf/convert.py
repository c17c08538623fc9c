"""Child process that converts a GGUF file to a model directory: `python -P -m tgi.hub.gguf.convert FILE DIR FORM
[MMPROJ]`. The form `packed` keeps weights in their own bits, and rounds nothing; `plain` rounds to bfloat16. MMPROJ is
the file of the vision part.

It imports transformers, which takes memory and seconds, and exits. It prints one JSON list per line:
["progress", stage, percent, bytes], ["note", sentence] for the log, and, for a defective file, ["refused", sentence].
It ends when its standard input closes.
"""

import json
import os
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgi.hub import weight_files
from tgi.hub.gguf import architecture, conversion_plan, projector, reader, tokenizer, weights
from tgi.hub.gguf_import import ProgressCallback
from tgi.microkernel.errors import UserError


def convert(
    file: Path, directory: Path, progress: ProgressCallback, *, packed: bool = False, mmproj: Path | None = None
) -> tuple[str, ...]:
    """Fills `directory`, which exists and is empty. `packed` as for write_weights; config.json then lists the
    block types that kept their bits and those that did not. `mmproj` is the file of the vision part, which keeps its
    numbers. Returns the notes of the plan. Raises UserError for a defective file."""
    progress("reading", 0)
    source = reader.read_gguf(file)
    plan = architecture.plan_conversion(source)
    config, vision = plan.config, None
    if mmproj is not None:
        images = reader.read_gguf(mmproj)
        vision = projector.plan_vision(images, source, plan.config)
        config = vision.config
        named = [(one, *vision.text_prefixes) for one in plan.tensors]
        tensors = [
            replace(one, name=whole + one.name.removeprefix(part)) if one.name.startswith(part) else one
            for one, whole, part in named
        ]
        plan = replace(plan, tensors=tensors)
    generation = tokenizer.generation_config(source)
    tokenizer_config = tokenizer.tokenizer_config(source, plan.context)
    described = tokenizer.tokenizer_description(source)
    weights.write_weights(
        source,
        plan.tensors,
        directory / ("model.safetensors" if vision is None else "text.safetensors"),
        lambda done, size: progress("importing weights", 100 * done / size, size),
        packed=packed,
        plain=plan.plain,
    )
    if vision is not None:
        path = directory / "vision.safetensors"
        weights.write_weights(images, vision.tensors, path, lambda done, size: None, plain=True, packed=True)
        for name, value in vision.files.items():
            _write_json(directory / name, value)
        _write_json(directory / weight_files.INDEX, {"metadata": {}, "weight_map": weight_files.weight_map(directory)})
        tokenizer_config |= vision.tokens
    for name, tensors in plan.parts.items():
        (directory / name).mkdir()
        path = directory / name / "model.safetensors"
        weights.write_weights(source, tensors, path, lambda done, size: None, plain=True, packed=packed)
    for name, value in plan.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        _write_json(directory / name, value)
    progress("importing tokenizer", 0)
    _write_tokenizer(source, described, directory / "tokenizer.json")
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_json(directory / "generation_config.json", generation)
    if packed and not plan.plain and (quantized := _quantization(source, plan)):
        config["quantization_config"] = quantized
    _write_json(directory / "config.json", config)
    progress("importing tokenizer", 100)
    return plan.notes


def _quantization(source: reader.GGUFFile, plan: conversion_plan.ConversionPlan) -> dict[str, Any]:
    """The config.json entry for weights in their own bits: tensors per block type. Empty without such weights."""
    kept: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for tensor in {tensor.source: tensor for tensor in plan.tensors if tensor.sources}.values():
        counter = plain if weights.stored_block_format(source, tensor) is None else kept
        counter[source.tensors[tensor.source].type.name] += 1
    if not kept:
        return {}
    return {
        "quant_method": "gguf",
        "kept": dict(kept.most_common()),
        "plain": dict(plain.most_common()),
    }


def _write_tokenizer(source: reader.GGUFFile, described: dict[str, Any], path: Path) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    try:
        if tokenizer.merges_characters(source):
            backend = tokenizer.character_tokenizer(source, described)
        elif described["tokenizer_type"] == tokenizer.UNIGRAM:
            backend = tokenizer.unigram_tokenizer(source, described)
        elif described["tokenizer_type"] == tokenizer.WORDPIECE:
            backend = tokenizer.wordpiece_tokenizer(source, described)
        else:
            kind = source.metadata["general.architecture"]
            backend, _ = gguf_tokenizer_mapping.convert_gguf_tokenizer(kind, described)
        tokenizer.complete_tokenizer(source, backend, gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)
    except UserError:
        raise
    except Exception as error:  # the library documents no exceptions; its input has been checked
        raise UserError(f"{source.path} has a tokenizer that cannot be converted: {error}.") from error
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
    """Converts the file named on the command line and reports progress on standard output."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        file, directory, form, *more = sys.argv[1:]
        mmproj = Path(more[0]) if more else None
        progress = lambda *done: _say("progress", *done)  # noqa: E731
        for note in convert(Path(file), Path(directory), progress, packed=form == "packed", mmproj=mmproj):
            _say("note", note)
    except UserError as error:
        _say("refused", str(error))
    except OSError as error:  # such as a full disk
        _say("refused", f"The model could not be written to {sys.argv[2]}: {error}.")
    sys.stdout.flush()
    os._exit(0)  # does not wait for the thread that reads standard input


if __name__ == "__main__":
    main()
