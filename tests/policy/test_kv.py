"""Blocks are held, shared, promised, and used again in the right order."""

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
    assert (pool.holders(6), pool.holders(7), pool.held) == (1, 0, 7)


def test_more_than_there_is_cannot_be_promised() -> None:
    with pytest.raises(AssertionError, match="more blocks are promised"):
        BlockPool(2).promise(3)


def test_named_blocks_are_found_after_they_were_let_go() -> None:
    pool = BlockPool(4)
    blocks = drawn(pool, 2)
    for block, key in zip(blocks, "ab", strict=True):
        pool.name(block, key)
    pool.release(blocks)
    assert pool.spare == 4
    assert pool.find("abc") == blocks
    assert pool.find("xb") == []
    pool.hold(blocks)
    assert pool.spare == 2


def test_the_end_of_a_beginning_is_used_again_first() -> None:
    pool = BlockPool(3)
    blocks = drawn(pool, 3)
    for block, key in zip(blocks, "abc", strict=True):
        pool.name(block, key)
    pool.release(blocks)
    drawn(pool, 1)
    assert pool.find("abc") == blocks[:2]
    assert pool.evictions == 1


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
    pool.name(idle[0], "idle")
    pool.name(held[0], "held")
    pool.release(idle)
    pool.forget()
    assert pool.find(["idle"]) == pool.find(["held"]) == []
    pool.release(held)
    assert pool.spare == 2


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
