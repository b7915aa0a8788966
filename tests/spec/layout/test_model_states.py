"""Bytes of states agree with the arithmetic that people do by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.layout import Layout, count_rank_parameters, stage_state_bytes
from meshwright.spec.model import Model, MoESpec, build_decoder_model, build_gpt, count_parameters

DENSE = build_decoder_model("d", layers=8, hidden=64, heads=8, kv_heads=4, ffn=256, vocab=512)
SPARSE = build_decoder_model(
    "s", layers=4, hidden=64, heads=8, ffn=256, vocab=512, dense_layers=1,
    experts=MoESpec(count=8, top_k=2, width=64, shared_width=128),
)  # fmt: skip
TIED = build_gpt("t", layers=4, hidden=64, heads=4, vocab=512)


@pytest.mark.parametrize("model", [DENSE, SPARSE, TIED], ids=lambda model: model.name)
def test_one_gpu_holds_the_whole_model(model: Model) -> None:
    (held,) = count_rank_parameters(Layout(), model)
    assert held.total == count_parameters(model).total


def test_mixed_precision_adam_takes_eighteen_bytes() -> None:
    (states,) = stage_state_bytes(Layout(), DENSE)
    assert states.total == 18 * count_parameters(DENSE).total


def test_the_distributed_optimizer_takes_six_and_a_share_of_twelve() -> None:
    (states,) = stage_state_bytes(Layout(dp=4, zero=1), DENSE)
    assert states.total == (6 + 12 / 4) * count_parameters(DENSE).total


def test_full_sharding_divides_everything() -> None:
    (states,) = stage_state_bytes(Layout(dp=8, zero=3), DENSE)
    assert states.total == 18 / 8 * count_parameters(DENSE).total


def test_hybrid_sharding_divides_by_the_shard_group_only() -> None:
    (states,) = stage_state_bytes(Layout(dp=8, shard=2, zero=3), DENSE)
    assert states.total == 18 / 2 * count_parameters(DENSE).total


def test_fp32_training_keeps_no_second_copy_of_the_weights() -> None:
    (states,) = stage_state_bytes(Layout(precision="fp32"), DENSE)
    assert states.total == 16 * count_parameters(DENSE).total


def test_a_tied_head_is_copied_only_when_the_ends_lie_apart() -> None:
    together = sum(held.total for held in count_rank_parameters(Layout(), TIED))
    apart = sum(held.total for held in count_rank_parameters(Layout(pp=2), TIED))
    assert apart - together == TIED.vocab * TIED.hidden


def test_key_value_heads_that_run_out_are_duplicated() -> None:
    (half,) = count_rank_parameters(Layout(tp=4), DENSE)
    (fine,) = count_rank_parameters(Layout(tp=8), DENSE)
    # Four key-value heads cannot be cut in eight: those two matrices stay a quarter each.
    kv = 2 * 64 * 4 * 8
    assert half.matrices / 2 + 8 * kv / 8 == fine.matrices


def test_experts_are_spread_over_expert_parallel_ranks() -> None:
    (alone,) = count_rank_parameters(Layout(), SPARSE)
    (spread,) = count_rank_parameters(Layout(dp=4, ep=4), SPARSE)
    assert spread.experts * 4 == alone.experts
    assert spread.matrices == alone.matrices


@given(pp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]))
def test_stages_and_tensor_ranks_together_hold_the_model(pp: int, tp: int) -> None:
    held = sum(tp * stage.matrices for stage in count_rank_parameters(Layout(pp=pp, tp=tp), DENSE))
    (whole,) = count_rank_parameters(Layout(), DENSE)
    assert held == whole.matrices
