"""Sampling defaults from the model's generation_config.json: for requests on /v1, unless they have the field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Front, standard
from tgi.microkernel.messages.protocol import Generate
from tgi.microkernel.messages.sampling_params import SamplingDefaults, SamplingParams
from tgi.microkernel.settings.table import Settings

SAMPLING = (0.5, 20, 0.75, 0.125, 1.25)  # temperature, top_k, top_p, min_p, repetition_penalty
DEFAULTS = SamplingDefaults(*SAMPLING, max_tokens=7)
MESSAGES = [{"role": "user", "content": "x"}]
CHAT, COMPLETION, NATIVE = {"messages": MESSAGES}, {"prompt": "x"}, {"inputs": "x"}
V1 = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/invocations", CHAT),
    ("/invocations", COMPLETION),
    ("/vertex", {"instances": [CHAT]}),
]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    front = Front(Settings(validation_workers=1, hostname="127.0.0.1"), tmp_path_factory.mktemp("front"), standard)
    front.start()
    front.tokenizers[0].defaults = DEFAULTS
    front.tokenizers[0].start()
    front.until_ready()
    yield front
    front.stop()


def params_of(front: Front, path: str, body: dict[str, Any]) -> SamplingParams:
    """The SamplingParams that reach the tokenizer."""
    assert front.post(path, json.dumps(body)).status == 200
    return front.tokenizers[0].next(Generate).sampling  # type: ignore[no-any-return]


def values(sampling: SamplingParams) -> tuple[float, ...]:
    return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)


@pytest.mark.parametrize(("path", "body"), V1)
def test_absent_fields_have_the_model_s_defaults(front: Front, path: str, body: dict[str, Any]) -> None:
    sampling = params_of(front, path, body)
    assert values(sampling) == SAMPLING
    assert sampling.samples


@pytest.mark.parametrize("path", ["/generate", "/", "/invocations"])
@pytest.mark.parametrize("parameters", [{}, {"do_sample": True}, {"temperature": 0.9}])
def test_native_routes_have_tgi_s_defaults(front: Front, path: str, parameters: dict[str, Any]) -> None:
    sampling = params_of(front, path, NATIVE | {"parameters": parameters})
    assert sampling.temperature in (1.0, pytest.approx(parameters.get("temperature", 1.0)))
    assert values(sampling)[1:] == (0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1}, (1.0, 20, 0.75, 0.125, 1.25)),
        ({"temperature": 0.25, "top_k": 3}, (0.25, 3, 0.75, 0.125, 1.25)),
        ({"top_k": 0}, (0.5, 0, 0.75, 0.125, 1.25)),
        ({"top_k": -1, "top_p": 1}, (0.5, 0, 1.0, 0.125, 1.25)),
        ({"repetition_penalty": 1, "min_p": 0}, (0.5, 20, 0.75, 0.0, 1.0)),
        ({"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, (1.0, 0, 1.0, 0.0, 1.0)),
        ({"temperature": None, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None}, SAMPLING),
    ],
)
@pytest.mark.parametrize(("path", "body"), V1[:2])
def test_fields_of_the_request_have_precedence(
    front: Front, path: str, body: dict[str, Any], fields: dict[str, Any], expected: tuple[float, ...]
) -> None:
    assert values(params_of(front, path, body | fields)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 7), ({"max_tokens": None}, 7), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 3}, 3)],
)
@pytest.mark.parametrize(("path", "body"), V1[:2])
def test_a_default_length_is_for_requests_without_one(
    front: Front, path: str, body: dict[str, Any], fields: dict[str, Any], expected: int
) -> None:
    assert front.post(path, json.dumps(body | fields)).status == 200
    assert front.tokenizers[0].next(Generate).max_new_tokens == expected


@pytest.mark.parametrize(("path", "body"), V1[:2])
def test_temperature_0_is_greedy_with_any_defaults(front: Front, path: str, body: dict[str, Any]) -> None:
    sampling = params_of(front, path, body | {"temperature": 0})
    assert not sampling.samples
    assert sampling.repetition_penalty == 1.25


def test_a_default_temperature_of_0_is_greedy(tmp_path: Path) -> None:
    front = Front(Settings(validation_workers=1, hostname="127.0.0.1"), tmp_path, standard)
    front.start()
    front.tokenizers[0].defaults = SamplingDefaults(temperature=0.0, top_k=20)
    front.tokenizers[0].start()
    front.until_ready()
    for path, body in V1[:2]:
        assert not params_of(front, path, body).samples
        assert params_of(front, path, body | {"temperature": 1}).top_k == 20
    front.stop()


def test_info_shows_the_defaults(front: Front) -> None:
    info = json.loads(front.get("/info").body)
    assert info["generation_config"] == DEFAULTS._asdict()
    assert [*info][-3:] == ["server_version", "generation_config", "eos_token_ids"]
