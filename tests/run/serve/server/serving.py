"""A server of a pretended engine with some settings, and what is asked of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from tests.run.serve.server.pretend import Bytes, PretendEngine

TEXT = "/v1/completions"
HELLO = {"prompt": "hello"}
LONG = {"prompt": "x" * 3000, "max_tokens": 900, "stream": True}


@contextmanager
def serving(**told: Any) -> Iterator[tuple[BackgroundServer, PretendEngine]]:
    """Serve with some settings."""
    engine = PretendEngine()
    settings = ServerConfig(**{"model": "parrot", "port": 0, "shutdown_timeout_s": 5.0, **told})
    with BackgroundServer(create_app(engine, Bytes(), settings), settings) as served:
        yield served, engine


def until(true: Callable[[], object]) -> None:
    """Wait for something that must happen."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")
