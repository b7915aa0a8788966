"""A server over loopback before an engine that pretends."""

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette", reason="the server needs meshwright[serve]")
pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")

from meshwright.run.serve.server import Served, ServerSettings, serve_app
from tests.run.serve.server.pretend import Bytes, PretendEngine


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(
        model="parrot", also_called=("bird",), adapters=("polly",), port=0, drain_s=5.0
    )


@pytest.fixture
def engine() -> PretendEngine:
    return PretendEngine()


@pytest.fixture
def served(
    engine: PretendEngine, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    for name in ("MESHWRIGHT_API_KEYS", "MESHWRIGHT_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)
    with Served(serve_app(engine, Bytes(), settings), settings) as server:
        yield server
