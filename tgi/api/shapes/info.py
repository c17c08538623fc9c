"""Answers of the routes that tell about the server."""

from msgspec import Struct


class Info(Struct):
    """Answer of GET /info: the keys of TGI 3.3.6, then those that 1.4.2 had besides."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    model_dtype: str
    model_device_type: str
    max_input_length: int
    waiting_served_ratio: float
    max_batch_total_tokens: int
    max_waiting_tokens: int
    max_batch_size: int | None
