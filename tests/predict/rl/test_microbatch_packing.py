"""Samples in microbatches: whole, shared out, filled up."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.rl.microbatch_packing import pack_bins, pack_update
from meshwright.spec.workload import FixedLength
from tests.predict.rl.setups import rounds


def test_samples_are_packed_into_sequences_of_like_attention() -> None:
    asked = rounds()
    drawn = [asked.sample_group(group) for group in range(asked.prompts_per_step)]
    found = pack_update(asked)
    lengths = [one.prompt_tokens + answer for one in drawn for answer in one.response_tokens]
    assert found.trained_tokens == sum(lengths)
    assert found.mean_length == round(sum(one**2 for one in lengths) / sum(lengths))
    assert found.max_microbatch_tokens == max(lengths)
    share = found.split_over_replicas(4)
    assert share.workload.global_batch == 4 * share.microbatches * share.sequences_per_microbatch
    assert share.workload.tokens == share.tokens >= found.trained_tokens
    assert share.length % 64 == 0


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=60))
def test_microbatches_hold_whole_samples_and_no_two_could_be_one(lengths: list[int]) -> None:
    bins = pack_bins(lengths, 4096)
    assert sum(bins) == sum(lengths)
    assert max(bins) <= 4096
    least = sorted(bins)
    assert len(bins) == 1 or least[0] + least[1] > 4096


def test_what_is_longer_than_the_room_has_a_microbatch_of_its_own() -> None:
    assert sorted(pack_bins([300, 90, 10], 100)) == [100, 300]


def test_samples_of_more_than_half_the_room_share_it_with_nobody() -> None:
    asked = rounds(response_lengths=FixedLength(tokens=2900), microbatch_tokens=4096)
    found = pack_update(asked)
    assert found.microbatches == asked.prompts_per_step * asked.group_size
    # By tokens alone there would be a quarter less.
    assert found.microbatches * 4096 > 1.3 * found.trained_tokens


def test_microbatches_that_are_filled_up_cost_as_much_as_the_fullest() -> None:
    found = pack_update(rounds(microbatch_tokens=4096))
    plain, filled = found.split_over_replicas(2), found.split_over_replicas(2, fills=True)
    assert filled.microbatches == plain.microbatches
    assert filled.tokens >= found.microbatches * found.max_microbatch_tokens
    assert filled.tokens > plain.tokens


def test_each_update_is_packed_by_itself() -> None:
    one, four = (
        pack_update(rounds(microbatch_tokens=4096)),
        pack_update(rounds(microbatch_tokens=4096, updates_per_step=4)),
    )
    assert 4 * four.microbatches >= one.microbatches
    assert four.trained_tokens == -(-one.trained_tokens // 4)
