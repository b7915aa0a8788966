"""Answers grow by pieces that join to the whole text, and end where they are asked to."""

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="the package of sampling works on torch tensors")

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.run.serve.output.detokenizer import IncrementalDetokenizer, StopCheck, StopChecker
from meshwright.run.serve.output.text_markers import (
    PartialMarkerTracker,
    count_partial_marker,
    find_first_marker,
)
from meshwright.run.serve.sampling_params import SamplingParams

Decode = Callable[[Sequence[int]], str]

WORDS: list[bytes] = [
    *(bytes([byte]) for byte in range(256)),
    *(text.encode() for text in ("the", " the", " ", "€", "😀", "漢字", "�", "stop", "st", "op")),
    "😀".encode()[:2],
    "😀".encode()[2:],
    "漢字".encode()[:4],
    b"a" + "€".encode()[:1],
    "€".encode()[1:] + b"b",
]
SKIPPED = len(WORDS)
EOS = len(WORDS) + 1


def by_bytes(tokens: Sequence[int]) -> str:
    """Decode as byte-level tokenizers do."""
    return b"".join(WORDS[token] for token in tokens if token < len(WORDS)).decode(errors="replace")


def by_words(tokens: Sequence[int]) -> str:
    """Decode as SentencePiece does: no space before the first word."""
    return by_bytes(tokens).removeprefix(" ")


def by_tokenizers(decoder: str) -> tuple[Decode, int]:
    """Return the decoder of a real tokenizer, and how many tokens it has."""
    tokenizers = pytest.importorskip("tokenizers")
    if decoder == "bytes":
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        words = {letter: index for index, letter in enumerate(alphabet)}
        words |= {"ĠâĤ": 256, "¬Ġ": 257, "Ġthe": 258}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        made.decoder = tokenizers.decoders.ByteLevel()
    else:
        words = {f"<0x{byte:02X}>": byte for byte in range(256)}
        words |= {"▁": 256, "▁the": 257, "a": 258, "▁▁": 259}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        steps = tokenizers.decoders
        made.decoder = steps.Sequence(
            [
                steps.Replace("▁", " "),
                steps.ByteFallback(),
                steps.Fuse(),
                steps.Strip(content=" ", left=1),
            ]
        )
    return lambda tokens: str(made.decode(list(tokens))), len(words)


def written(decode: Decode, tokens: Sequence[int]) -> list[str]:
    text = IncrementalDetokenizer(decode)
    return [*(text.add(token) for token in tokens), text.flush()]


any_tokens = st.lists(
    st.one_of(st.integers(0, SKIPPED), st.integers(250, SKIPPED), st.integers(128, 255)),
    max_size=60,
)


@given(any_tokens)
def test_pieces_join_to_the_whole_text_of_a_byte_level_tokenizer(tokens: list[int]) -> None:
    assert "".join(written(by_bytes, tokens)) == by_bytes(tokens)


@given(any_tokens)
def test_pieces_join_where_the_first_space_is_dropped(tokens: list[int]) -> None:
    assert "".join(written(by_words, tokens)) == by_words(tokens)


@settings(deadline=None)
@given(st.data())
def test_pieces_join_to_the_text_of_a_real_byte_level_decoder(data: st.DataObject) -> None:
    decode, words = by_tokenizers("bytes")
    tokens = data.draw(st.lists(st.integers(0, words - 1), max_size=40))
    assert "".join(written(decode, tokens)) == decode(tokens)


@settings(deadline=None)
@given(st.text(max_size=20), st.booleans())
def test_pieces_join_where_characters_fall_back_to_bytes(text: str, spaced: bool) -> None:
    decode, _ = by_tokenizers("fallback")
    tokens = [257, 256] if spaced else []
    for letter in text:
        tokens += [257] if letter in " \n" else list(letter.encode())
    assert "".join(written(decode, tokens)) == decode(tokens)


def test_half_a_character_is_held_back() -> None:
    euro = "€".encode()
    assert written(by_bytes, [ord("a"), *euro, ord("b")]) == ["a", "", "", "€", "b", ""]


def test_tokens_without_text_leave_the_space_of_the_next_word() -> None:
    the, space_the = 256, 257
    assert written(by_words, [the, SKIPPED, SKIPPED, space_the])[3] == " the"


def test_few_tokens_are_decoded_at_a_time() -> None:
    longest = 0

    def watched(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return by_bytes(tokens)

    for stream in ([ord("x")] * 500, [0x80] * 500, [0xF0] * 500, [SKIPPED] * 20 + [ord("x")] * 500):
        assert "".join(written(watched, stream)) == by_bytes(stream)
    assert longest < 40


def answered(
    tokens: Sequence[int], sampling: SamplingParams, *, room: int = 1000, widths: Sequence[int] = ()
) -> tuple[str, StopCheck, int]:
    """Return an answer's text, its last step, and how many tokens are part of it."""
    answer = StopChecker(by_bytes, sampling, [EOS], room)
    text, used, step, rest = "", 0, StopCheck(0, ""), list(tokens)
    cuts = iter(widths)
    while rest and step.finish_reason is None:
        width = next(cuts, 1)
        now, rest = rest[:width], rest[width:]
        step = answer.add(now)
        text += step.text
        used += step.num_tokens
    return text, step, used


def letters(text: str) -> list[int]:
    return list(text.encode())


@given(
    st.lists(st.sampled_from("abc"), max_size=30).map("".join),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_stops_are_found_wherever_tokens_cut_them(
    text: str, stops: list[str], widths: list[int]
) -> None:
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    wanted = text[: min(ends)[1]] if ends else text
    got, step, used = answered(letters(text), SamplingParams(stop=tuple(stops)), widths=widths)
    if ends:
        assert got == wanted
        assert step.finish_reason == "stop"
        assert used == min(ends)[0]
        assert step.stop_reason == text[min(ends)[1] : min(ends)[0]]
    else:
        assert wanted.startswith(got)
        assert count_partial_marker(text, stops) == len(text) - len(got)
        assert step.finish_reason is None


def test_held_text_comes_with_the_end() -> None:
    asked = SamplingParams(stop=("stop",), max_tokens=5)
    assert answered(letters("xxsto"), asked)[:2] == ("xxsto", StopCheck(1, "sto", "length"))
    asked = SamplingParams(stop=("stop",))
    text, step, used = answered([*letters("xsto"), EOS, 65], asked)
    assert (text, step.finish_reason, step.stop_reason, used) == ("xsto", "stop", None, 5)
    broken = "€".encode()[:2]
    assert answered([*broken, EOS], SamplingParams())[0] == "�"


def test_a_stop_token_is_named_and_is_no_text() -> None:
    text, step, used = answered(letters("ab!c"), SamplingParams(stop_token_ids=(ord("!"),)))
    assert (text, step.finish_reason, step.stop_reason, used) == ("ab", "stop", ord("!"), 3)


def test_end_of_text_may_be_ignored() -> None:
    text, step, _ = answered([65, EOS, 66], SamplingParams(ignore_eos=True))
    assert (text, step.finish_reason) == ("AB", None)


def test_the_room_of_the_context_ends_an_answer() -> None:
    assert answered(letters("abcdef"), SamplingParams(), room=3)[0] == "abc"
    assert (
        answered(letters("abcdef"), SamplingParams(max_tokens=5), room=3)[1].finish_reason
        == "length"
    )


def test_no_stop_counts_within_the_least_tokens() -> None:
    asked = SamplingParams(stop=("b",), min_tokens=3)
    assert answered(letters("abbab"), asked)[0] == "abba"
    assert answered([65, EOS, 66, EOS, 67], SamplingParams(min_tokens=3))[0] == "AB"


def test_tokens_after_the_end_are_left_out() -> None:
    answer = StopChecker(by_bytes, SamplingParams(stop=("!",)), [EOS], 100)
    assert answer.add(letters("ab!cd")) == StopCheck(3, "ab", "stop", "!")


def test_a_grammar_may_end_an_answer() -> None:
    answer = StopChecker(by_bytes, SamplingParams(stop=("}}",)), [EOS], 100)
    assert answer.add(letters("{}"), ended=True) == StopCheck(2, "{}", "stop")


def test_the_longest_of_stops_that_end_together_is_meant() -> None:
    found = find_first_marker("xxabc", ["bc", "abc", "c"])
    assert found is not None
    assert (found.text, found.start) == ("abc", 2)
    assert count_partial_marker("xab", ["abc", "bcd"]) == 2


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.lists(st.text("ab", max_size=5), max_size=12),
)
def test_a_beginning_of_a_marker_is_counted_as_text_grows(
    markers: list[str], pieces: list[str]
) -> None:
    tracker, text = PartialMarkerTracker(markers), ""
    for piece in pieces:
        text += piece
        assert tracker.feed(piece) == count_partial_marker(text, markers)
