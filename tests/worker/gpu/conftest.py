"""Kernels are computed by Triton's interpreter here, on CPU. It must be chosen before anything imports them."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.worker.gpu.interpreted import put_right

put_right()
