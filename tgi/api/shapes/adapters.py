"""Requests and responses of the routes that load and unload adapters."""

from typing import Annotated, Literal

from msgspec import Struct

from tgi.api.shapes.types import ResponseBody, doc

LoraName = Annotated[
    str, doc("What requests call the adapter: as `adapter_id`, or as `model` on OpenAI's routes", example="poems")
]


class LoadLoraAdapterRequest(Struct):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: LoraName
    lora_path: Annotated[
        str, doc("Absolute path of a directory on the server's host, as PEFT writes it", example="/data/adapters/poems")
    ]


class UnloadLoraAdapterRequest(Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: LoraName


class ModelDeleted(ResponseBody):
    """An adapter that can be asked for no more."""

    id: Annotated[str, doc(example="poems")]
    object: Literal["model"]
    deleted: bool
