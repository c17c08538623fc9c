"""Requests and responses of the KServe v2 routes. Texts are lists of UTF-8 bytes."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tgi.api.shapes.native import GenerateParameters
from tgi.api.shapes.types import ResponseBody, Size, doc

Byte = Annotated[int, Meta(ge=0, le=255, extra={"expected": "u8"})]


class ServerMetadata(ResponseBody):
    """Who answers, and what it can do besides inference."""

    name: Annotated[str, doc(example="text-generation-inference")]
    version: str
    extensions: list[str]


class ModelMetadata(ResponseBody):
    """The model under the name and version that it was asked for."""

    name: str
    version: str
    extensions: list[str]


class Live(ResponseBody):
    """The process answers; /health says whether it can compute."""

    live: Literal[True]


class InferenceInput(Struct):
    """A prompt."""

    name: str
    shape: list[Size]
    datatype: Annotated[str, doc(example="BYTES")]
    data: Annotated[list[Byte], doc("The prompt in UTF-8", example=[72, 105])]


class RequestedOutput(Struct):
    """The name of an answer."""

    name: str


class InferenceRequest(Struct, kw_only=True):
    """Prompts, and as many names for their answers."""

    id: str
    parameters: GenerateParameters | None = None
    inputs: list[InferenceInput]
    outputs: list[RequestedOutput]


class InferenceOutput(ResponseBody):
    """A generated text."""

    name: str
    shape: list[Size]
    datatype: Literal["BYTES"]
    data: Annotated[list[Byte], doc("The text in UTF-8")]


class InferenceResponse(ResponseBody):
    """The generated texts."""

    id: str
    outputs: list[InferenceOutput]
