import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.workload import (
    EmpiricalLength,
    FixedLength,
    LogNormalLength,
    TrainingWorkload,
    UniformLength,
)


def run(**fields: object) -> TrainingWorkload:
    known = {"tokens": 10**9, "sequence_length": 4096, "global_batch": 256}
    return TrainingWorkload(**{**known, **fields})  # type: ignore[arg-type]


def test_steps_cover_every_token() -> None:
    training = run(tokens=4096 * 256 * 10 + 1)
    assert training.tokens_per_step == 4096 * 256
    assert training.num_steps == 11


def test_steps_are_exact_for_counts_beyond_what_a_float_holds() -> None:
    assert run(tokens=10**18, sequence_length=1, global_batch=1).num_steps == 10**18


def test_full_sequences_waste_nothing() -> None:
    training = run()
    assert training.padding_share == training.truncated_share == 0
    assert training.squared_length == 4096**2


def test_documents_half_as_long_as_the_sequence_leave_half_of_it_empty() -> None:
    training = run(lengths=FixedLength(tokens=2048), packing="none")
    assert training.padding_share == 0.5
    assert training.num_steps == 2 * run().num_steps


def test_documents_twice_as_long_as_the_sequence_lose_half_of_their_tokens() -> None:
    training = run(lengths=FixedLength(tokens=8192), packing="none")
    assert training.truncated_share == 0.5
    assert training.padding_share == 0


def test_packing_leaves_no_padding() -> None:
    assert run(lengths=UniformLength(low=1, high=9000), packing="pack").padding_share == 0


def test_attention_spans_the_sequence_unless_masks_keep_documents_apart() -> None:
    lengths = FixedLength(tokens=512)
    assert run(lengths=lengths, packing="concat").squared_length == 4096**2
    assert run(lengths=lengths, packing="none").squared_length == 4096**2
    assert run(lengths=lengths, packing="pack").squared_length == 4096 * 512


def packed(lengths: list[int], sequence: int) -> float:
    """Lay documents end to end, cut the row into sequences, and average their squared spans."""
    place = total = 0
    for length in lengths:
        left = length
        while left:
            span = min(left, sequence - place)
            total += span**2
            left -= span
            place = (place + span) % sequence
    return total * sequence / sum(lengths)


@given(st.integers(1, 60), st.integers(1, 60))
def test_squared_length_of_equal_documents_equals_packing_them(length: int, sequence: int) -> None:
    training = run(lengths=FixedLength(tokens=length), sequence_length=sequence)
    assert training.squared_length == pytest.approx(packed([length] * sequence, sequence))


@settings(max_examples=10)
@given(
    st.sampled_from(
        [
            UniformLength(low=1, high=700),
            UniformLength(low=300, high=3000),
            LogNormalLength(median=150, sigma=1.0, longest=4000),
            EmpiricalLength(values=(10, 500, 2500), weights=(5.0, 3.0, 1.0)),
        ]
    ),
    st.sampled_from([100, 512, 2048]),
)
def test_squared_length_is_what_packing_many_documents_gives(
    lengths: UniformLength | LogNormalLength | EmpiricalLength, sequence: int
) -> None:
    from random import Random

    training = run(lengths=lengths, sequence_length=sequence)
    measured = packed(lengths.sample(Random(2), 40_000), sequence)
    assert training.squared_length == pytest.approx(measured, rel=0.03)


@given(st.integers(1, 10**18), st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10**9))
def test_derived_figures_stay_in_range(tokens: int, sequence: int, batch: int, length: int) -> None:
    for packing in ("none", "concat", "pack"):
        training = run(
            tokens=tokens, sequence_length=sequence, global_batch=batch,
            lengths=LogNormalLength(median=length, sigma=1.0), packing=packing,
        )  # fmt: skip
        assert training.num_steps >= 1
        assert 0 <= training.padding_share < 1
        assert 0 <= training.truncated_share < 1
        assert sequence <= training.squared_length <= float(sequence**2)


def test_every_wrong_field_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        run(tokens=0, sequence_length=1.5, global_batch=-1, packing="packed")
    assert {p.where for p in caught.value.problems} == {
        "tokens", "sequence_length", "global_batch", "packing",
    }  # fmt: skip


def test_documents_without_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="lengths"):
        run(lengths=EmpiricalLength(values=(0, 1), weights=(9.0, 1.0)))


@pytest.mark.parametrize("value", [0.99, 0, -1.0, float("nan"), float("inf")])
def test_the_busiest_rank_has_no_less_than_the_mean(value: float) -> None:
    with pytest.raises(InputError, match="expert_imbalance"):
        run(expert_imbalance=value)
