"""What was used lately is remembered, the beginnings of prompts longest."""

from collections import OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.serving.router import PrefixIndex


def test_the_end_of_what_was_used_longest_ago_is_forgotten_first() -> None:
    recent = PrefixIndex(5)
    recent.touch("abc")
    recent.touch("xyz")
    assert list(recent) == ["a", "b", "x", "y", "z"]


def test_what_is_used_again_is_remembered_longer() -> None:
    recent = PrefixIndex(5)
    recent.touch("abc")
    recent.touch("xy")
    recent.touch("abc")
    recent.touch("u")
    assert sorted(map(str, recent)) == ["a", "b", "c", "u", "x"]


def test_of_a_prompt_that_is_too_long_the_beginning_is_remembered() -> None:
    recent = PrefixIndex(2)
    recent.touch("abcd")
    assert sorted(map(str, recent)) == ["a", "b"]


def test_using_the_same_again_and_again_takes_no_more_room() -> None:
    recent = PrefixIndex(100)
    for _ in range(50):
        recent.touch("abcdef")
    assert recent._listed <= 12


@given(st.integers(0, 1 << 32), st.integers(1, 30))
def test_one_line_of_keys_would_remember_the_same(seed: int, most: int) -> None:
    random, recent = Random(seed), PrefixIndex(most)
    line: OrderedDict[tuple[int, ...], None] = OrderedDict()
    for _ in range(40):
        tokens = [int(random.random() < 0.2) for _ in range(random.randint(1, 12))]
        keys = [tuple(tokens[: at + 1]) for at in range(len(tokens))]
        recent.touch(keys)
        for key in reversed(keys):
            line[key] = None
            line.move_to_end(key)
        while len(line) > most:
            line.popitem(last=False)
        assert recent.keys() == line.keys()
