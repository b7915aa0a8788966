import asyncio

import pytest

from meshwright.run.serve.client.output_stream import OutputStream
from meshwright.run.serve.request import RequestOutput

A, B, LAST = (
    RequestOutput(text="a"),
    RequestOutput(text="b"),
    RequestOutput(text="c", finish_reason="stop"),
)


def test_pieces_come_in_their_order_and_end_with_the_last_choice() -> None:
    async def read() -> list[str]:
        inbox = OutputStream(2, pytest.fail)
        asyncio.get_running_loop().call_soon(inbox.put, A)
        texts = [(await anext(inbox)).text]
        for piece in (B, LAST, A, RequestOutput(index=1, finish_reason="length")):
            inbox.put(piece)
        texts += [piece.text async for piece in inbox]
        await inbox.aclose()
        return texts

    assert asyncio.run(read()) == ["a", "b", "c", "a", ""]


def test_who_reads_late_gets_all_at_once() -> None:
    async def read() -> None:
        inbox = OutputStream(1, pytest.fail)
        assert inbox.take_available() == ()
        for piece in (A, B, LAST):
            inbox.put(piece)
        assert await anext(inbox) is A
        assert inbox.take_available() == (B, LAST)
        with pytest.raises(StopAsyncIteration):
            await anext(inbox)

    asyncio.run(read())


def test_closing_early_gives_up_once() -> None:
    async def leave() -> list[str]:
        told: list[str] = []
        inbox = OutputStream(1, lambda: told.append("closed"))
        reading = asyncio.ensure_future(anext(inbox))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        inbox.put(A)
        await inbox.aclose()
        await inbox.aclose()
        return told

    assert asyncio.run(leave()) == ["closed"]


def test_an_error_comes_behind_what_was_there() -> None:
    async def read() -> list[RequestOutput]:
        inbox = OutputStream(1, pytest.fail)
        inbox.put(A)
        inbox.fail(ValueError("no"))
        found = [await anext(inbox)]
        with pytest.raises(ValueError, match="no"):
            await anext(inbox)
        with pytest.raises(StopAsyncIteration):
            await anext(inbox)
        await inbox.aclose()
        return found

    assert asyncio.run(read()) == [A]


def test_who_waits_gets_an_error_at_once() -> None:
    async def read() -> None:
        inbox = OutputStream(1, pytest.fail)
        asyncio.get_running_loop().call_soon(inbox.fail, ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await anext(inbox)

    asyncio.run(read())
