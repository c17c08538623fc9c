"""Throughput of embeddings: 512 texts of 20 to 300 tokens in one request to a server, next to the same texts through
transformers and fastembed (ONNX Runtime), in turns on one machine.

transformers pads batches of 32 texts: in the order of the texts, and sorted by their length as sentence-transformers
does. With --onnx DIR the model is exported there once, and served by fastembed from PYTHONPATH.
"""

import argparse
import base64
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.benchmarks.servers import Failed, Server, free_port

BATCH = 32
START_SECONDS = 300

Texts = list[str]
Vectors = list[Any]


def make_texts(directory: Path, count: int, least: int, most: int, seed: int = 0) -> Texts:
    """Texts of words that are one token each, of `least` to `most` tokens with two special ones."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    words = sorted(
        word for word in vocabulary if word.isascii() and word.isalpha() and word.islower() and len(word) > 2
    )
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(least, most) - 2)) for _ in range(count)]


def transformers_peer(directory: Path, sorts: bool) -> Callable[[Texts], Vectors]:
    """Mean pooling over padded batches."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def embed(texts: Texts) -> Vectors:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index])) if sorts else range(len(texts))
        found: Vectors = [None] * len(texts)
        for begin in range(0, len(texts), BATCH):
            batch = list(order[begin : begin + BATCH])
            given = tokenizer([texts[index] for index in batch], padding=True, truncation=False, return_tensors="pt")
            mask = given["attention_mask"][:, :, None].float()
            with torch.inference_mode():
                sums = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
            for index, vector in zip(batch, torch.nn.functional.normalize(sums).numpy(), strict=True):
                found[index] = vector
        return found

    return embed


def fastembed_peer(directory: Path, onnx: Path) -> Callable[[Texts], Vectors]:
    """fastembed with the exported model."""
    from fastembed import TextEmbedding  # type: ignore[import-not-found]
    from fastembed.common.model_description import ModelSource, PoolingType  # type: ignore[import-not-found]

    size = json.loads((directory / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(
        model="local", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="local"), dim=size,
        model_file="model.onnx",
    )  # fmt: skip
    model = TextEmbedding("local", specific_model_path=str(onnx))

    def embed(texts: Texts) -> Vectors:
        return list(model.embed(texts, batch_size=BATCH))

    return embed


def export(directory: Path, onnx: Path) -> None:
    """Writes the model in ONNX's format, with its tokenizer."""
    import torch
    import transformers

    onnx.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    ids = torch.ones(2, 16, dtype=torch.int64)
    names = ("input_ids", "attention_mask", "token_type_ids")
    dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    torch.onnx.export(
        model, (), onnx / "model.onnx", kwargs={name: ids.clone() for name in names}, input_names=list(names),
        output_names=["last_hidden_state"], dynamic_shapes=dict.fromkeys(names, dimensions), dynamo=True,
        external_data=False,
    )  # fmt: skip
    # Without the truncation and the padding that its file asks for.
    tokenizer = json.loads((directory / "tokenizer.json").read_text()) | {"truncation": None, "padding": None}
    (onnx / "tokenizer.json").write_text(json.dumps(tokenizer))
    (onnx / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512, "pad_token": "[PAD]"}))
    (onnx / "config.json").write_text((directory / "config.json").read_text())


def serve_peer(name: str, directory: Path, texts: Texts, onnx: Path | None) -> None:
    """The process of a peer: for each line of input computes all texts, and answers with the seconds and, at first,
    the vectors."""
    if name == "fastembed":
        assert onnx is not None
        embed = fastembed_peer(directory, onnx)
    else:
        embed = transformers_peer(directory, name == "transformers, sorted")
    first = True
    for _ in sys.stdin:
        began = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - began
        sent = [base64.b64encode(array("f", vector.tolist()).tobytes()).decode() for vector in vectors] if first else []
        first = False
        print(json.dumps([seconds, sent]), flush=True)


class Peer:
    """A running peer process."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-P", "-m", "scripts.benchmarks", "embeddings", "--peer", name, *_shared(arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self) -> tuple[float, list[str]]:
        """Seconds for all texts, and the vectors of the first run. Raises Failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("["):
                seconds, vectors = json.loads(line)
                return seconds, vectors
        raise Failed("the peer has ended")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def ask(port: int, texts: Texts) -> tuple[float, list[str]]:
    """Seconds for all texts in one request to the server, and their vectors."""
    body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/embeddings", body, {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=START_SECONDS) as reply:
        answer = json.loads(reply.read())
    return time.perf_counter() - began, [one["embedding"] for one in answer["data"]]


def _shared(arguments: argparse.Namespace) -> list[str]:
    given = ["--model-id", str(arguments.model_id), "--texts", str(arguments.texts)]
    given += ["--least", str(arguments.least), "--most", str(arguments.most)]
    return given + (["--onnx", str(arguments.onnx)] if arguments.onnx else [])


def difference(one: list[str], other: list[str]) -> float:
    """The largest difference of a number."""
    largest = 0.0
    for first, second in zip(one, other, strict=True):
        numbers = (array("f", base64.b64decode(text)) for text in (first, second))
        largest = max(largest, *(abs(a - b) for a, b in zip(*numbers, strict=True)))
    return largest


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", type=Path, required=True, help="a directory of BERT with mean pooling")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--least", type=int, default=20, help="tokens of the shortest text")
    parser.add_argument("--most", type=int, default=300, help="tokens of the longest text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="of the server")
    parser.add_argument("--onnx", type=Path, help="where the exported model is, or will be: measures fastembed, too")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    texts = make_texts(arguments.model_id, arguments.texts, arguments.least, arguments.most)
    if arguments.peer == "export":
        export(arguments.model_id, arguments.onnx)
        return
    if arguments.peer:
        serve_peer(arguments.peer, arguments.model_id, texts, arguments.onnx)
        return
    tokens = sum(len(text.split()) + 2 for text in texts)
    names = ["transformers", "transformers, sorted"]
    if arguments.onnx:
        names.append("fastembed")
        if not (arguments.onnx / "model.onnx").is_file():
            command = [sys.executable, "-P", "-m", "scripts.benchmarks", "embeddings", "--peer", "export"]
            subprocess.run([*command, *_shared(arguments)], check=True)
    port = free_port()
    command = [sys.executable, "-P", "-m", "tgi", "up", "--model-id", str(arguments.model_id), "--port", str(port)]
    command += ["--hostname", "127.0.0.1", "--max-input-tokens", "512", "--dtype", arguments.dtype]
    times: dict[str, list[float]] = {name: [] for name in ["tgi", *names]}
    with Server(command, {}, port):
        began = time.perf_counter()
        while True:
            try:
                _, expected = ask(port, texts)
                break
            except OSError as error:
                if time.perf_counter() - began > START_SECONDS:
                    raise Failed(f"the server does not answer: {error}") from error
                time.sleep(0.2)
        peers = {name: Peer(name, arguments) for name in names}
        try:
            for name, peer in peers.items():
                _, vectors = peer.run()
                print(f"{name}: numbers differ by up to {difference(expected, vectors):.1e}")
            for _ in range(arguments.rounds):
                times["tgi"].append(ask(port, texts)[0])
                for name, peer in peers.items():
                    times[name].append(peer.run()[0])
        finally:
            for peer in peers.values():
                peer.close()
    print(f"{len(texts)} texts, {tokens} tokens, {arguments.rounds} rounds in turn; medians")
    own = statistics.median(times["tgi"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratios = [other / mine for other, mine in zip(seconds, times["tgi"], strict=True)]
        print(
            f"{name:<22} {median:7.2f} s {len(texts) / median:8.1f} texts/s {tokens / median:9.0f} tokens/s   "
            f"tgi is {median / own:.2f} x as quick (by round {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
