"""Who makes room for whom: never somebody who got a place in the same step."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.serving.scheduler import Scheduler, Sequence
from meshwright.spec.scheduler_config import SchedulerConfig


def batcher_of(blocks: int, **given_: Any) -> Scheduler:
    told = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "block_size": 4,
        "watermark": 0.0,
        **given_,
    }
    return Scheduler(SchedulerConfig(enable_prefix_caching=False, **told), blocks)


@pytest.mark.parametrize("done", [0, 14])
def test_who_made_room_for_it_does_not_let_a_newcomer_go_at_once(done: int) -> None:
    batcher = batcher_of(10)
    for priority in (1, 1, 0):
        batcher.add(Sequence(8, 20, priority=priority))
    while (
        len(batcher.decode_set.get_block_starters()) < 3 or batcher.block_pool.free_block_count > 1
    ):
        assert batcher.schedule() is not None
    batcher.add(Sequence(14, 6, priority=1, num_computed_tokens=done))
    batch = batcher.schedule()
    assert batch is not None
    assert not set(batch.admitted) & set(batch.preempted)


def test_room_goes_to_whom_it_was_made_for() -> None:
    batcher = batcher_of(8)
    low = Sequence(20, 4, tenant="a")
    batcher.add(low)
    batcher.schedule()
    other, head = (Sequence(16, 4, tenant=tenant, priority=1) for tenant in "ba")
    batcher.add(other)
    batcher.add(head)
    batcher.waiting_queue.charge_tokens("b", 5.0)
    batch = batcher.schedule()
    assert batch is not None
    assert batch.preempted == [low]
    assert batch.admitted[:1] == [head]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([2, 4, 10, 30, 60, 100]),
            st.integers(1, 40),
            st.sampled_from([0, 0, 1]),
            st.sampled_from("ab"),
        ),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
)
def test_whatever_comes_is_placed_with_the_blocks_it_was_promised(
    asked: list[tuple[int, int, int, str]], preemption: str, guesses: bool
) -> None:
    limits = SchedulerConfig(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        block_size=4,
        enable_prefix_caching=False,
        preemption_mode=preemption,  # type: ignore[arg-type]
        num_cpu_blocks=16 if preemption == "swap" else 0,
    )
    batcher, left = Scheduler(limits, 40, speculative=guesses), list(asked)
    steps = 0
    while left or batcher.num_running or batcher.waiting_queue.count:
        for prompt, output, priority, tenant in left[:2]:
            batcher.add(Sequence(prompt, output, priority=priority, tenant=tenant))
        left = left[2:]
        batch = batcher.schedule()
        steps += 1
        assert steps < 20_000
        if batch is None:
            continue
        batcher.allocate_blocks(batch)
        assert not set(batch.admitted) & set(batch.preempted)
        read = {block for move in batch.swap_in for block in move.host_blocks}
        assert not read & {block for move in batch.swap_out for block in move.host_blocks}
        for chunk in batch.chunks:
            if guesses and chunk.samples_token and chunk.sequence in batcher._speculating:
                batcher.accept_draft_tokens(chunk.sequence, chunk.stop - chunk.start - 1)
                batcher.set_draft_token_count(chunk.sequence, 3)
    assert batcher.block_pool.used_block_count == 0
