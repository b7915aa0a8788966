"""Prompts have exact lengths, share what their requests share, and are unlike elsewhere."""

from meshwright.observe.bench.serving.random_prompts import (
    COMMON_WORDS,
    MIN_TOKEN_ID,
    RandomPrompts,
    ids_to_text,
)
from meshwright.spec.workload import WorkloadRequest


def _request(tokens: int, *blocks: int) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_s=0.0, prompt_tokens=tokens, output_tokens=1, prefix_blocks=blocks, block_tokens=16
    )


def test_a_prompt_has_its_length_and_stays_within_the_vocabulary() -> None:
    ids = RandomPrompts("0", 5000).generate_ids(3, _request(1000, 1, 2))
    assert len(ids) == 1000
    assert MIN_TOKEN_ID <= ids.min() <= ids.max() < 5000


def test_a_small_vocabulary_is_used_whole() -> None:
    ids = RandomPrompts("0", 40).generate_ids(3, _request(1000))
    assert set(ids.tolist()) == set(range(40))


def test_prompts_share_the_blocks_they_have_in_common_and_nothing_more() -> None:
    prompts = RandomPrompts("0", 50_000)
    a, b = (
        prompts.generate_ids(0, _request(100, 7, 8)),
        prompts.generate_ids(1, _request(100, 7, 9)),
    )
    assert (a[:16] == b[:16]).all()
    assert a[16] != b[16] or (a[16:32] != b[16:32]).any()
    assert (a[32:] != b[32:]).any()


def test_the_last_block_may_be_partly_filled() -> None:
    prompts = RandomPrompts("0", 50_000)
    short, long = (
        prompts.generate_ids(0, _request(20, 7, 8)),
        prompts.generate_ids(1, _request(32, 7, 8)),
    )
    assert (short == long[:20]).all()


def test_a_prompt_depends_on_the_seed_and_its_number_alone() -> None:
    one, again, other = RandomPrompts("0", 9999), RandomPrompts("0", 9999), RandomPrompts("1", 9999)
    assert (one.generate_ids(5, _request(50)) == again.generate_ids(5, _request(50))).all()
    assert (one.generate_ids(5, _request(50)) != other.generate_ids(5, _request(50))).any()
    assert (one.generate_ids(5, _request(50)) != one.generate_ids(6, _request(50))).any()


def test_a_text_has_a_word_for_each_token() -> None:
    text = ids_to_text(RandomPrompts("0", 1 << 20).generate_ids(0, _request(30)), COMMON_WORDS[:20])
    assert len(text.split(" ")) == 30
    assert set(text.split(" ")) <= set(COMMON_WORDS[:20])
