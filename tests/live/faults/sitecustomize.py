"""Faults for tests of crash isolation, in any server that has this directory on its PYTHONPATH: a request crashes or
hangs the process that handles it, by its seed, or by a text in its image. Python imports this module at start, and a
fork server has imported the roles when it forks their processes.
"""

import os
import signal
import sys
import time

# The seed of a request that crashes a process: where it does so.
ENCODING, DETOKENIZING, ADDED, PLANNED, EVERY_FOURTH_TOKEN, FATAL_EXIT = 6661, 6662, 6663, 6664, 6665, 6666
# The seed of a request that hangs a process.
HANGS_ENCODING, HANGS_ADDED, HANGS_WORKER = 6671, 6672, 6673
# In the file of an image that crashes or hangs its decoder.
CRASHES_DECODER, HANGS_DECODER = b"crash the decoder", b"hang the decoder"


def crash() -> None:
    """As a defect in C code does: in this thread, at once."""
    signal.raise_signal(signal.SIGSEGV)


def hang() -> None:
    """As an endless loop does."""
    while True:
        time.sleep(60)


def _in_media() -> None:
    from tgi.media import loader

    decode = loader.decode

    def crashing_decode(data, max_pixels):
        if CRASHES_DECODER in data:
            crash()
        if HANGS_DECODER in data:
            hang()
        return decode(data, max_pixels)

    loader.decode = crashing_decode


def _in_tokenizer() -> None:
    from tgi.tokenizer.encoder import PromptEncoder
    from tgi.tokenizer.request import TokenizerRequestState

    encode, append = PromptEncoder.encode_generate, TokenizerRequestState.append_token

    def encode_generate(self, generate):
        if generate.sampling.seed == ENCODING:
            crash()
        if generate.sampling.seed == HANGS_ENCODING:
            hang()
        return encode(self, generate)

    def append_token(self, token_id):
        if self.generate.sampling.seed == DETOKENIZING and len(self.generated_ids) >= 10:
            crash()
        return append(self, token_id)

    PromptEncoder.encode_generate, TokenizerRequestState.append_token = encode_generate, append_token


def _in_scheduler() -> None:
    from tgi.microkernel.messages.protocol import Add, decode
    from tgi.scheduler.decode_batch import RunningBatch
    from tgi.scheduler.scheduler import Scheduler

    handle, assign = Scheduler.handle, RunningBatch.assign_slot

    def crashing_handle(self, message, source, now):
        if isinstance(message, Add) and decode(message.sampling).seed == ADDED:
            crash()
        if isinstance(message, Add) and decode(message.sampling).seed == HANGS_ADDED:
            hang()
        return handle(self, message, source, now)

    def assign_slot(self, request):
        slot = assign(self, request)
        if decode(request.sampling).seed == PLANNED:
            crash()
        return slot

    RunningBatch.assign_slot = assign_slot
    Scheduler.handle = crashing_handle


def _in_worker() -> None:
    from tgi.microkernel.messages.protocol import decode
    from tgi.worker.fake_worker.fake_worker import FakeWorker

    sample = FakeWorker._sample_one

    def sample_one(self, slot):
        request = self._slots[slot]
        sampled_here = len(request.ids) + 1 - len(request.slot.token_ids) // 4
        if decode(request.slot.sampling).seed == EVERY_FOURTH_TOKEN and sampled_here == 4:
            crash()
        if decode(request.slot.sampling).seed == HANGS_WORKER:
            hang()
        if decode(request.slot.sampling).seed == FATAL_EXIT:
            sys.exit(3)  # as if it could not start
        return sample(self, slot)

    FakeWorker._sample_one = sample_one


def _in_forked_process() -> None:
    for role, install in ROLES.items():
        if f"tgi.{role}.main" in sys.modules and role not in installed:
            installed.add(role)
            install()


ROLES = {"media": _in_media, "tokenizer": _in_tokenizer, "scheduler": _in_scheduler, "worker": _in_worker}
installed: set[str] = set()
os.register_at_fork(after_in_child=_in_forked_process)
