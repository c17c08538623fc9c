"""Responses of /info and /v1/models."""

from typing import Annotated, Literal

from tgi.api.shapes.types import ResponseBody, Size, doc


class Info(ResponseBody, kw_only=True):
    """The model and the measured limits: the keys of TGI 3.3.6, those that only 1.4.2 had, then this server's own."""

    model_id: Annotated[str, doc("Model info", example="bigscience/blomm-560m")]
    model_sha: Annotated[str | None, doc(example="e985a63cdc139290c5f700ff1929f0b5942cced2")] = None
    model_pipeline_tag: Annotated[str | None, doc(example="text-generation")] = None
    max_concurrent_requests: Annotated[Size, doc("Router Parameters", example=128)]
    max_best_of: Annotated[Size, doc(example=2)]
    max_stop_sequences: Annotated[Size, doc(example=4)]
    max_input_tokens: Annotated[Size, doc(example=1024)]
    max_total_tokens: Annotated[Size, doc(example=2048)]
    validation_workers: Annotated[Size, doc(example=2)]
    max_client_batch_size: Annotated[Size, doc(example=32)]
    router: Annotated[str, doc("Router Info", example="text-generation-router")]
    version: Annotated[str, doc("The TGI release whose contract is served", example="3.3.6")]
    sha: str | None = None
    docker_label: str | None = None
    model_dtype: Annotated[str, doc(example="torch.bfloat16")]
    model_device_type: Annotated[str, doc(example="cuda")]
    max_input_length: Annotated[Size, doc("Older name of max_input_tokens", example=1024)]
    waiting_served_ratio: Annotated[float, doc(example=0.3)]
    max_batch_total_tokens: Annotated[Size, doc(example=16000)]
    max_waiting_tokens: Annotated[Size, doc(example=20)]
    max_batch_size: Annotated[Size | None, doc(example=64)]
    server_version: Annotated[str, doc("Version of this server", example="0.1.0")]
    generation_config: Annotated[
        dict[str, float],
        doc(
            "Sampling defaults of the /v1 routes, from the model's generation_config.json",
            example={"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
    ]
    eos_token_ids: Annotated[list[Size], doc("Ids of the tokens that end an output", example=[2])]


class ModelStatus(ResponseBody, omit_defaults=True):
    """Whether one of several models is loaded, in the form of llama.cpp."""

    value: Annotated[str, doc("unloaded, loading, loaded, draining, sleeping or failed", example="loaded")]
    stage: Annotated[str | None, doc("Of loading", example="worker-0 (loading weights)")] = None
    error: Annotated[str | None, doc("Why it could not be loaded")] = None


class SleepState(ResponseBody):
    """Whether a model sleeps."""

    is_sleeping: bool


class ModelInfo(ResponseBody, omit_defaults=True):
    """A model, or an adapter of one."""

    id: Annotated[str, doc(example="gpt2")]
    object: Annotated[str, doc(example="model")]
    created: Annotated[int, doc(example=1686935002, format="int64", minimum=0)]
    owned_by: Annotated[str, doc(example="openai")]
    status: Annotated[ModelStatus | None, doc("On servers of several models")] = None


class ModelList(ResponseBody):
    """What is served."""

    object: Literal["list"]
    data: list[ModelInfo]
