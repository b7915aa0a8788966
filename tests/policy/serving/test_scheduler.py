"""Steps serve those who decode, then prompts in parts, and never more than there is room for."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.serving.scheduler import Scheduler, SchedulerOutput, Sequence, SequenceStatus
from meshwright.spec.scheduler_config import SchedulerConfig


def limits(**given_: Any) -> SchedulerConfig:
    return SchedulerConfig(
        **{"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 4, **given_}
    )


def parts(batch: SchedulerOutput | None) -> list[tuple[int, int]]:
    assert batch is not None
    return [(chunk.start, chunk.stop) for chunk in batch.chunks]


def run_out(batcher: Scheduler, most: int = 10_000) -> list[SchedulerOutput]:
    batches = []
    while (batch := batcher.schedule()) is not None:
        batches.append(batch)
        assert len(batches) < most
    return batches


def test_long_prompts_are_computed_in_parts_beside_those_who_decode() -> None:
    batcher = Scheduler(limits(), 64)
    short, long = Sequence(3, 5), Sequence(40, 2)
    batcher.add(short)
    assert parts(batcher.schedule()) == [(0, 3)]
    batcher.add(long)
    seen = [(batch.num_decodes, parts(batch)) for batch in run_out(batcher)]
    assert seen == [
        (1, [(0, 15)]),
        (1, [(15, 30)]),
        (1, [(30, 40)]),
        (2, []),
    ]  # the fifth token of the short one and the second of the long one come together
    assert batcher.block_pool.used_block_count == 0


def test_parts_can_be_bounded_so_that_short_prompts_pass() -> None:
    batcher = Scheduler(limits(long_prefill_token_threshold=8), 64)
    batcher.add(Sequence(40, 2))
    batcher.add(Sequence(3, 2))
    assert parts(batcher.schedule()) == [(0, 8), (0, 3)]


def test_prompts_apart_are_whole_and_nothing_decodes_beside_them() -> None:
    batcher = Scheduler(limits(enable_chunked_prefill=False), 64)
    batcher.add(Sequence(3, 4))
    assert parts(batcher.schedule()) == [(0, 3)]
    batcher.add(Sequence(10, 2))
    batcher.add(Sequence(10, 2))
    seen = [(batch.num_decodes, parts(batch)) for batch in run_out(batcher)]
    assert seen[:2] == [(0, [(0, 10)]), (0, [(0, 10)])]
    assert [decodes for decodes, _ in seen[2:]] == [3, 1, 1]


def test_an_answer_of_one_token_needs_no_step_of_its_own() -> None:
    batcher = Scheduler(limits(), 64)
    one = Sequence(3, 1)
    batcher.add(one)
    batch = batcher.schedule()
    assert batch is not None
    assert batch.finished == [one]
    assert batcher.schedule() is None


def test_equal_beginnings_are_computed_once() -> None:
    batcher = Scheduler(limits(), 64)
    first, second = (
        Sequence(10, 2, block_hashes=["a", "b"]),
        Sequence(11, 2, block_hashes=["a", "b"]),
    )
    batcher.add(first)
    batcher.add(second)
    # Within one step too: what one row writes, another row of the same step reads.
    assert parts(batcher.schedule()) == [(0, 10), (8, 11)]
    assert first.blocks[:2] == second.blocks[:2]
    assert (
        second.num_cached_tokens,
        batcher.prefix_cache.hit_tokens,
        batcher.prefix_cache.queried_tokens,
    ) == (8, 8, 21)
    run_out(batcher)
    third = Sequence(8, 2, block_hashes=["a", "b"])
    batcher.add(third)
    assert parts(batcher.schedule()) == [(4, 8)], "the last token is always computed"


def test_prompts_shorter_than_a_block_are_looked_up_and_each_counts_once() -> None:
    batcher = Scheduler(limits(max_num_seqs=2), 8)
    first, second = Sequence(3, 20, block_hashes=[]), Sequence(3, 20, block_hashes=[])
    batcher.add(first)
    batcher.add(second)
    run_out(batcher)
    assert batcher.num_preemptions
    assert (batcher.prefix_cache.queried_tokens, batcher.prefix_cache.hit_tokens) == (6, 0)


def test_answers_can_be_found_again_once_their_blocks_are_named() -> None:
    batcher = Scheduler(limits(), 64)
    keys = ["a"]
    one = Sequence(4, 6, block_hashes=keys)
    batcher.add(one)
    while (batch := batcher.schedule()) is not None:
        batcher.allocate_blocks(batch)
        if batcher.count_tokens(one) == 8:
            keys.append("b")
    again = Sequence(9, 1, block_hashes=["a", "b"])
    batcher.add(again)
    assert parts(batcher.schedule()) == [(8, 9)]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    batcher = Scheduler(limits(enable_prefix_caching=False), 64)
    for _ in range(2):
        batcher.add(Sequence(8, 1, block_hashes=["a", "b"]))
    assert parts(batcher.schedule()) == [(0, 8), (0, 8)]


def test_forks_share_a_prompt_and_copy_its_last_block() -> None:
    batcher = Scheduler(limits(), 64)
    forks = tuple(Sequence(6, 3) for _ in range(2))
    parent = Sequence(6, 3, forks=forks)
    batcher.add(parent)
    batch = batcher.schedule()
    assert batch is not None
    assert batch.forked == [(parent, forks[0]), (parent, forks[1])]
    granted = dict(batcher.allocate_blocks(batch))
    assert granted[parent][0] == granted[forks[0]][0] == granted[forks[1]][0]
    assert len({granted[each][1] for each in (parent, *forks)}) == 3
    following = batcher.schedule()
    assert following is not None
    assert following.block_copies == [(granted[parent][1], granted[fork][1]) for fork in forks]
    assert following.num_decodes == 3
    run_out(batcher)
    assert batcher.block_pool.used_block_count == 0


def test_forks_that_end_before_their_prompt_is_computed_leave_nothing() -> None:
    batcher = Scheduler(limits(), 64)
    gone, kept = Sequence(20, 3), Sequence(20, 3)
    parent, other = Sequence(20, 3, forks=(gone, kept)), Sequence(5, 3)
    batcher.add(parent)
    batcher.add(other)
    batcher.schedule()
    batcher.finish(gone)
    assert [child for batch in run_out(batcher) for _, child in batch.forked] == [kept]
    assert other.status is SequenceStatus.FINISHED
    assert (batcher.block_pool.used_block_count, len(batcher.waiting_queue)) == (0, 0)


def test_forks_without_room_wait() -> None:
    batcher = Scheduler(limits(max_num_seqs=1), 64)
    batcher.add(Sequence(6, 2, forks=(Sequence(6, 2),)))
    finished = [each for batch in run_out(batcher) for each in batch.finished]
    assert len(finished) == 2


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_last_one_makes_room_and_comes_back(preemption: str) -> None:
    batcher = Scheduler(limits(preemption_mode=preemption, num_cpu_blocks=8), 6)
    first, second = Sequence(8, 12), Sequence(8, 12)
    batcher.add(first)
    batcher.add(second)
    batches = run_out(batcher)
    preempted = [each for batch in batches for each in batch.preempted]
    assert preempted == [second]
    out = [move for batch in batches for move in batch.swap_out]
    back = [move for batch in batches for move in batch.swap_in]
    if preemption == "swap":
        assert (
            [len(move.device_blocks) for move in out]
            == [len(move.host_blocks) for move in back]
            == [3]
        )
        assert out[0].host_blocks == back[0].host_blocks
        assert all(chunk.start == 0 for batch in batches for chunk in batch.chunks)
    else:
        assert not out
        assert batches[-1].num_decodes
        # Everything it had is computed anew in one go: its prompt, and what it had written.
        assert [parts(batch) for batch in batches if batch.chunks][1:] == [[(0, 13)]]
    assert [each for batch in batches for each in batch.finished] == [first, second]
    assert batcher.block_pool.used_block_count == batcher.host_block_pool.used_block_count == 0


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    batcher = Scheduler(limits(max_num_seqs=1), 64)
    low, high = Sequence(4, 6), Sequence(4, 2, priority=1)
    batcher.add(low)
    batcher.schedule()
    batcher.add(high)
    batch = batcher.schedule()
    assert batch is not None
    assert batch.preempted == [low]
    assert [chunk.sequence for chunk in batch.chunks] == [high]
    finished = [each for batch in run_out(batcher) for each in batch.finished]
    assert finished == [high, low]


def test_tenants_get_equal_shares_whoever_asks_more() -> None:
    batcher = Scheduler(limits(max_num_seqs=1), 64)
    for _ in range(10):
        batcher.add(Sequence(4, 4, tenant="greedy"))
    for _ in range(3):
        batcher.add(Sequence(4, 4, tenant="modest"))
    order = [each.tenant[0] for batch in run_out(batcher) for each in batch.finished]
    assert "".join(order[:6]) == "gmgmgm"


def test_who_leaves_frees_what_it_held() -> None:
    batcher = Scheduler(limits(), 64)
    one, other, waits = Sequence(8, 10), Sequence(40, 10), Sequence(8, 10)
    for each in (one, other):
        batcher.add(each)
    batcher.schedule()
    batcher.add(waits)
    assert (one.status, other.status) == (SequenceStatus.DECODING, SequenceStatus.PREFILLING)
    for each in (one, other, waits):
        batcher.finish(each)
        batcher.finish(each)
    assert batcher.block_pool.used_block_count == 0
    assert (batcher.schedule(), batcher.num_running, len(batcher.waiting_queue)) == (None, 0, 0)


def test_what_was_computed_elsewhere_only_decodes() -> None:
    batcher = Scheduler(limits(), 64)
    batcher.add(Sequence(8, 4, num_computed_tokens=8))
    batch = batcher.schedule()
    assert batch is not None
    assert (parts(batch), batch.num_decodes) == ([], 0)
    assert [each.num_decodes for each in run_out(batcher)] == [1, 1, 1]


def test_guesses_that_are_right_count() -> None:
    batcher = Scheduler(limits(), 64, speculative=True)
    one = Sequence(6, 8)
    batcher.add(one)
    batcher.schedule()
    batcher.set_draft_token_count(one, 3)
    batch = batcher.schedule()
    assert batch is not None
    assert parts(batch) == [(6, 10)]
    batcher.allocate_blocks(batch)
    assert len(one.blocks) == 3
    batcher.accept_draft_tokens(one, 2)
    assert one.num_tokens == 10
    batcher.set_draft_token_count(one, 3)
    assert parts(batcher.schedule()) == [(9, 13)]
    batcher.accept_draft_tokens(one, 3)
    assert batcher.schedule() is None
    assert (one.status, batcher.block_pool.used_block_count) == (SequenceStatus.FINISHED, 0)


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(InputError, match="do not fit into 4 blocks"):
        Scheduler(limits(), 4).add(Sequence(10, 10))


requests = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps after the one before
        st.integers(1, 40),  # prompt
        st.integers(1, 20),  # output
        st.integers(0, 3),  # shared prefix
        st.integers(0, 2),  # priority
        st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=20,
)


def play(
    batcher: Scheduler, asked: list[Any], *, leaps: bool, draws: bool
) -> list[tuple[Any, ...]]:
    """Serve requests; return everything that was decided, and check what must hold at each step."""
    told: list[tuple[Any, ...]] = []
    start, coming = 0, []
    for number, (gap, prompt, output, prefix, priority, tenant) in enumerate(asked):
        start += gap
        keys = [(prefix, place) for place in range(prompt // 4)] if prefix else None
        one = Sequence(
            prompt, output, state=number, block_hashes=keys, priority=priority, tenant=tenant
        )
        coming.append((start, one))
    coming.reverse()
    now, work = 0, dict.fromkeys(range(len(asked)), 0)
    while True:
        while coming and coming[-1][0] <= now:
            batcher.add(coming.pop()[1])
        reach = coming[-1][0] - now if coming else 1 << 30
        steps = min(batcher.count_decode_only_steps(), reach) if leaps else 0
        if steps:
            context = batcher.decode_set.attended_tokens
            count = len(batcher.decode_set)
            finished = batcher.schedule_decode_steps(steps)
            told += [(now + step, count, context + step * count) for step in range(steps)]
            told += [(now + steps, each.state) for each in finished]
            now += steps
            continue
        batch = batcher.schedule()
        if batch is None:
            if not coming:
                break
            now = coming[-1][0]
            continue
        if draws:
            check_blocks(batcher, batch)
        computed = batch.num_decodes + sum(chunk.stop - chunk.start for chunk in batch.chunks)
        assert computed <= batcher.config.max_num_batched_tokens
        assert batcher.num_running <= batcher.config.max_num_seqs
        for chunk in batch.chunks:
            work[chunk.sequence.state] += chunk.stop - chunk.start
        told.append((now, batch.num_decodes, batch.attended_tokens))
        told += [(now, chunk.sequence.state, chunk.start, chunk.stop) for chunk in batch.chunks]
        told += [(now, "away", each.state) for each in batch.preempted]
        now += 1
        told += [(now, each.state) for each in batch.finished]
    assert (
        batcher.block_pool.used_block_count
        == batcher.host_block_pool.used_block_count
        == batcher.block_pool.reserved_block_count
        == 0
    )
    assert batcher.num_running == len(batcher.waiting_queue) == 0
    ended = [each[1] for each in told if len(each) == 2]
    assert sorted(ended, key=str) == sorted(range(len(asked)), key=str), "each ends once"
    return [each for each in told if each[1] != 0 or len(each) != 3]


def check_blocks(batcher: Scheduler, batch: SchedulerOutput) -> None:
    batcher.allocate_blocks(batch)
    held: dict[int, set[int]] = {}
    for sequence in batcher.running_set:
        needed = -(-(batcher.count_tokens(sequence) - 1) // batcher.config.block_size)
        if sequence.status is SequenceStatus.DECODING:
            assert len(sequence.blocks) == needed
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        for place, block in enumerate(sequence.blocks):
            held.setdefault(block, set()).add(place)
    assert all(len(places) == 1 for places in held.values()), "one block, one place in a prompt"


@settings(max_examples=60)
@given(requests, st.sampled_from(["recompute", "swap"]), st.booleans())
def test_many_steps_at_once_are_the_same_as_one_by_one(
    asked: list[Any], preemption: str, chunked: bool
) -> None:
    bounds = limits(
        preemption_mode=preemption,
        num_cpu_blocks=20,
        max_num_batched_tokens=40,
        enable_chunked_prefill=chunked,
    )
    told = [
        play(Scheduler(bounds, 16), asked, leaps=leaps, draws=draws)
        for leaps, draws in ((False, True), (False, False), (True, False))
    ]
    assert told[0] == told[1] == told[2]


def test_blocks_can_be_kept_for_what_is_on_its_way() -> None:
    batcher = Scheduler(limits(watermark=0.1), 10)
    assert batcher.reserve_blocks(10)
    batcher.add(Sequence(4, 2))
    assert batcher.schedule() is None  # it waits
    batcher.release_reserved_blocks(10)
    assert parts(batcher.schedule()) == [(0, 4)]
    assert not batcher.reserve_blocks(9)  # the watermark is for those who run
    assert batcher.reserve_blocks(9, all_there_are=True)
    alone = (
        batcher.schedule()
    )  # no block for the next token: it makes room, and nothing else is done
    assert alone is not None
    assert len(alone.preempted) == 1
    assert batcher.schedule() is None
