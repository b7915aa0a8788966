"""A grammar that takes long to compile holds up nobody else's answer."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("llguidance", reason="structured answers need llguidance")

from meshwright.errors import InputError
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.startup import start_engine
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.sampling_params import SamplingParams, StructuredOutputsParams
from tests.run.serve.served_folders import folder

T = TypeVar("T")
SLOW = json.dumps(
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(400)}}
)
STREAM = Request(
    prompt_token_ids=(5, 6, 7),
    sampling_params=SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
)


def bound(text: str, *, regex: bool = False) -> Request:
    form = StructuredOutputsParams(kind="regex" if regex else "json_schema", text=text)
    sampling = SamplingParams(temperature=0.0, max_tokens=2, structured_outputs=form)
    return Request(prompt_token_ids=(5, 6), sampling_params=sampling)


def run(work: Callable[[ThreadEngineClient], Coroutine[Any, Any, T]]) -> T:
    """Run something with an engine, which serves one event loop."""
    started = start_engine(folder(""), EngineConfig(device="cpu"))

    async def whole() -> T:
        client = ThreadEngineClient(started.engine, started.lifecycle)
        try:
            return await asyncio.wait_for(work(client), 60)
        finally:
            await client.close()

    return asyncio.run(whole())


def test_streams_go_on_while_a_grammar_is_compiled() -> None:
    async def ask(engine: ThreadEngineClient) -> list[str]:
        heard: list[str] = []

        async def read(name: str, request: Request) -> None:
            async for _ in engine.generate(request):
                heard.extend([name])

        stream = asyncio.create_task(read("stream", STREAM))
        while heard.count("stream") < 2:
            await asyncio.sleep(0.001)
        await asyncio.gather(stream, read("grammar", bound(SLOW)))
        return heard

    heard = run(ask)
    first = heard.index("grammar")
    assert heard[:first].count("stream") > 10, "tokens came while the grammar was compiled"


def test_a_grammar_that_is_wrong_is_refused() -> None:
    async def ask(engine: ThreadEngineClient) -> None:
        with pytest.raises(InputError, match="regex"):
            await anext(engine.generate(bound("(", regex=True)))
        assert engine.engine.pending_external_jobs == 0

    run(ask)


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing() -> None:
    async def ask(engine: ThreadEngineClient) -> None:
        stream = engine.generate(bound(SLOW.replace("p1", "q1")))
        await asyncio.sleep(0.01)
        await stream.aclose()
        async for _ in engine.generate(STREAM):
            pass
        while not engine.engine.is_idle:
            await asyncio.sleep(0.01)
        assert engine.engine.pending_external_jobs == 0

    run(ask)


def test_a_grammar_that_proves_too_large_is_an_error_of_its_request() -> None:
    choices = json.dumps(["a" * 9 + str(number) for number in range(3000)])
    form = StructuredOutputsParams(kind="choice", text=choices)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, structured_outputs=form)

    async def ask(engine: ThreadEngineClient) -> RequestOutput:
        request = Request(prompt_token_ids=(5, 6), sampling_params=sampling)
        return [piece async for piece in engine.generate(request)][-1]

    last = run(ask)
    assert (last.finish_reason, last.is_request_error) == ("error", True)
    assert "simplify the grammar" in last.error
