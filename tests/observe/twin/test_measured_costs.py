"""What was timed of parts becomes one layer, its collectives at the prices of their curves."""

import pytest

pytest.importorskip("torch", reason="timed parts are torch's")

from msgspec.structs import replace

from meshwright.observe.twin.measured_costs import build_measured_costs
from meshwright.observe.twin.predicted_step import estimate_core_overlap
from meshwright.run.train.profiling.collective_timing import CollectiveTimings
from meshwright.run.train.profiling.layer_timing import (
    ModelPart,
    PartTiming,
    PassTiming,
    TimedCollective,
    make_timing_layout,
    split_model,
)
from meshwright.run.train.profiling.multi_rank_steps import RankTimings
from meshwright.spec.layout import Layout
from meshwright.spec.model import MoESpec, build_decoder_model

FLAT = ((64.0, 0.5), (1e9, 0.5))
TURN = ((64.0, 0.75), (1e9, 0.75))
EXCHANGES = CollectiveTimings(
    {"all_reduce 2": FLAT, "all_gather 2": ((64.0, 1.0), (128.0, 2.0))}, FLAT, FLAT, TURN, FLAT
)
PLAIN = make_timing_layout(Layout(precision="fp32"))


def timed(
    name: str, stage: int, layers: int, backward: float, *calls: TimedCollective
) -> PartTiming:
    part = ModelPart(name, stage, (0, layers, 8 - layers) if stage == 1 else (0, 8, 0))
    forward, inputs, weights = PassTiming(4.0, calls), PassTiming(5.0, ()), PassTiming(4.0, ())
    return PartTiming(part, forward, PassTiming(backward, ()), inputs, weights, 2.0, 100)


def rank(backward: float = 8.0, *calls: TimedCollective) -> list[PartTiming]:
    return [
        timed("embedding", 0, 0, backward),
        timed("head", 2, 0, backward),
        timed("dense", 1, 4, backward, *calls),
    ]


def test_layer_is_its_share_of_the_run_that_was_timed() -> None:
    found = build_measured_costs([PLAIN], [RankTimings([rank()], EXCHANGES)], PLAIN, cores=1)
    layer = found.blocks["dense"]
    assert (layer.forward_s, layer.backward_s, layer.dgrad_s) == (1.0, 2.0, 1.25)
    assert found.head.forward_s == 4.0
    assert found.update_s_per_parameter == pytest.approx(6.0 / 300)
    assert found.element_bytes == 4


def test_ranks_are_averaged() -> None:
    both = [RankTimings([rank(8.0)], EXCHANGES), RankTimings([rank(16.0)], EXCHANGES)]
    assert build_measured_costs([PLAIN], both, PLAIN, cores=2).blocks["dense"].backward_s == 3.0


def test_a_rank_without_another_does_not_make_messages_shorter() -> None:
    alone = RankTimings(
        [rank()], EXCHANGES._replace(message_times=(), message_cpu_times=(), send_recv_times=())
    )
    found = build_measured_costs([PLAIN], [RankTimings([rank()], EXCHANGES), alone], PLAIN, cores=2)
    assert found.stage_transfer.predict_s(1e6) == found.stage_transfer_cpu.predict_s(1e6) == 0.5


def test_collectives_are_priced_by_what_all_ranks_hold_afterwards() -> None:
    calls = [TimedCollective("tp", "all_gather", 48, 2)] * 4 + [
        TimedCollective("cp", "message", 64, 2)
    ] * 4
    found = build_measured_costs(
        [PLAIN], [RankTimings([rank(8.0, *calls)], EXCHANGES)], PLAIN, cores=1
    )
    comm = found.blocks["dense"].comm
    assert comm.tp_forward_s == pytest.approx(1.5)  # 96 bytes
    assert comm.cp_forward_s == pytest.approx(0.75)  # a message each way


def test_recompute_is_what_backward_takes_longer() -> None:
    again = replace(PLAIN, recompute="full")
    layouts, ranks = [PLAIN, again], [RankTimings([rank(8.0), rank(12.0)], EXCHANGES)]
    assert build_measured_costs(layouts, ranks, again, cores=1).blocks["dense"].recompute_s == 1.0
    assert build_measured_costs(layouts, ranks, PLAIN, cores=1).blocks["dense"].recompute_s == 0.0


def test_exchange_and_update_come_to_all_ranks_of_a_core_at_once() -> None:
    both = [RankTimings([rank()], EXCHANGES)] * 2
    alone = build_measured_costs([PLAIN], both, PLAIN, cores=2)
    shared = build_measured_costs([PLAIN], both, PLAIN, cores=1)
    assert (alone.shared_cores, shared.shared_cores) == (0, 1)
    assert shared.blocks == alone.blocks  # the simulator knows who computes beside whom
    assert shared.update_s_per_parameter == 2 * alone.update_s_per_parameter
    assert shared.collective_s("all_reduce", 2, 64) == 2 * alone.collective_s("all_reduce", 2, 64)
    assert shared.bucket_copy.predict_s(64) == 2 * alone.bucket_copy.predict_s(64)
    assert shared.fixed_step_s == 2 * alone.fixed_step_s


def test_layouts_that_differ_in_order_alone_share_their_parts() -> None:
    one = Layout(pp=2, schedule="zb-v", virtual_stages=2, precision="fp32")
    other = Layout(dp=2, zero=1, precision="fp32")
    assert make_timing_layout(one) == make_timing_layout(other) == PLAIN


def test_parts_are_the_ends_and_the_longest_run_of_every_block() -> None:
    experts = MoESpec(count=4, top_k=2, width=8)
    model = build_decoder_model(
        "mixed", layers=6, hidden=8, heads=2, ffn=16, vocab=32, experts=experts, dense_layers=1
    )
    found = {part.name: part.stage_layers for part in split_model(model)}
    assert found["dense"] == (0, 1, 5)
    assert found["moe"] == (1, 3, 2)


@pytest.mark.parametrize(("cores", "share"), [(2, 1.0), (3, 1.0), (4, 0.0)])
def test_exchange_hides_where_every_rank_has_a_second_core(cores: int, share: float) -> None:
    assert estimate_core_overlap(2, cores).comm_sm_share == share
