"""Many clients at once through the server and the engine: no token is lost or mixed up."""

from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp", reason="the load generator needs meshwright[load]")
pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")

from meshwright.observe.bench.serving.openai_protocol import RequestOptions
from meshwright.observe.bench.serving.serving_bench import (
    LoadPoint,
    ServingBenchConfig,
    run_serving_bench,
)
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.spec.workload import WorkloadRequest
from tests.run.serve.engine.small import engine_of
from tests.run.serve.model.small import small
from tests.run.serve.server.pretend import Bytes

OUTPUT = 6


def _requests(count: int) -> Iterator[WorkloadRequest]:
    """Yield prompts of which a third begin alike."""
    for number in range(count):
        shared = (0, 1) if number % 3 == 0 else ()
        yield WorkloadRequest(
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
    engine = engine_of(decoder, blocks=64, max_num_seqs=16, max_num_batched_tokens=64)
    settings = ServerConfig(model="small", port=0, access_log=False)
    asking = RequestOptions(model="", return_token_ids=True)
    with BackgroundServer(
        create_app(ThreadEngineClient(engine), Bytes(), settings), settings
    ) as served:
        measured = run_serving_bench(
            ServingBenchConfig(
                served.url,
                asking,
                vocab_size=decoder.model.vocab,
                check_answers=True,
                num_warmups=0,
            ),
            [LoadPoint("all", lambda: _requests(streams), None, streams)],
            "mw bench serve",
            lambda *_: None,
        )
    (run,) = measured.result.runs
    assert {one.error for one in run.requests} == {""}
    assert {one.output_tokens for one in run.requests} == {OUTPUT}
    assert run.generator.max_concurrency_seen == streams
    assert measured.answer_check == (streams, (), ())
