"""What a checkpoint says of a KV cache in 8 bits: numbers that its keys and values are divided by."""

import math

from tgi.kernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint


def cache_scales(checkpoint: Checkpoint, layers: int) -> tuple[tuple[float, float], ...]:
    """For keys and for values of each layer: k_scale and v_scale of its attention, or kv_scale for both, or 1. Empty
    where no layer has any. Raises UserError where one is no number above 0."""

    def read(layer: int, *names: str) -> float | None:
        there = (f"model.layers.{layer}.self_attn.{name}" for name in names)
        name = next((name for name in there if name in checkpoint), None)
        if name is None:
            return None
        stored = checkpoint.stored(name)
        if stored.numel() != 1 or not 0 < (scale := float(stored)) < math.inf:
            raise UserError(
                f"Tensor {name!r} in {checkpoint.place(name)} is to be what numbers of the KV cache are divided by, so "
                "one number above 0 is expected. Leave the tensor out of the checkpoint, or make it again."
            )
        return scale

    found = [(read(layer, "k_scale", "kv_scale"), read(layer, "v_scale", "kv_scale")) for layer in range(layers)]
    if all(pair == (None, None) for pair in found):
        return ()
    return tuple((key or 1.0, value or 1.0) for key, value in found)
