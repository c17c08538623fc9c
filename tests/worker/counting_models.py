"""Models that count: after id k they continue with k + 1, so that what a head should draft is known.

The embedding of id k is that of 0 turned k times by a rotation, and the output head looks for the embedding of the
predecessor. Layers add little to it.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tgi.worker.checkpoint import SINGLE_FILE

ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")  # the last matrices of a layer's parts
SMALL = 0.02


def rotation(hidden: int, vocab: int) -> Tensor:
    """A rotation [hidden, hidden] of an order that is `vocab`."""
    generator = torch.Generator().manual_seed(3)
    turns = torch.randperm(vocab - 1, generator=generator)[: hidden // 2] + 1
    angles = 2 * torch.pi * turns.double() / vocab
    blocks = [
        torch.tensor([[c, -s], [s, c]]) for c, s in zip(angles.cos().tolist(), angles.sin().tolist(), strict=True)
    ]
    return torch.block_diag(*blocks).double()


def counting(source: Path, directory: Path, centred: bool = False) -> Path:
    """A copy of a tiny model that counts. `centred`: its norms scale by 1 + weight."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / SINGLE_FILE)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    turn, rows = rotation(hidden, vocab), [torch.ones(hidden).double()]
    for _ in range(vocab - 1):
        rows.append(turn @ rows[-1])
    embedding = torch.stack(rows).float()
    for name, tensor in tensors.items():
        if name.endswith(ADDED):
            tensors[name] = tensor * SMALL
        elif name.endswith("norm.weight"):
            tensors[name] = torch.full_like(tensor, 0.0 if centred else 1.0)
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.roll(1, 0)}
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / SINGLE_FILE, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return directory
