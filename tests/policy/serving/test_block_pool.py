"""Blocks are held, shared, promised, and used again in the right order."""

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.serving.block_pool import BlockPool, hash_blocks


def drawn(pool: BlockPool, count: int) -> list[int]:
    pool.reserve(count)
    return pool.allocate(count)


def test_a_promise_takes_from_what_is_spare_before_any_block_is_drawn() -> None:
    pool = BlockPool(4)
    pool.reserve(3)
    assert (pool.free_block_count, pool.used_block_count) == (1, 3)
    assert len(pool.allocate(2)) == 2
    assert (pool.free_block_count, pool.reserved_block_count) == (1, 1)
    pool.unreserve(1)
    assert pool.free_block_count == 2


def test_a_pool_is_made_at_once_however_many_blocks_it_has() -> None:
    pool = BlockPool(10**15)
    first, then = drawn(pool, 3), drawn(pool, 2)
    assert first + then == [0, 1, 2, 3, 4]
    pool.free_blocks(first)
    assert drawn(pool, 5) == [0, 1, 2, 5, 6], "those that were let go of come first"
    assert pool.used_block_count == 7


def test_more_than_there_is_cannot_be_promised() -> None:
    with pytest.raises(AssertionError, match="more blocks are promised"):
        BlockPool(2).reserve(3)


def test_named_blocks_are_found_after_they_were_let_go() -> None:
    pool = BlockPool(4)
    blocks = drawn(pool, 2)
    pool.cache_full_blocks(blocks, "ab", 0, 2)
    pool.free_blocks(blocks)
    assert pool.free_block_count == 4
    assert pool.find_cached_blocks("abc") == blocks
    assert pool.find_cached_blocks("xb") == []
    pool.touch(blocks)
    assert pool.free_block_count == 2


def test_the_end_of_a_beginning_is_used_again_first() -> None:
    pool = BlockPool(3)
    blocks = drawn(pool, 3)
    pool.cache_full_blocks(blocks, "abc", 0, 3)
    pool.free_blocks(blocks)
    drawn(pool, 1)
    assert pool.find_cached_blocks("abc") == blocks[:2]


def test_a_block_that_two_hold_is_let_go_by_both() -> None:
    pool = BlockPool(2)
    blocks = drawn(pool, 1)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert pool.free_block_count == 1
    pool.free_blocks(blocks)
    assert pool.free_block_count == 2


def test_new_weights_make_old_names_useless() -> None:
    pool = BlockPool(2)
    idle, held = drawn(pool, 1), drawn(pool, 1)
    pool.cache_full_blocks(idle, ["idle"], 0, 1)
    pool.cache_full_blocks(held, ["held"], 0, 1)
    pool.free_blocks(idle)
    pool.reset_prefix_cache()
    assert pool.find_cached_blocks(["idle"]) == pool.find_cached_blocks(["held"]) == []
    pool.free_blocks(held)
    assert pool.free_block_count == 2


def test_blocks_of_a_prompt_are_one_run_that_is_cut_where_another_prompt_leaves_it() -> None:
    pool = BlockPool(200)
    blocks = drawn(pool, 100)
    pool.cache_full_blocks(blocks, [("a", place) for place in range(100)], 0, 100)
    assert len(pool._runs) == 1
    found = pool.find_cached_blocks(
        [("a", place) for place in range(60)] + [("b", place) for place in range(9)]
    )
    assert found == blocks[:60]
    pool.touch(found)
    assert [len(run.blocks) for run in pool._runs.values()] == [60, 40]
    pool.free_blocks(blocks)
    assert pool.count_evictable(blocks) == 40


def test_of_two_that_compute_the_same_the_first_is_found_and_the_rest_of_the_other() -> None:
    pool = BlockPool(20)
    one, other = drawn(pool, 8), drawn(pool, 8)
    pool.cache_full_blocks(one, "abcdef", 0, 6)
    pool.cache_full_blocks(other, "abcdefgh", 0, 4)
    pool.cache_full_blocks(other, "abcdefgh", 4, 8)
    assert pool.find_cached_blocks("abcdefgh") == one[:6] + other[6:]
    pool.free_blocks(one)
    pool.free_blocks(other)
    drawn(pool, 13)  # the last of those that were let go first: what is left begins no prompt
    assert pool.find_cached_blocks("abcdefgh") == one[:5]
    assert pool.find_cached_blocks("gh") == other[6:]


class Singly:
    """The same pool block by block: what runs have to agree with."""

    def __init__(self, size: int) -> None:
        self.free = list(range(size - 1, -1, -1))
        self.holders = [0] * size
        self.named: dict[tuple[int, ...], int] = {}
        self.keys: dict[int, tuple[int, ...]] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def drawn(self, count: int) -> list[int]:
        while len(self.free) < count:
            block, _ = self.idle.popitem(last=False)
            del self.named[self.keys.pop(block)]
            self.free.append(block)
        blocks = [self.free.pop() for _ in range(count)]
        self.touch(blocks)
        return blocks

    def find(self, keys: list[tuple[int, ...]]) -> list[int]:
        missing = next((at for at, key in enumerate(keys) if key not in self.named), len(keys))
        return [self.named[key] for key in keys[:missing]]

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.idle.pop(block, None)
            self.holders[block] += 1

    def cache_full_blocks(
        self, blocks: list[int], keys: list[tuple[int, ...]], first: int, stop: int
    ) -> None:
        for block, key in zip(blocks[first:stop], keys[first:stop], strict=True):
            if key not in self.named and block not in self.keys:
                self.named[key], self.keys[block] = block, key

    def free_blocks(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block] and block in self.keys:
                self.idle[block] = None
            elif not self.holders[block]:
                self.free.append(block)

    def forget(self) -> None:
        self.free += self.idle
        for kept in (self.idle, self.keys, self.named):
            kept.clear()


@given(st.integers(0, 1 << 32))
def test_runs_do_what_blocks_taken_one_by_one_would(seed: int) -> None:
    random, size = Random(seed), 40
    pool, singly = BlockPool(size), Singly(size)
    held: list[tuple[list[int], list[tuple[int, ...]], int]] = []
    for _ in range(60):
        act = random.random()
        if act < 0.4:
            # Prompts of two tokens that may part anywhere: each key is all before it.
            tokens = [int(random.random() < 0.15) for _ in range(random.randint(1, 14))]
            keys = [tuple(tokens[: at + 1]) for at in range(len(tokens))]
            found = pool.find_cached_blocks(keys, random.choice([None, len(keys) - 1]))
            assert found == singly.find(keys)[: len(found)]
            assert len(found) >= len(singly.find(keys)) - 1
            idle = pool.count_evictable(found)
            assert idle == sum(not singly.holders[block] for block in found)
            more = len(keys) - len(found)
            if idle + more <= pool.free_block_count:
                for one in (pool, singly):
                    one.touch(found)
                blocks = found + drawn(pool, more)
                assert blocks == found + singly.drawn(more)
                held.append((blocks, keys, len(found)))
        elif act < 0.7 and held:
            place = random.randrange(len(held))
            blocks, keys, named = held[place]
            stop = random.randint(named, len(keys))
            for one in (pool, singly):
                one.cache_full_blocks(blocks, keys, named, stop)
            held[place] = blocks, keys, stop
        elif act < 0.98 and held:
            blocks, _, _ = held.pop(random.randrange(len(held)))
            for one in (pool, singly):
                one.free_blocks(blocks)
        elif act >= 0.98:
            pool.reset_prefix_cache()
            singly.forget()
        assert pool.free_block_count == len(singly.free) + len(singly.idle)
        never = range(size - 1, size - 1 - pool._never, -1)
        assert [*never, *pool._left] == singly.free


@given(st.lists(st.integers(0, 300_000), max_size=70), st.integers(1, 16))
def test_keys_tell_everything_before_a_block(tokens: list[int], block: int) -> None:
    keys = hash_blocks(tokens, block)
    assert len(keys) == len(tokens) // block
    half = len(keys) // 2
    after = keys[half - 1] if half else b""
    assert hash_blocks(tokens[half * block :], block, after=after) == keys[half:]
    changed = [*tokens[:1], *(token + 1 for token in tokens[1:2]), *tokens[2:]]
    if len(tokens) > 1:
        assert not set(hash_blocks(changed, block)[1 if block == 1 else 0 :]) & set(keys)
    assert not set(hash_blocks(tokens, block, salt=b"adapter")) & set(keys)


def test_a_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="salt"):
        hash_blocks([1], 1, salt=b"x" * 65)
