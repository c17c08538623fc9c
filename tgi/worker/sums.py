"""Asks Intel's MKL, with which torch's attention multiplies on CPU, for sums in one order.

Without AVX-512 its kernels sum in an order that depends on where in memory the numbers lie, so on the thread too and on
what else is in the batch. Its mode of strict reproducibility has none of that, and costs attention a tenth of its time.
"""

import os

from tgi.worker.native.build import processor

REPRODUCIBLE = "MKL_CBWR"
STRICTLY = "AUTO,STRICT"


def keep_order() -> None:
    """What the environment says counts. Before torch is imported."""
    if "avx512f" not in processor():
        os.environ.setdefault(REPRODUCIBLE, STRICTLY)
