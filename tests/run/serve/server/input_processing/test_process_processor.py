"""Requests prepared in processes: what takes too long or too much ends there alone."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")

from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.input_processing.inline_processor import InlineInputProcessor
from meshwright.run.serve.server.input_processing.prepared_request import (
    InputLimits,
    PreparedChat,
    PreparedCompletion,
)
from meshwright.run.serve.server.input_processing.process_processor import (
    SMALL_BODY_BYTES,
    ProcessInputProcessor,
)
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from tests.run.serve.server.hostile import write_tokenizer

T = TypeVar("T")
LIMITS = InputLimits(4096, 4096)
CONFIG = ServerConfig(model="parrot", input_processes=1)
HELLO = json.dumps({"prompt": "hello", "logit_bias": {"7": 1.5}, "user": "ann"}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def processor(folder: Path) -> Iterator[ProcessInputProcessor]:
    made = ProcessInputProcessor(folder, CONFIG)
    yield made
    made.kill()


def run(made: ProcessInputProcessor, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run something in an event loop, and close the processor there."""

    async def closing() -> T:
        try:
            return await work()
        finally:
            await made.close()

    return asyncio.run(closing())


def hurried(folder: Path) -> ProcessInputProcessor:
    return ProcessInputProcessor(folder, msgspec.structs.replace(CONFIG, input_timeout_s=0.5))


def chat(content: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", chat("ab", temperature=0.5, logprobs=True, stream=True, n=3, max_tokens=5)),
        ("chat", chat("ab", tools=[{"function": {"name": "f", "parameters": {"type": "object"}}}])),
        ("completion", HELLO),
        ("completion", json.dumps({"prompt": ["abab", [1, 2]], "echo": True}).encode()),
        ("completion", json.dumps({"prompt": "ab" * 3000, "max_tokens": 1}).encode()),
        ("embedding", json.dumps({"input": ["ab", [1, 2]], "encoding_format": "base64"}).encode()),
        ("tokenize", json.dumps({"prompt": "abab é", "return_token_strs": True}).encode()),
        ("detokenize", b'{"tokens":[65,66]}'),
    ],
)
def test_a_process_prepares_what_this_process_would(
    kind: Any, body: bytes, processor: ProcessInputProcessor, folder: Path
) -> None:
    here = InlineInputProcessor(load_tokenizer(folder), CONFIG)

    async def both() -> tuple[object, object]:
        return await processor.process(kind, body, LIMITS), await here.process(kind, body, LIMITS)

    there, wanted = run(processor, both)
    assert there == wanted


@pytest.mark.parametrize("body", [b"{", b'{"prompt":7}', b'{"prompt":"a","x":1}', b'{"prompt":[]}'])
def test_errors_are_those_of_this_process(
    body: bytes, processor: ProcessInputProcessor, folder: Path
) -> None:
    here = InlineInputProcessor(load_tokenizer(folder), CONFIG)

    async def error(of: Any) -> tuple[object, ...]:
        with pytest.raises(ApiError) as raised:
            await of.process("completion", body, LIMITS)
        return raised.value.status, raised.value.message, raised.value.param, raised.value.code

    async def both() -> tuple[object, object]:
        return await error(processor), await error(here)

    there, wanted = run(processor, both)
    assert there == wanted


def test_what_takes_too_long_is_ended_and_the_next_request_is_answered(folder: Path) -> None:
    made = hurried(folder)

    async def ask() -> None:
        while True:  # on a busy machine the first may take long
            with contextlib.suppress(ApiError):
                await made.process("completion", HELLO, LIMITS)
                break
        (before,) = made.pids
        with pytest.raises(ApiError, match=r"longer than 0\.5 s") as raised:
            await made.process("chat", chat("loop"), LIMITS)
        assert (raised.value.status, raised.value.code) == (504, "timeout")
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        found = None
        while found is None:
            with contextlib.suppress(ApiError):
                found = await made.process("chat", chat("a"), LIMITS)
        assert isinstance(found, PreparedChat)
        assert before not in made.pids

    run(made, ask)


def test_a_process_that_breaks_is_replaced(processor: ProcessInputProcessor) -> None:
    async def ask() -> None:
        await processor.process("completion", HELLO, LIMITS)
        os.kill(processor.pids[0], signal.SIGKILL)
        found = None
        for _ in range(2):
            try:
                found = await processor.process("completion", HELLO, LIMITS)
            except ApiError as error:
                assert (error.status, error.retry_after_s) == (503, 5)  # noqa: PT017
        assert isinstance(found, PreparedCompletion)

    run(processor, ask)


def test_a_small_request_does_not_wait_behind_a_large_one(
    processor: ProcessInputProcessor,
) -> None:
    async def ask() -> None:
        large = chat("loop", metadata={"a": "x" * SMALL_BODY_BYTES})
        slow = asyncio.create_task(processor.process("chat", large, LIMITS))
        await asyncio.sleep(0.05)
        await processor.process("completion", HELLO, LIMITS)
        assert not slow.done()
        slow.cancel()

    run(processor, ask)


def test_requests_are_shared_among_processes(folder: Path) -> None:
    made = ProcessInputProcessor(folder, msgspec.structs.replace(CONFIG, input_processes=2))

    async def ask() -> None:
        slow = asyncio.create_task(made.process("chat", chat("loop"), LIMITS))
        await asyncio.sleep(0)
        await made.process("completion", HELLO, LIMITS)
        assert not slow.done()
        slow.cancel()

    run(made, ask)


def test_memory_is_bounded_and_what_a_request_took_is_given_back(folder: Path) -> None:
    made = ProcessInputProcessor(folder, msgspec.structs.replace(CONFIG, input_memory_bytes=2**28))

    async def ask() -> None:
        for content in ("double", "center"):
            with pytest.raises(ApiError, match="memory") as raised:
                await made.process("chat", chat(content), LIMITS)
            assert raised.value.status == 400
        assert isinstance(await made.process("chat", chat("a"), LIMITS), PreparedChat)

    run(made, ask)


def test_a_client_that_leaves_does_not_break_the_next_request(
    processor: ProcessInputProcessor,
) -> None:
    async def ask() -> None:
        left = asyncio.create_task(processor.process("completion", HELLO, LIMITS))
        await asyncio.sleep(0)
        left.cancel()
        found = await processor.process("completion", b'{"prompt":"other"}', LIMITS)
        assert isinstance(found, PreparedCompletion)
        assert len(found.requests[0].prompt_token_ids) == len("other")

    run(processor, ask)


def test_bodies_that_wait_are_bounded(
    processor: ProcessInputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_waiting_bytes", 2**28 - 10)
    with pytest.raises(ApiError) as raised:
        run(processor, lambda: processor.process("completion", HELLO, LIMITS))
    assert (raised.value.status, raised.value.retry_after_s) == (429, 5)


def test_a_process_sees_no_keys(
    processor: ProcessInputProcessor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "secret-of-the-house")
    made = ProcessInputProcessor(folder, CONFIG)
    try:
        environment = Path(f"/proc/{made.pids[0]}/environ")
        if not environment.exists():
            pytest.skip("the environment of a process is not shown here")
        assert b"secret-of-the-house" not in environment.read_bytes()
    finally:
        made.kill()


def test_a_process_ends_with_whoever_started_it(processor: ProcessInputProcessor) -> None:
    (lane,) = processor._small
    process, line = lane._process, lane._socket
    assert process is not None
    assert line is not None
    line.shutdown(socket.SHUT_RDWR)  # as the system does where the server's process ends
    process.wait(60)
