"""A router counts what it sent and what came back, and remembers which prompts went where."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.serving.router import RequestRouter


def test_turns_go_round_whatever_is_open() -> None:
    router = RequestRouter(3, "round-robin")
    assert [router.assign(10) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_one_with_the_fewest_open_requests_is_next() -> None:
    router = RequestRouter(3, "least-loaded")
    assert [router.assign(10) for _ in range(3)] == [0, 1, 2]
    router.release(1, 10)
    assert router.assign(10) == 1


def test_of_equally_many_the_one_with_less_to_read_is_next() -> None:
    router = RequestRouter(2, "least-loaded")
    assert [router.assign(500), router.assign(20), router.assign(10)] == [0, 1, 1]


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    router = RequestRouter(3, "prefix", block_tokens=16)
    for number, name in enumerate("abc"):
        assert router.assign(160, [(name, place) for place in range(10)]) == number
    for number in range(3):
        router.release(number, 160)
    assert router.assign(320, [("b", place) for place in range(20)]) == 1


def test_a_long_queue_outweighs_a_short_prefix() -> None:
    router = RequestRouter(2, "prefix", block_tokens=16)
    shared = ["a", "b"]
    assert router.assign(40, shared) == 0
    for _ in range(3):
        router.assign(400)  # the other one first, which has nothing open yet
    router.release(1, 400)
    assert router.open_prompt_tokens[0] > router.open_prompt_tokens[1]
    assert router.assign(40, shared) == 1


def test_what_was_sent_long_ago_is_forgotten() -> None:
    router = RequestRouter(2, "prefix", block_tokens=16, kept_blocks=4)
    router.assign(64, ["a", "b", "c", "d"])
    router.release(0, 64)
    assert router._matched(["a", "b", "c", "d"]) == [4, 0]
    router.assign(900)
    router.assign(900)
    router.release(0, 900)
    assert router.assign(32, ["x", "y"]) == 0
    assert router._matched(["a", "b", "c", "d"]) == [2, 0]


def test_unknown_ways_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="least-loaded"):
        RequestRouter(2, "least-load")  # type: ignore[arg-type]
