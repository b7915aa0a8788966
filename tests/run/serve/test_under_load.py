"""Many clients at once through the server and the engine: no token is lost or mixed up."""

from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp", reason="the load generator needs meshwright[load]")
pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")

from meshwright.observe.bench.serving.measure import Settings, Turn, measure
from meshwright.observe.bench.serving.wire import Asking
from meshwright.run.serve.engine.loop import EngineLoop
from meshwright.run.serve.server import Served, ServerSettings, serve_app
from meshwright.spec.workload import Request
from tests.run.serve.engine.small import engine_of
from tests.run.serve.model.small import small
from tests.run.serve.server.pretend import Bytes

OUTPUT = 6


def _requests(count: int) -> Iterator[Request]:
    """Yield prompts of which a third begin alike."""
    for number in range(count):
        shared = (0, 1) if number % 3 == 0 else ()
        yield Request(
            arrival_s=0.0,
            prompt_tokens=10 + number % 7,
            output_tokens=OUTPUT,
            prefix_blocks=shared,
            block_tokens=4,
        )


@pytest.mark.parametrize("streams", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_stream_gets_the_tokens_it_would_get_alone(streams: int) -> None:
    decoder = small()
    # Too few places and blocks for all: requests wait, and some lose their places on the way.
    engine = engine_of(decoder, blocks=64, batch_requests=16, batch_tokens=64)
    settings = ServerSettings(model="small", port=0, access_log=False)
    asking = Asking(model="", ids=True)
    with Served(serve_app(EngineLoop(engine), Bytes(), settings), settings) as served:
        measured = measure(
            Settings(served.url, asking, vocabulary=decoder.model.vocab, echo=True, warm_up=0),
            [Turn("all", lambda: _requests(streams), None, streams)],
            "mw bench serve",
            lambda *_: None,
        )
    (run,) = measured.result.runs
    assert {one.fault for one in run.requests} == {""}
    assert {one.output_tokens for one in run.requests} == {OUTPUT}
    assert run.generator.most_in_flight == streams
    assert measured.echo == (streams, (), ())
