"""Keys and values that come with an ask harm nobody who makes room for it."""

import pytest

pytest.importorskip("torch", reason="runs a model")

from msgspec.structs import replace

from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.parcels import collect
from tests.run.serve.engine.small import Heard, engine_of, reference, run_out
from tests.run.serve.engine.test_engine import PROMPTS
from tests.run.serve.model.small import small


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_is_moved_away_is_not_written_over(preemption: str) -> None:
    first = engine_of(small())
    then = engine_of(small(), blocks=15, preemption=preemption, host_blocks=32)
    asks = [
        Ask(prompt=PROMPTS[at], sampling=Sampling(temperature=0.0, max_tokens=12), priority=rank)
        for at, rank in ((3, 0), (5, 0), (2, 1))
    ]
    heard = [Heard() for _ in asks]
    for ask, sink in zip(asks[:2], heard[:2], strict=True):
        then.add(ask, sink)
    for _ in range(4):
        then.turn()
    handed = Heard()
    first.add(replace(asks[2], hands_over=True), handed)
    run_out(first)
    parcel = handed.pieces[0].parcel
    assert parcel is not None
    then.add(replace(asks[2], brought=parcel), heard[2], collect(parcel))
    before = then.batcher.preemptions
    then.turn()
    assert then.batcher.preemptions > before, "somebody made room at once"
    run_out(then)
    found = [sink.tokens() for sink in heard]
    assert found == [reference(small, ask.prompt, 12) for ask in asks]
    first.close()
