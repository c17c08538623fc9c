"""Slots of the state of recurrent layers."""

import torch

from tgi.worker.kv_cache_sizes import STATE_ALIGNMENT
from tgi.worker.state_cache import StateCache, StateSpec, StateTensor


def test_slots_hold_each_layers_tensors_and_are_copied_whole():
    conv, matrix = StateTensor((5, 2), torch.bfloat16), StateTensor((2, 3, 3), torch.float32)
    spec = StateSpec(({"conv": conv}, {"conv": conv, "delta": matrix}))
    assert spec.bytes == STATE_ALIGNMENT + STATE_ALIGNMENT + 2 * STATE_ALIGNMENT
    cache = StateCache(spec, 4, torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in layer.values()]
    assert [(x.shape[1:], x.dtype) for x in tensors] == [conv, conv, matrix]
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        for slot in range(cache.slots):
            tensor[slot] = 10 * number + slot
    cache.copy(1, 3)
    for number, tensor in enumerate(tensors):
        for slot, value in enumerate((0, 1, 2, 1)):
            assert (tensor[slot] == 10 * number + value).all()
