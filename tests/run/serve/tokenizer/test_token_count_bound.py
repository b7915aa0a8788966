"""Texts that are too long are refused without encoding them, and no other text is."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="reading text needs meshwright[serve]")

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from meshwright.run.serve.tokenizer.token_count_bound import TokenCountBound
from tests.run.serve.server.hostile import byte_tokenizer

TOKENIZER = byte_tokenizer()


def changed(**parts: Any) -> Tokenizer:
    """Return the tokenizer with other parts of its file."""
    return Tokenizer.from_str(json.dumps({**json.loads(TOKENIZER.to_str()), **parts}))


def test_a_token_stands_for_as_many_bytes_as_the_longest_token_has() -> None:
    assert TokenCountBound(TOKENIZER).max_token_bytes == 4


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \n\t\u0301é🙂\x00"), max_size=400), scale=st.integers(1, 60)
)
def test_a_text_that_fits_is_never_refused(text: str, scale: int) -> None:
    text *= scale
    count = len(TOKENIZER.encode(text).ids)
    assert not TokenCountBound(TOKENIZER).exceeds(text, count)


@pytest.mark.parametrize("word", ["a", "abab", " ", "ab ", "🙂", "\x00"])
def test_a_text_that_is_far_too_long_is_refused(word: str) -> None:
    assert TokenCountBound(TOKENIZER).exceeds(word * 500_000, 1000)


def test_a_long_text_is_counted_in_pieces_where_its_length_alone_does_not_tell() -> None:
    bound = TokenCountBound(TOKENIZER)
    wide = byte_tokenizer()
    wide.add_tokens(["x" * 2000])
    assert TokenCountBound(wide).max_token_bytes == 2000
    assert TokenCountBound(wide).exceeds("cd " * 60_000, 1000)
    assert not TokenCountBound(wide).exceeds("x" * 200_000, 100)
    assert bound.exceeds("cd " * 60_000, 1000)


def test_bytes_without_a_token_do_not_count() -> None:
    spelled = json.loads(TOKENIZER.to_str())["model"]
    spelled["vocab"] = {name: at for name, at in spelled["vocab"].items() if name != "c"}
    bound = TokenCountBound(changed(model=spelled))
    assert not bound.exceeds("c" * 1_000_000, 10)
    assert bound.exceeds("ac" * 1_000_000, 10)


@pytest.mark.parametrize(
    "parts",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst",
                        "stride": 0}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed",
                           "invert": False}},
    ],
    ids=["truncates", "strips", "shortens", "collapses", "splits", "removes"],
)  # fmt: skip
def test_nothing_is_claimed_of_a_tokenizer_that_may_drop_text(parts: dict[str, Any]) -> None:
    assert TokenCountBound(changed(**parts)).max_token_bytes is None


def test_nothing_is_claimed_of_a_token_that_takes_the_spaces_beside_it() -> None:
    greedy = byte_tokenizer()
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert len(greedy.encode(" " * 100_000 + "<mask>").ids) == 1
    assert not TokenCountBound(greedy).exceeds(" " * 100_000 + "<mask>", 1)


def test_nothing_is_claimed_of_word_pieces() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert not TokenCountBound(words).exceeds("x" * 1_000_000, 1)


def test_composed_characters_count_as_what_they_are_composed_of() -> None:
    composing = byte_tokenizer()
    composing.normalizer = normalizers.NFC()
    text = "\u03b1\u0313\u0300\u0345" * 50_000
    count = len(composing.encode(text).ids)
    assert not TokenCountBound(composing).exceeds(text, count)
    assert TokenCountBound(composing).exceeds(text, count // 8)
