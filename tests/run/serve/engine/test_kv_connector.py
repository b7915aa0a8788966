"""Keys and values that come with an ask harm nobody who makes room for it."""

import pytest

pytest.importorskip("torch", reason="runs a model")

from msgspec.structs import replace

from meshwright.run.serve.kv_transfer.transport import receive_kv
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.serve.engine.small import Heard, engine_of, reference, run_out
from tests.run.serve.engine.test_engine import PROMPTS
from tests.run.serve.model.small import small


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_is_moved_away_is_not_written_over(preemption: str) -> None:
    first = engine_of(small())
    then = engine_of(small(), blocks=15, preemption_mode=preemption, num_cpu_blocks=32)
    asks = [
        Request(
            prompt_token_ids=PROMPTS[at],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=12),
            priority=rank,
        )
        for at, rank in ((3, 0), (5, 0), (2, 1))
    ]
    heard = [Heard() for _ in asks]
    for ask, sink in zip(asks[:2], heard[:2], strict=True):
        then.add_request(ask, sink)
    for _ in range(4):
        then.step()
    handed = Heard()
    first.add_request(replace(asks[2], do_remote_decode=True), handed)
    run_out(first)
    parcel = handed.pieces[0].kv_handle
    assert parcel is not None
    then.add_request(replace(asks[2], remote_kv=parcel), heard[2], receive_kv(parcel))
    before = then.scheduler.num_preemptions
    then.step()
    assert then.scheduler.num_preemptions > before, "somebody made room at once"
    run_out(then)
    found = [sink.tokens() for sink in heard]
    assert found == [reference(small, ask.prompt_token_ids, 12) for ask in asks]
    first.close()
