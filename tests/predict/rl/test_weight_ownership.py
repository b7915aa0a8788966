"""What ranks hold by description is what they hold in a run, as far as a plan's bytes can tell."""

import pytest

from meshwright.policy.resharding.weight_transfer import WeightTransferPlan, plan_weight_transfer
from meshwright.predict.rl.weight_ownership import (
    WeightHolders,
    list_adapter_boxes,
    list_weight_boxes,
)
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, MoESpec, build_decoder_model
from meshwright.spec.workload import LoRASpec

# Widths that layouts divide: uneven parts are cut elsewhere by a run that cuts between any numbers.
DENSE = build_decoder_model("dense", layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64)
TIED = build_decoder_model("tied", layers=4, hidden=64, heads=4, ffn=96, vocab=64, tied=True)
ROUTED = build_decoder_model(
    "experts", layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64, dense_layers=2,
    experts=MoESpec(count=4, top_k=2, width=32, shared_width=32),
)  # fmt: skip
PAIRS = [
    (DENSE, Layout(), Layout(tp=2)),
    (DENSE, Layout(tp=4), Layout(tp=2)),  # two trainers hold the same keys and values
    (DENSE, Layout(tp=2), Layout(tp=4)),
    (DENSE, Layout(tp=2, pp=2, dp=2), Layout()),
    (DENSE, Layout(dp=2, zero=3), Layout(tp=2)),
    (TIED, Layout(pp=4), Layout(tp=2)),
    (ROUTED, Layout(dp=4, ep=4), Layout(tp=2)),
    (ROUTED, Layout(tp=2, dp=2, ep=2), Layout(dp=4, ep=4)),
]


def described(
    model: Model, source: Layout, target: Layout, *, engines: int = 2, fp8: bool = False
) -> WeightTransferPlan:
    linear = ("bf16", "fp8-rows") if fp8 else ("bf16",)
    trainers, ranks = list_weight_boxes(
        model,
        WeightHolders(source, ("bf16",), ("bf16",)),
        WeightHolders(target, linear, ("bf16",)),
        engines=engines,
    )
    return plan_weight_transfer(trainers, ranks * engines)


@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_a_plan_moves_the_bytes_that_a_run_moves(
    model: Model, source: Layout, target: Layout
) -> None:
    pytest.importorskip("torch", reason="asks the tensors of a run")
    from meshwright.run.posttrain.weight_sync.weight_tensors import describe_shards
    from tests.run.posttrain.weight_sync.virtual_ranks import served, sources

    plan = described(model, source, target)
    trainers = [describe_shards(each) for each in sources(model, source)]
    ranks = [describe_shards(each) for each in served(model, target, seed=1, fp8=False)]
    real = plan_weight_transfer(trainers, ranks * 2)
    assert plan.received_bytes() == real.received_bytes()
    assert plan.moved_bytes == real.moved_bytes
    # Who of several sends what may differ, as pieces are larger; nobody has far more to do.
    assert max(plan.sent_bytes()) == pytest.approx(max(real.sent_bytes()), rel=0.1)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Layout(), Layout()), (Layout(pp=2, dp=2), Layout(tp=2)), (Layout(tp=2, zero=3), Layout())],
)
def test_versions_of_an_adapter_are_its_numbers_in_fp32(source: Layout, target: Layout) -> None:
    pytest.importorskip("torch", reason="asks the adapter of a run")
    from meshwright.run.nn.decoder_builder import build_decoder
    from meshwright.run.posttrain.lora import build_lora_config
    from meshwright.run.posttrain.lora.decoder_adapter import (
        compute_adapter_shapes,
        find_adaptable_modules,
    )

    for adapter in (LoRASpec(rank=4), LoRASpec(rank=2, targets=("qkv", "down"))):
        trainers, ranks = list_adapter_boxes(DENSE, adapter, source, target)
        plan = plan_weight_transfer(trainers, ranks * 2)
        decoder = build_decoder(DENSE, device="meta")
        shapes = compute_adapter_shapes(
            find_adaptable_modules(decoder), build_lora_config(decoder, adapter)
        ).values()
        assert sum(plan.received_bytes()) == 2 * 4 * sum(a * b for a, b in shapes)


def test_linear_layers_travel_in_fp8_where_rows_are_whole() -> None:
    wide, narrow = (described(DENSE, Layout(), Layout(), fp8=fp8) for fp8 in (False, True))
    assert 0.5 * wide.moved_bytes < narrow.moved_bytes < 0.65 * wide.moved_bytes
    # Columns of `o` and `down` are cut by two trainers: their rows are whole on neither.
    cut = described(DENSE, Layout(tp=2), Layout(), fp8=True)
    assert narrow.moved_bytes < cut.moved_bytes < wide.moved_bytes


def test_large_plans_take_layers_together_and_move_as_much() -> None:
    deep = build_decoder_model("deep", layers=96, hidden=64, heads=4, ffn=96, vocab=64)
    few, many = (described(deep, Layout(pp=2, dp=2), Layout(tp=2), engines=n) for n in (1, 64))
    assert len(many.slices) < 20_000
    assert many.moved_bytes == 64 * few.moved_bytes
