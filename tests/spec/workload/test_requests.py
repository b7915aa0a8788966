from collections import Counter

import pytest

from meshwright.errors import InputError
from meshwright.spec.workload import (
    ConstantArrivals,
    FixedConcurrency,
    FixedLength,
    LogNormalLength,
    PoissonArrivals,
    PrefixSharing,
    RecordedArrivals,
    ServingWorkload,
    UniformLength,
)

CHAT = ServingWorkload(
    arrival=PoissonArrivals(rate_per_s=5),
    prompt=LogNormalLength(median=800, sigma=1.0, longest=8192),
    output=UniformLength(low=1, high=500),
)
SHARED = PrefixSharing(groups=4, tokens=FixedLength(tokens=100), block_tokens=16)


def test_the_same_seed_draws_the_same_requests() -> None:
    assert list(CHAT.generate(3, count=500)) == list(CHAT.generate(3, count=500))


def test_another_seed_draws_other_requests() -> None:
    assert list(CHAT.generate(3, count=50)) != list(CHAT.generate(4, count=50))


def test_a_shorter_stream_is_the_beginning_of_a_longer_one() -> None:
    longer = list(CHAT.generate(1, count=3000))
    assert list(CHAT.generate(1, count=1500)) == longer[:1500]


def test_changing_one_part_leaves_the_other_parts_as_they_were() -> None:
    slower = ServingWorkload(
        arrival=ConstantArrivals(rate_per_s=1), prompt=CHAT.prompt, output=CHAT.output
    )
    one, other = list(CHAT.generate(9, count=100)), list(slower.generate(9, count=100))
    assert [r.prompt_tokens for r in one] == [r.prompt_tokens for r in other]
    assert [r.output_tokens for r in one] == [r.output_tokens for r in other]


def test_requests_end_with_the_duration_or_the_count() -> None:
    assert all(request.arrival_s < 60 for request in CHAT.generate(1, duration_s=60))
    assert len(list(CHAT.generate(1, count=10, duration_s=1e6))) == 10
    assert list(CHAT.generate(1, count=0)) == []


def test_given_times_end_by_themselves() -> None:
    stream = ServingWorkload(
        arrival=RecordedArrivals(at_s=(1.0, 2.0)), prompt=CHAT.prompt, output=CHAT.output
    )
    assert [request.arrival_s for request in stream.generate(0)] == [1.0, 2.0]


def test_an_endless_stream_needs_an_end() -> None:
    with pytest.raises(InputError, match="give a count or a duration"):
        CHAT.generate(1)


def test_a_closed_loop_needs_a_count() -> None:
    loop = ServingWorkload(
        arrival=FixedConcurrency(in_flight=4), prompt=CHAT.prompt, output=CHAT.output
    )
    with pytest.raises(InputError, match="give a count"):
        loop.generate(1, duration_s=10)
    assert {request.arrival_s for request in loop.generate(1, count=20)} == {0.0}


def test_prompts_of_one_group_start_with_the_same_blocks() -> None:
    stream = ServingWorkload(
        arrival=CHAT.arrival, prompt=FixedLength(tokens=200), output=CHAT.output, prefix=SHARED
    )
    seen = Counter(request.prefix_blocks for request in stream.generate(1, count=400))
    assert len(seen) == 4
    assert {len(blocks) for blocks in seen} == {100 // 16}
    assert len({block for blocks in seen for block in blocks}) == 4 * (100 // 16)


def test_a_prompt_shorter_than_its_prefix_shares_only_whole_blocks_of_it() -> None:
    stream = ServingWorkload(
        arrival=CHAT.arrival, prompt=FixedLength(tokens=47), output=CHAT.output, prefix=SHARED
    )
    assert {len(request.prefix_blocks) for request in stream.generate(1, count=50)} == {2}


def test_only_the_given_share_of_requests_has_a_prefix() -> None:
    prefix = PrefixSharing(groups=2, tokens=FixedLength(tokens=64), share=0.25)
    stream = ServingWorkload(
        arrival=CHAT.arrival, prompt=FixedLength(tokens=100), output=CHAT.output, prefix=prefix
    )
    with_prefix = sum(bool(request.prefix_blocks) for request in stream.generate(1, count=4000))
    assert with_prefix / 4000 == pytest.approx(0.25, abs=0.03)


def test_skew_makes_the_first_prefix_the_most_popular() -> None:
    prefix = PrefixSharing(groups=50, tokens=FixedLength(tokens=16), skew=1.0)
    stream = ServingWorkload(
        arrival=CHAT.arrival, prompt=FixedLength(tokens=100), output=CHAT.output, prefix=prefix
    )
    seen = Counter(request.prefix_blocks for request in stream.generate(1, count=4000))
    # The harmonic number of 50 is 4.499, so the first group takes 22 % of all requests.
    assert seen[(0,)] / 4000 == pytest.approx(1 / 4.499, abs=0.03)


def test_impossible_prefixes_list_every_wrong_field() -> None:
    with pytest.raises(InputError) as caught:
        PrefixSharing(groups=0, tokens=FixedLength(tokens=1), share=2.0, skew=-1.0, block_tokens=0)
    fields = {problem.where for problem in caught.value.problems}
    assert fields == {"groups", "share", "skew", "block_tokens"}
