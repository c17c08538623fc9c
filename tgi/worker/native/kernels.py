"""The compiled kernels as functions of tensors. All are bfloat16, dense and on CPU unless said otherwise.

A call computes on the calling thread and its helpers, and returns when it is done. Only one thread may call.
"""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from tgi.worker.native.build import Unavailable

WIDTH = 64  # outputs are filled up to whole blocks of this many
DEPTH = 32  # inputs must be a multiple of this
PAGE = 32  # positions of a page
WIDEST_HEAD = 256
# So often a helper looks for the next job before it sleeps: some 50 microseconds.
SPINS = 1000

THEN = {name: number for number, name in enumerate(("none", "silu", "gelu", "gelu_tanh", "add", "mul"))}  # of linear.h

_SIGNATURES = {
    "tgi_pack": (c_void_p, c_int64, c_int64, c_void_p),
    "tgi_linear": (*[c_void_p] * 7, *[c_int64] * 4),
    "tgi_norm": (*[c_void_p] * 4, c_int64, c_int64, c_int64, c_float),
    "tgi_place": (c_void_p, c_int64, c_int64, *[c_void_p] * 4, *[c_int64] * 4),
    "tgi_attend": (
        *(c_void_p, c_int64, c_int64, *[c_void_p] * 3, c_int64, c_int64),
        *(c_void_p, c_void_p, c_int64, c_int64, c_float, c_float),
    ),
}


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Kernels:
    """A loaded library. Raises Unavailable if it cannot be used."""

    def __init__(self, path: Path, threads: int) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path} cannot be loaded: {error}") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.tgi_start.argtypes, library.tgi_start.restype = (c_int, c_int), c_int
        if not library.tgi_start(threads, SPINS):
            raise Unavailable("the system does not let this process use AMX")
        self._pack, self._linear, self._norm = library.tgi_pack, library.tgi_linear, library.tgi_norm
        self._place, self._attend = library.tgi_place, library.tgi_attend

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [outputs, inputs] as `linear` takes it. `inputs` is a multiple of DEPTH."""
        outputs, inputs = weight.shape
        packed = torch.empty(-(-outputs // WIDTH) * WIDTH, inputs, dtype=torch.bfloat16)
        self._pack(weight.contiguous().data_ptr(), outputs, inputs, packed.data_ptr())
        return packed

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        outputs: int,
        bias: Tensor | None = None,
        then: int = 0,
        other: Tensor | None = None,
        plus: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        """then(x @ weight.T + bias + plus), [rows, outputs]; in float32 if `wide`.

        `bias` [outputs] and `plus` [rows, outputs] are float32, `then` is one of THEN, `other` what it adds or
        multiplies with.
        """
        rows, inputs = x.shape
        y = torch.empty(rows, outputs, dtype=torch.float32 if wide else torch.bfloat16)
        self._linear(
            x.data_ptr(), packed.data_ptr(), _at(bias), _at(plus), _at(other), None if wide else y.data_ptr(),
            y.data_ptr() if wide else None, rows, inputs, outputs, then,
        )  # fmt: skip
        return y

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
        """The norm of x [rows, size] over its rows. `weight` and `bias` [size] are float32."""
        y = torch.empty_like(x)
        rows, size = x.shape
        self._norm(x.data_ptr(), weight.data_ptr(), _at(bias), y.data_ptr(), rows, size, centred, epsilon)
        return y

    def place(
        self,
        cache: Tensor,
        qkv: Tensor,
        heads: int,
        angles: tuple[Tensor, Tensor] | None,
        places: Tensor,
        neighbours: bool,
    ) -> None:
        """Turns queries and keys of qkv [T, (heads + 2 * kv_heads) * head_dim] in place, by the cos and sin in `angles`
        (float32 [T, turned]), and writes keys and values to `places` (int64 [T]) of `cache` [pages, kv_heads, 2 * PAGE *
        head_dim]."""
        _, kv_heads, size = cache.shape
        cos, sin = angles if angles is not None else (None, None)
        self._place(
            cache.data_ptr(), kv_heads, size // (2 * PAGE), qkv.data_ptr(), _at(cos), _at(sin), places.data_ptr(),
            len(qkv), heads, 0 if cos is None else cos.shape[1], neighbours,
        )  # fmt: skip

    def attend(
        self,
        cache: Tensor,
        qkv: Tensor,
        heads: int,
        bounds: Tensor,
        contexts: Tensor,
        pages: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """What the queries of qkv find, [T, heads * head_dim], after `place`.

        Row r has tokens bounds[r] to bounds[r + 1] (int64 [R + 1]) and sees contexts[r] positions (int64 [R]) in
        pages[r] (int32 [R, P]).
        """
        _, kv_heads, size = cache.shape
        head_dim = size // (2 * PAGE)
        y = torch.empty(len(qkv), heads * head_dim, dtype=torch.bfloat16)
        self._attend(
            cache.data_ptr(), kv_heads, head_dim, bounds.data_ptr(), contexts.data_ptr(), pages.data_ptr(), *pages.shape,
            qkv.data_ptr(), y.data_ptr(), heads, window or 0, scale, softcap or 0.0,
        )  # fmt: skip
        return y
