"""Engines that compute prompts fall ill, and those that write answers do their work."""

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.serve.asked import Ask
from meshwright.run.serve.engine.loop import EngineLoop
from meshwright.run.serve.routed import HandedOver
from tests.run.serve.engine.small import engine_of
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small
from tests.run.serve.test_routed import GREEDY, Dying, Ill, one_vector, run


def test_a_first_engine_that_falls_ill_before_it_is_asked_is_left_out() -> None:
    async def work() -> None:
        first, then = Dying(), EngineLoop(engine_of(small()))
        both = HandedOver([first], [then])
        pieces = both.answer(Ask(prompt=PROMPTS[0], sampling=GREEDY))
        first._dead = "it died meanwhile"
        assert [token async for piece in pieces for token in piece.tokens] == expected()[0]
        await both.close()

    run(work)


def test_vectors_are_made_by_the_second_engines_where_no_first_one_is_well() -> None:
    async def work() -> None:
        well = Dying()
        well.embed = one_vector  # type: ignore[method-assign]
        both = HandedOver([Ill()], [well])
        assert await both.embed([(1,)]) == [[1.0]]

    run(work)
