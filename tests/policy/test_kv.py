"""Blocks are held, shared, promised, and used again in the right order."""

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.kv import BlockPool, block_keys


def drawn(pool: BlockPool, count: int) -> list[int]:
    pool.promise(count)
    return pool.draw(count)


def test_a_promise_takes_from_what_is_spare_before_any_block_is_drawn() -> None:
    pool = BlockPool(4)
    pool.promise(3)
    assert (pool.spare, pool.held) == (1, 3)
    assert len(pool.draw(2)) == 2
    assert (pool.spare, pool.promised) == (1, 1)
    pool.forgo(1)
    assert pool.spare == 2


def test_a_pool_is_made_at_once_however_many_blocks_it_has() -> None:
    pool = BlockPool(10**15)
    first, then = drawn(pool, 3), drawn(pool, 2)
    assert first + then == [0, 1, 2, 3, 4]
    pool.release(first)
    assert drawn(pool, 5) == [0, 1, 2, 5, 6], "those that were let go of come first"
    assert pool.held == 7


def test_more_than_there_is_cannot_be_promised() -> None:
    with pytest.raises(AssertionError, match="more blocks are promised"):
        BlockPool(2).promise(3)


def test_named_blocks_are_found_after_they_were_let_go() -> None:
    pool = BlockPool(4)
    blocks = drawn(pool, 2)
    pool.name(blocks, "ab", 0, 2)
    pool.release(blocks)
    assert pool.spare == 4
    assert pool.find("abc") == blocks
    assert pool.find("xb") == []
    pool.hold(blocks)
    assert pool.spare == 2


def test_the_end_of_a_beginning_is_used_again_first() -> None:
    pool = BlockPool(3)
    blocks = drawn(pool, 3)
    pool.name(blocks, "abc", 0, 3)
    pool.release(blocks)
    drawn(pool, 1)
    assert pool.find("abc") == blocks[:2]


def test_a_block_that_two_hold_is_let_go_by_both() -> None:
    pool = BlockPool(2)
    blocks = drawn(pool, 1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.spare == 1
    pool.release(blocks)
    assert pool.spare == 2


def test_new_weights_make_old_names_useless() -> None:
    pool = BlockPool(2)
    idle, held = drawn(pool, 1), drawn(pool, 1)
    pool.name(idle, ["idle"], 0, 1)
    pool.name(held, ["held"], 0, 1)
    pool.release(idle)
    pool.forget()
    assert pool.find(["idle"]) == pool.find(["held"]) == []
    pool.release(held)
    assert pool.spare == 2


def test_blocks_of_a_prompt_are_one_run_that_is_cut_where_another_prompt_leaves_it() -> None:
    pool = BlockPool(200)
    blocks = drawn(pool, 100)
    pool.name(blocks, [("a", place) for place in range(100)], 0, 100)
    assert len(pool._runs) == 1
    found = pool.find([("a", place) for place in range(60)] + [("b", place) for place in range(9)])
    assert found == blocks[:60]
    pool.hold(found)
    assert [len(run.blocks) for run in pool._runs.values()] == [60, 40]
    pool.release(blocks)
    assert pool.idle_among(blocks) == 40


def test_of_two_that_compute_the_same_the_first_is_found_and_the_rest_of_the_other() -> None:
    pool = BlockPool(20)
    one, other = drawn(pool, 8), drawn(pool, 8)
    pool.name(one, "abcdef", 0, 6)
    pool.name(other, "abcdefgh", 0, 4)
    pool.name(other, "abcdefgh", 4, 8)
    assert pool.find("abcdefgh") == one[:6] + other[6:]
    pool.release(one)
    pool.release(other)
    drawn(pool, 13)  # the last of those that were let go first: what is left begins no prompt
    assert pool.find("abcdefgh") == one[:5]
    assert pool.find("gh") == other[6:]


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
        self.hold(blocks)
        return blocks

    def find(self, keys: list[tuple[int, ...]]) -> list[int]:
        missing = next((at for at, key in enumerate(keys) if key not in self.named), len(keys))
        return [self.named[key] for key in keys[:missing]]

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.idle.pop(block, None)
            self.holders[block] += 1

    def name(self, blocks: list[int], keys: list[tuple[int, ...]], first: int, stop: int) -> None:
        for block, key in zip(blocks[first:stop], keys[first:stop], strict=True):
            if key not in self.named and block not in self.keys:
                self.named[key], self.keys[block] = block, key

    def release(self, blocks: list[int]) -> None:
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
            found = pool.find(keys, random.choice([None, len(keys) - 1]))
            assert found == singly.find(keys)[: len(found)]
            assert len(found) >= len(singly.find(keys)) - 1
            idle = pool.idle_among(found)
            assert idle == sum(not singly.holders[block] for block in found)
            more = len(keys) - len(found)
            if idle + more <= pool.spare:
                for one in (pool, singly):
                    one.hold(found)
                blocks = found + drawn(pool, more)
                assert blocks == found + singly.drawn(more)
                held.append((blocks, keys, len(found)))
        elif act < 0.7 and held:
            place = random.randrange(len(held))
            blocks, keys, named = held[place]
            stop = random.randint(named, len(keys))
            for one in (pool, singly):
                one.name(blocks, keys, named, stop)
            held[place] = blocks, keys, stop
        elif act < 0.98 and held:
            blocks, _, _ = held.pop(random.randrange(len(held)))
            for one in (pool, singly):
                one.release(blocks)
        elif act >= 0.98:
            pool.forget()
            singly.forget()
        assert pool.spare == len(singly.free) + len(singly.idle)
        never = range(size - 1, size - 1 - pool._never, -1)
        assert [*never, *pool._left] == singly.free


@given(st.lists(st.integers(0, 300_000), max_size=70), st.integers(1, 16))
def test_keys_tell_everything_before_a_block(tokens: list[int], block: int) -> None:
    keys = block_keys(tokens, block)
    assert len(keys) == len(tokens) // block
    half = len(keys) // 2
    after = keys[half - 1] if half else b""
    assert block_keys(tokens[half * block :], block, after=after) == keys[half:]
    changed = [*tokens[:1], *(token + 1 for token in tokens[1:2]), *tokens[2:]]
    if len(tokens) > 1:
        assert not set(block_keys(changed, block)[1 if block == 1 else 0 :]) & set(keys)
    assert not set(block_keys(tokens, block, salt=b"adapter")) & set(keys)


def test_a_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="salt"):
        block_keys([1], 1, salt=b"x" * 65)
