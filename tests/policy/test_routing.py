"""A router counts what it sent and what came back, and remembers which prompts went where."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.routing import Router


def test_turns_go_round_whatever_is_open() -> None:
    router = Router(3, "round-robin")
    assert [router.send(10) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_one_with_the_fewest_open_requests_is_next() -> None:
    router = Router(3, "least-loaded")
    assert [router.send(10) for _ in range(3)] == [0, 1, 2]
    router.back(1, 10)
    assert router.send(10) == 1


def test_of_equally_many_the_one_with_less_to_read_is_next() -> None:
    router = Router(2, "least-loaded")
    assert [router.send(500), router.send(20), router.send(10)] == [0, 1, 1]


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    router = Router(3, "prefix", block_tokens=16)
    for number, name in enumerate("abc"):
        assert router.send(160, [(name, place) for place in range(10)]) == number
    for number in range(3):
        router.back(number, 160)
    assert router.send(320, [("b", place) for place in range(20)]) == 1


def test_a_long_queue_outweighs_a_short_prefix() -> None:
    router = Router(2, "prefix", block_tokens=16)
    shared = ["a", "b"]
    assert router.send(40, shared) == 0
    for _ in range(3):
        router.send(400)  # the other one first, which has nothing open yet
    router.back(1, 400)
    assert router.tokens[0] > router.tokens[1]
    assert router.send(40, shared) == 1


def test_what_was_sent_long_ago_is_forgotten() -> None:
    router = Router(2, "prefix", block_tokens=16, kept_blocks=4)
    router.send(64, ["a", "b", "c", "d"])
    router.back(0, 64)
    assert router._matched(["a", "b", "c", "d"]) == [4, 0]
    router.send(900)
    router.send(900)
    router.back(0, 900)
    assert router.send(32, ["x", "y"]) == 0
    assert router._matched(["a", "b", "c", "d"]) == [2, 0]


def test_unknown_ways_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="least-loaded"):
        Router(2, "least-load")  # type: ignore[arg-type]
