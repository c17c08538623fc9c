"""Sums of few bytes over the GPUs of one host, in memory that they map from each other (torch's symmetric memory): one
kernel in place of NCCL's, whose latency is most of the time of a small sum.

With multicast (NVLink switches) the switch adds up, otherwise each GPU reads what the others have and adds it up in the
order of the ranks. All ranks get the same bits. `connect` chooses by a self-test; NCCL computes larger sums, and all
where no way passes it. No GPU has run this yet.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 10  # of a tensor; larger ones take NCCL as long or less
ALIGNMENT = 16  # bytes; tensors are a multiple of it
MAX_ERROR = 0.02  # of the largest sum: bfloat16 may be rounded after each addition

Reduce = Callable[[Tensor], None]


class SymmetricMemory(NamedTuple):
    """Memory that all ranks of the default group have, and the operation that adds it up."""

    buffer: Tensor  # uint8 [MAX_BYTES] on this rank's GPU
    group: str
    multicast: bool

    def takes(self, x: Tensor) -> bool:
        """Whether `all_reduce` computes the sum of such tensors."""
        return x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0

    def all_reduce(self, x: Tensor) -> None:
        """Replaces a contiguous x by its sum over all ranks. CUDA graphs can record it."""
        own = self.buffer[: x.nbytes].view(x.dtype)
        own.copy_(x.view(-1))
        if self.multicast:
            x.view(-1).copy_(torch.ops.symm_mem.multimem_all_reduce_(own, "sum", self.group))
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(own, "sum", self.group, x.view(-1))


def connect(device: torch.device) -> SymmetricMemory | None:
    """What passes the self-test on all ranks, which must be on this host and call this together; None: nothing."""
    memory = None
    why = ""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(buffer, dist.group.WORLD)
        memory = SymmetricMemory(buffer, dist.group.WORLD.group_name, handle.multicast_ptr != 0)
    except (ImportError, AttributeError, RuntimeError) as error:
        why = str(error)
    if not agreed(memory is not None):
        log.info("all sums of the ranks' results are NCCL's: %s", why or "not all ranks have symmetric memory")
        return None
    assert memory is not None
    multicast = agreed(memory.multicast)
    for way in (True, False) if multicast else (False,):
        memory = memory._replace(multicast=way)
        why = self_test(memory.all_reduce, device)
        if agreed(not why):
            return memory
        log.warning("a sum in symmetric memory (multicast: %s) is not used: %s", way, why or "it fails on other ranks")
    return None


def agreed(holds: bool) -> bool:
    """Whether this holds on all ranks."""
    found = torch.tensor(holds)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def self_test(all_reduce: Reduce, device: torch.device) -> str:
    """Why the results of `all_reduce` on this rank are wrong, or not those of the first rank bit for bit; "" if they
    are right. All ranks call it together, and all make the same calls, whatever they find."""
    rank, ranks, reason = dist.get_rank(), dist.get_world_size(), ""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for count in (ALIGNMENT // dtype.itemsize, 8 * 1000, MAX_BYTES // dtype.itemsize):
            for turn in range(3):  # the memory is used again at once
                generator = torch.Generator().manual_seed(turn)
                every = [torch.randn(count, generator=generator).to(dtype) for _ in range(ranks)]
                expected = torch.stack(every).float().sum(0)
                x = every[rank].to(device, copy=True)
                try:
                    all_reduce(x)
                except RuntimeError as error:
                    reason = reason or str(error)
                first = x.clone()
                dist.broadcast(first, 0)
                off = float((x.cpu().float() - expected).abs().max() / expected.abs().max())
                if not off <= MAX_ERROR:
                    reason = reason or f"{count} numbers of {dtype} are off by {off:.3g} of the largest"
                elif not torch.equal(first, x):
                    reason = reason or f"{count} numbers of {dtype} differ from those of the first rank"
    return reason
