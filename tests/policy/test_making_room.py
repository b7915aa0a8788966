"""Who makes room for whom: never somebody who got a place in the same step."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.batching import Batcher, Sequence
from meshwright.spec.serving import Limits


def batcher_of(blocks: int, **given_: Any) -> Batcher:
    told = {"batch_tokens": 256, "batch_requests": 4, "block_tokens": 4, "watermark": 0.0, **given_}
    return Batcher(Limits(prefix_cache=False, **told), blocks)


@pytest.mark.parametrize("done", [0, 14])
def test_who_made_room_for_it_does_not_let_a_newcomer_go_at_once(done: int) -> None:
    batcher = batcher_of(10)
    for priority in (1, 1, 0):
        batcher.add(Sequence(8, 20, priority=priority))
    while len(batcher.decoding.bucket()) < 3 or batcher.pool.spare > 1:
        assert batcher.next() is not None
    batcher.add(Sequence(14, 6, priority=1, done=done))
    batch = batcher.next()
    assert batch is not None
    assert not set(batch.placed) & set(batch.preempted)


def test_room_goes_to_whom_it_was_made_for() -> None:
    batcher = batcher_of(8)
    low = Sequence(20, 4, tenant="a")
    batcher.add(low)
    batcher.next()
    other, head = (Sequence(16, 4, tenant=tenant, priority=1) for tenant in "ba")
    batcher.add(other)
    batcher.add(head)
    batcher.waiting.charge("b", 5.0)
    batch = batcher.next()
    assert batch is not None
    assert batch.preempted == [low]
    assert batch.placed[:1] == [head]


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
    limits = Limits(
        batch_tokens=32,
        batch_requests=8,
        block_tokens=4,
        prefix_cache=False,
        preemption=preemption,  # type: ignore[arg-type]
        host_blocks=16 if preemption == "swap" else 0,
    )
    batcher, left = Batcher(limits, 40, guesses=guesses), list(asked)
    steps = 0
    while left or batcher.running or batcher.waiting.count:
        for prompt, output, priority, tenant in left[:2]:
            batcher.add(Sequence(prompt, output, priority=priority, tenant=tenant))
        left = left[2:]
        batch = batcher.next()
        steps += 1
        assert steps < 20_000
        if batch is None:
            continue
        batcher.grants(batch)
        assert not set(batch.placed) & set(batch.preempted)
        read = {block for move in batch.moved_in for block in move.host}
        assert not read & {block for move in batch.moved_out for block in move.host}
        for chunk in batch.chunks:
            if guesses and chunk.samples and chunk.sequence in batcher._guessing:
                batcher.settle(chunk.sequence, chunk.stop - chunk.start - 1)
                batcher.propose(chunk.sequence, 3)
    assert batcher.pool.held == 0
