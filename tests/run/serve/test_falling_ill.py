"""Prefill engines become unhealthy, and decode engines do their work."""

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.serve.client.disaggregated_client import DisaggregatedEngineClient
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.request import Request
from tests.run.serve.client.test_routed_client_serve import GREEDY, Dying, Ill, one_vector, run
from tests.run.serve.engine.small import engine_of
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small


def test_a_first_engine_that_falls_ill_before_it_is_asked_is_left_out() -> None:
    async def work() -> None:
        first, then = Dying(), ThreadEngineClient(engine_of(small()))
        both = DisaggregatedEngineClient([first], [then])
        pieces = both.generate(Request(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY))
        first._dead = "it died meanwhile"
        assert [token async for piece in pieces for token in piece.token_ids] == expected()[0]
        await both.close()

    run(work)


def test_vectors_are_made_by_the_second_engines_where_no_first_one_is_well() -> None:
    async def work() -> None:
        well = Dying()
        well.embed = one_vector  # type: ignore[method-assign]
        both = DisaggregatedEngineClient([Ill()], [well])
        assert await both.embed([(1,)]) == [[1.0]]

    run(work)
