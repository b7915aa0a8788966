"""Samples in microbatches: whole, shared out, filled up."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.rl.packing import bins_of, packed
from meshwright.spec.workload import Fixed
from tests.predict.rl.setups import rounds


def test_samples_are_packed_into_sequences_of_like_attention() -> None:
    asked = rounds()
    drawn = [asked.drawn(group) for group in range(asked.prompts)]
    found = packed(asked)
    lengths = [one.prompt + answer for one in drawn for answer in one.answers]
    assert found.tokens == sum(lengths)
    assert found.length == round(sum(one**2 for one in lengths) / sum(lengths))
    assert found.fullest == max(lengths)
    share = found.share(4)
    assert share.workload.global_batch == 4 * share.microbatches * share.sequences
    assert share.workload.tokens == share.tokens >= found.tokens
    assert share.length % 64 == 0


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=60))
def test_microbatches_hold_whole_samples_and_no_two_could_be_one(lengths: list[int]) -> None:
    bins = bins_of(lengths, 4096)
    assert sum(bins) == sum(lengths)
    assert max(bins) <= 4096
    least = sorted(bins)
    assert len(bins) == 1 or least[0] + least[1] > 4096


def test_what_is_longer_than_the_room_has_a_microbatch_of_its_own() -> None:
    assert sorted(bins_of([300, 90, 10], 100)) == [100, 300]


def test_samples_of_more_than_half_the_room_share_it_with_nobody() -> None:
    asked = rounds(output=Fixed(tokens=2900), packed=4096)
    found = packed(asked)
    assert found.bins == asked.prompts * asked.samples
    # By tokens alone there would be a quarter less.
    assert found.bins * 4096 > 1.3 * found.tokens


def test_microbatches_that_are_filled_up_cost_as_much_as_the_fullest() -> None:
    found = packed(rounds(packed=4096))
    plain, filled = found.share(2), found.share(2, fills=True)
    assert filled.microbatches == plain.microbatches
    assert filled.tokens >= found.bins * found.fullest
    assert filled.tokens > plain.tokens


def test_each_update_is_packed_by_itself() -> None:
    one, four = packed(rounds(packed=4096)), packed(rounds(packed=4096, updates=4))
    assert 4 * four.bins >= one.bins
    assert four.tokens == -(-one.tokens // 4)
