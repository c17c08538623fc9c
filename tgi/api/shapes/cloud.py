"""Requests and responses of POST /invocations (SageMaker) and /vertex."""

from typing import Annotated, Any

from msgspec import Raw, Struct

from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.shapes.native import CompatGenerateRequest, GenerateParameters
from tgi.api.shapes.native_responses import GenerateResponse, StreamResponse
from tgi.api.shapes.openai_responses import ChatCompletion, ChatCompletionChunk, Chunk, CompletionFinal
from tgi.api.shapes.types import ResponseBody, any_of, doc, ref

SagemakerRequest = Annotated[Any, any_of("SagemakerRequest", CompatGenerateRequest, ChatRequest, CompletionRequest)]
SagemakerResponse = Annotated[
    Any,
    any_of(
        "SagemakerResponse",
        GenerateResponse,
        {"type": "array", "items": ref("GenerateResponse"), "minItems": 1, "maxItems": 1},
        ChatCompletion,
        CompletionFinal,
    ),
]
SagemakerStreamResponse = Annotated[
    Any, any_of("SagemakerStreamResponse", StreamResponse, ChatCompletionChunk, Chunk, CompletionFinal)
]


class GenerateVertexInstance(Struct):
    """A prompt. Of the parameters only `max_new_tokens` and `seed` count; tokens are always sampled."""

    inputs: Annotated[str, doc(example="What is Deep Learning?")]
    parameters: GenerateParameters | None = None


VertexInstance = Annotated[Raw, any_of("VertexInstance", GenerateVertexInstance, ChatRequest)]


class VertexRequest(Struct):
    """Prompts and chats that are answered together."""

    instances: Annotated[list[VertexInstance], doc(minItems=1)]


class VertexResponse(ResponseBody):
    """The generated texts, in the order of the instances."""

    predictions: list[str]
