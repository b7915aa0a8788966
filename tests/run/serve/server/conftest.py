"""A server over loopback before an engine that pretends."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")

from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from tests.run.serve.server.pretend import Bytes, PretendEngine


@pytest.fixture(autouse=True, scope="session")
def without_keys() -> Iterator[None]:
    """Keys of whoever runs the tests are no keys of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "MESHWRIGHT_API_KEY",
            "MESHWRIGHT_ADMIN_API_KEY",
            "OTEL_EXPORTER_OTLP_ENDPOINT",
        ):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def engine() -> PretendEngine:
    return PretendEngine()


@pytest.fixture(scope="module")
def served(engine: PretendEngine) -> Iterator[BackgroundServer]:
    """One server for all tests of a module that only ask."""
    settings = ServerConfig(model="parrot", aliases=("bird",), lora_names=("polly",), port=0)
    with BackgroundServer(create_app(engine, Bytes(), settings), settings) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: BackgroundServer) -> Iterator[Any]:
    """The official client."""
    openai = pytest.importorskip("openai", reason="the official client is a part of the dev setup")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ready:
        yield ready
