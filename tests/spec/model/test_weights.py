"""One matrix and how a parallel group cuts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.catalog import model, models
from meshwright.spec.model import Weight


def test_copies_and_biases_count() -> None:
    expert = Weight("up", 8, 4, bias=True, copies=16, active=2)
    assert expert.parameters == 16 * (32 + 4)
    assert expert.flops == 2 * 2 * 32


@pytest.mark.parametrize(
    ("weight", "each"),
    [
        (Weight("q", 8, 16, "column", True), 8 * 4 + 4),
        (Weight("o", 16, 8, "row", True), 4 * 8 + 8),
        (Weight("router", 8, 16, "none"), 8 * 16),
        (Weight("k", 8, 16, most_shards=2), 8 * 8),
    ],
)
def test_rank_of_four_holds_its_part(weight: Weight, each: int) -> None:
    assert weight.per_rank(tp=4) == each


@given(st.sampled_from(sorted(models())), st.sampled_from([1, 2, 4, 8]))
def test_ranks_hold_no_less_than_the_whole_together(name: str, tp: int) -> None:
    described = model(name)
    for block in described.blocks:
        for weight in block.weights(described.hidden):
            # Rounding down loses less than one row per shard.
            held = weight.per_rank(tp) * tp + weight.copies * tp
            assert held >= weight.parameters
