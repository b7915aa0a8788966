"""Whatever is sent to the endpoints that the server describes, it is never the server's fault."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.app import ADMIN_POST_ROUTES, POST_ROUTES
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.wire import send


@pytest.fixture(scope="module")
def quick() -> Iterator[BackgroundServer]:
    """A server whose answers are short, however much is asked for."""
    engine = PretendEngine(lambda *_: "ok", max_length=512)
    told = ServerConfig(model="parrot", port=0, allow_unauthenticated_admin=True, access_log=False)
    with BackgroundServer(create_app(engine, Bytes(), told), told) as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("path", [path for path, *_ in [*POST_ROUTES, *ADMIN_POST_ROUTES]])
def test_no_request_breaks_the_server(path: str, sound: bool, quick: BackgroundServer) -> None:
    # Asked for here, since as a plugin it would make every run of pytest wait for its import.
    schemathesis = pytest.importorskip("schemathesis", reason="a part of the dev setup")
    mode, checks = schemathesis.GenerationMode, schemathesis.checks
    schema = schemathesis.openapi.from_dict(send(quick.url, "/openapi.json").json)
    made = schema[path]["POST"].as_strategy(
        generation_mode=mode.POSITIVE if sound else mode.NEGATIVE
    )

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(case=made)
    def attempt(case: Any) -> None:
        response = case.call(base_url=quick.url)
        if path == "/sleep" and response.status_code == 200:
            assert send(quick.url, "/wake_up", {}).status == 200
        case.validate_response(
            response,
            checks=[
                checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
                checks.negative_data_rejection,
            ],
        )

    attempt()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANY = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.just([{"role": "user", "content": "hello"}]) | ANY


@pytest.mark.parametrize(("path", "kind"), [(path, body) for path, body, *_ in POST_ROUTES])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_strange_values_are_refused_in_order(
    quick: BackgroundServer, path: str, kind: type, data: st.DataObject
) -> None:
    fields = [field.name for field in msgspec.structs.fields(kind)]
    body = data.draw(st.dictionaries(st.sampled_from(fields), ANY, max_size=4))
    for name, likely in (("prompt", st.just("hi") | ANY), ("messages", MESSAGES)):
        if name in fields:
            body[name] = data.draw(likely)
    got = send(quick.url, path, body)
    assert got.status in {200, 400, 404}, got.body
    assert got.status == 200 or got.error["message"]


def test_the_page_names_every_endpoint(quick: BackgroundServer) -> None:
    page = send(quick.url, "/openapi.json").json
    assert page["openapi"] == "3.1.0"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"} <= page["paths"].keys()
    body = page["components"]["schemas"]["CompletionRequest"]
    assert body["required"] == ["prompt"]
    assert body["additionalProperties"] == {"type": "null"}, "as it is taken"
    parts = [
        page["components"]["schemas"][name] for name in ("ChatCompletionRequest", "SleepRequest")
    ]
    for part in parts:
        assert part["additionalProperties"] == {"type": "null"}
