"""One matrix and how a parallel group cuts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.model import BlockSpec, Model, MoESpec, NormSpec, Weight, count_parameters


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
        (Weight("k", 8, 16, max_shards=2), 8 * 8),
    ],
)
def test_rank_of_four_holds_its_part(weight: Weight, each: int) -> None:
    assert weight.count_rank_parameters(tp=4) == each


@given(st.sampled_from(sorted(list_models())), st.sampled_from([1, 2, 4, 8]))
def test_ranks_hold_no_less_than_the_whole_together(name: str, tp: int) -> None:
    described = get_model(name)
    for block in described.blocks:
        for weight in block.list_weights(described.hidden):
            # Rounding down loses less than one row per shard.
            held = weight.count_rank_parameters(tp) * tp + weight.copies * tp
            assert held >= weight.parameters


def test_single_expert_is_an_expert() -> None:
    lone = MoESpec(count=1, top_k=1, width=16, shared_width=8, shared_gate=True, latent=4)
    parts = {weight.name: weight.part for weight in lone.list_weights(8)}
    assert parts == {
        "router": "router",
        "shared_gate": "shared", "shared_up": "shared", "shared_down": "shared",
        "shared_gate_scalar": "shared", "latent_down": "shared", "latent_up": "shared",
        "expert_gate": "expert", "expert_up": "expert", "expert_down": "expert",
    }  # fmt: skip
    block = BlockSpec(name="moe", mlp=lone)
    counted = count_parameters(
        Model(name="x", hidden=8, vocab=8, blocks=(block,), pattern="moe", norm=NormSpec())
    )
    assert counted.experts == 3 * 4 * 16
    assert counted.router == 8
    assert counted.mlp == 3 * 8 * 8 + 8 + 2 * 8 * 4


@pytest.mark.parametrize("name", list_models())
def test_mixers_say_which_weights_are_theirs(name: str) -> None:
    described = get_model(name)
    for block in described.blocks:
        mixer = block.mixer.list_weights(described.hidden) if block.mixer is not None else ()
        assert {weight.part for weight in mixer} <= {"mixer"}
        assert sum(w.part == "mixer" for w in block.list_weights(described.hidden)) == len(mixer)


def test_expert_parallelism_spreads_experts_only() -> None:
    weights = {w.name: w for w in MoESpec(count=8, top_k=2, width=16).list_weights(4)}
    assert weights["expert_up"].count_rank_parameters(tp=2, ep=4) == 2 * 4 * 8
    assert weights["router"].count_rank_parameters(tp=2, ep=4) == 4 * 8
