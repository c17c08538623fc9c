"""The number types of request fields.

`expected` in a field's metadata is the name that a shape error gives the type (that of TGI's Rust field).
"""

from typing import Annotated

from msgspec import Meta

FLOAT32_MAX = 3.4028234663852886e38

Float32 = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX, extra={"expected": "f32"})]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, extra={"expected": "i32"})]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1, extra={"expected": "u32"})]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1, extra={"expected": "usize"})]
UInt64 = Annotated[int, Meta(ge=0, extra={"expected": "u64"})]  # msgspec bounds end at 2**63 - 1: checked below
