"""Any bytes at all as a body: always a documented status, never a 500, never silence."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Front
from tgi.api.shapes.native import GenerateParameters

DOCUMENTED = {200, 400, 422}
ROUTES = st.sampled_from(["/", "/generate", "/generate_stream", "/tokenize"])

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
plausible = st.one_of(
    st.sampled_from([0, 1, 1.0, 0.5, -1, 2**31, 2**32, 2**64, 10**300, True, None, [], "a", {}]), anything
)
parameters = st.dictionaries(st.sampled_from(GenerateParameters.__struct_fields__), plausible, max_size=4)
bodies = st.one_of(
    anything,
    st.fixed_dictionaries(
        {}, optional={"inputs": st.text() | plausible, "parameters": parameters | plausible, "stream": plausible}
    ),
    st.fixed_dictionaries({"inputs": st.text(min_size=1), "parameters": parameters}),
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


@quick
@given(path=ROUTES, body=bodies)
def test_json(front: Front, path: str, body: Any) -> None:
    reply = front.post(path, json.dumps(body, default=str))
    assert reply.status in DOCUMENTED, reply.body
    if reply.status == 422 and reply.headers["content-type"] == "application/json":
        assert json.loads(reply.body)["error_type"] == "validation"


@quick
@given(path=ROUTES, body=st.binary(max_size=40) | st.text(alphabet='{}[]",:0e1-\\u ainpt', max_size=40).map(str.encode))
def test_bytes(front: Front, path: str, body: bytes) -> None:
    assert front.post(path, body).status in DOCUMENTED


def test_numbers_of_many_digits(front: Front) -> None:
    for name in GenerateParameters.__struct_fields__:
        for number in ("9" * 5000, "1e99999", "-" + "9" * 5000, "0." + "1" * 5000):
            reply = front.post("/generate", f'{{"inputs":"x","parameters":{{"{name}":{number}}}}}')
            assert reply.status in DOCUMENTED, (name, number[:9], reply.body)
