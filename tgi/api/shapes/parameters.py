"""The sampling parameters as request fields: Struct bases made from the table in messages/sampling_params.py."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct

from tgi.api.shapes.types import Float32, Int32, UInt32, doc
from tgi.microkernel.messages.sampling_params import PARAMETERS, Parameter, Range, RequestField

JSON_TYPES: dict[str, Any] = {"bool": bool, "f32": Float32, "i32": Int32, "u32": UInt32}

# The parameters that the routes have: name in SamplingParams -> request field, whose name is filled in.
NATIVE: dict[str, RequestField] = {
    name: field._replace(name=field.name or name)
    for name, parameter in PARAMETERS.items()
    if (field := parameter.native) is not None
}
OPENAI: dict[str, RequestField] = {
    name: field._replace(name=field.name or name)
    for name, parameter in PARAMETERS.items()
    if (field := parameter.openai) is not None
}


def _field(parameter: Parameter, field: RequestField, allowed: Range | None) -> tuple[str, Any, None]:
    """An optional field of a Struct, with what the OpenAPI document says about it."""
    bounds = allowed or Range("")  # without a range: no bounds
    keywords = {"exclusiveMinimum": bounds.above, "minimum": bounds.minimum, "maximum": bounds.maximum}
    schema = {keyword: bound for keyword, bound in keywords.items() if bound is not None}
    described = doc(field.description or parameter.effect, example=field.example, **schema)
    return field.name, Annotated[JSON_TYPES[parameter.json_type] | None, described], None


# Type checkers do not see these fields; request_parameters.py reads them by name.
if TYPE_CHECKING:
    NativeSamplingFields = Struct
    OpenAiSamplingFields = Struct
else:
    NativeSamplingFields = msgspec.defstruct(
        "NativeSamplingFields",
        [_field(PARAMETERS[name], field, PARAMETERS[name].range) for name, field in NATIVE.items()],
        kw_only=True,
    )
    OpenAiSamplingFields = msgspec.defstruct(
        "OpenAiSamplingFields",
        [_field(PARAMETERS[name], field, PARAMETERS[name].openai_range) for name, field in OPENAI.items()],
        kw_only=True,
    )
