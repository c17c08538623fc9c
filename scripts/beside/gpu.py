"""Whether servers that can are to compute on a GPU, and what a peer has for attention there."""

import os
from functools import cache
from pathlib import Path

from scripts.beside.models import run
from tgi.runtime import ABSENT, nvidia_smi

# transformers takes Flash Attention by itself where it is; its kernels come from the Hub when first asked for.
ASKED = """
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available
print(is_flash_attn_3_available(kernels_fallback_ok=True) or is_flash_attn_2_available(kernels_fallback_ok=True))
"""


def found() -> bool:
    """Whether there is a GPU that is not hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return nvidia_smi("--query-gpu=name", "--format=csv,noheader") != ABSENT


@cache
def flash(python: Path) -> bool:
    """Whether transformers in that environment has Flash Attention for the GPU. Failed if it cannot be asked."""
    return run(python, "-c", ASKED, PYTHONPATH="").split()[-1] == "True"
