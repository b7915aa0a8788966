"""What was timed of parts becomes one layer, its collectives at the prices of their curves."""

import pytest

pytest.importorskip("torch", reason="timed parts are torch's")

from msgspec.structs import replace

from meshwright.observe.twin.calibration import measured_of
from meshwright.observe.twin.prediction import on_cores
from meshwright.run.train.twin.exchanges import ExchangesTimed
from meshwright.run.train.twin.pieces import (
    Call,
    Part,
    PartTimed,
    PassTimed,
    parts_of,
    piece_layout,
)
from meshwright.run.train.twin.steps import Timed
from meshwright.spec.layout import Layout
from meshwright.spec.model import Experts, decoder

FLAT = ((64.0, 0.5), (1e9, 0.5))
TURN = ((64.0, 0.75), (1e9, 0.75))
EXCHANGES = ExchangesTimed(
    {"all_reduce 2": FLAT, "all_gather 2": ((64.0, 1.0), (128.0, 2.0))}, FLAT, FLAT, TURN, FLAT
)
PLAIN = piece_layout(Layout(precision="fp32"))


def timed(name: str, stage: int, layers: int, backward: float, *calls: Call) -> PartTimed:
    part = Part(name, stage, (0, layers, 8 - layers) if stage == 1 else (0, 8, 0))
    forward, inputs, weights = PassTimed(4.0, calls), PassTimed(5.0, ()), PassTimed(4.0, ())
    return PartTimed(part, forward, PassTimed(backward, ()), inputs, weights, 2.0, 100)


def rank(backward: float = 8.0, *calls: Call) -> list[PartTimed]:
    return [
        timed("embedding", 0, 0, backward),
        timed("head", 2, 0, backward),
        timed("dense", 1, 4, backward, *calls),
    ]


def test_layer_is_its_share_of_the_run_that_was_timed() -> None:
    found = measured_of([PLAIN], [Timed([rank()], EXCHANGES)], PLAIN, cores=1)
    layer = found.blocks["dense"]
    assert (layer.forward_s, layer.backward_s, layer.inputs_s) == (1.0, 2.0, 1.25)
    assert found.head.forward_s == 4.0
    assert found.parameter_s == pytest.approx(6.0 / 300)
    assert found.number_bytes == 4


def test_ranks_are_averaged() -> None:
    both = [Timed([rank(8.0)], EXCHANGES), Timed([rank(16.0)], EXCHANGES)]
    assert measured_of([PLAIN], both, PLAIN, cores=2).blocks["dense"].backward_s == 3.0


def test_a_rank_without_another_does_not_make_messages_shorter() -> None:
    alone = Timed([rank()], EXCHANGES._replace(message=(), message_cpu=(), turn=()))
    found = measured_of([PLAIN], [Timed([rank()], EXCHANGES), alone], PLAIN, cores=2)
    assert found.message.seconds(1e6) == found.message_cpu.seconds(1e6) == 0.5


def test_collectives_are_priced_by_what_all_ranks_hold_afterwards() -> None:
    calls = [Call("tp", "all_gather", 48, 2)] * 4 + [Call("cp", "message", 64, 2)] * 4
    found = measured_of([PLAIN], [Timed([rank(8.0, *calls)], EXCHANGES)], PLAIN, cores=1)
    comm = found.blocks["dense"].comm
    assert comm.tp_forward == pytest.approx(1.5)  # 96 bytes
    assert comm.cp_forward == pytest.approx(0.75)  # a message each way


def test_recompute_is_what_backward_takes_longer() -> None:
    again = replace(PLAIN, recompute="full")
    layouts, ranks = [PLAIN, again], [Timed([rank(8.0), rank(12.0)], EXCHANGES)]
    assert measured_of(layouts, ranks, again, cores=1).blocks["dense"].recompute_s == 1.0
    assert measured_of(layouts, ranks, PLAIN, cores=1).blocks["dense"].recompute_s == 0.0


def test_exchange_and_update_come_to_all_ranks_of_a_core_at_once() -> None:
    both = [Timed([rank()], EXCHANGES)] * 2
    alone = measured_of([PLAIN], both, PLAIN, cores=2)
    shared = measured_of([PLAIN], both, PLAIN, cores=1)
    assert (alone.shared_cores, shared.shared_cores) == (0, 1)
    assert shared.blocks == alone.blocks  # the simulator knows who computes beside whom
    assert shared.parameter_s == 2 * alone.parameter_s
    assert shared.collective_s("all_reduce", 2, 64) == 2 * alone.collective_s("all_reduce", 2, 64)
    assert shared.collect.seconds(64) == 2 * alone.collect.seconds(64)
    assert shared.step_s == 2 * alone.step_s


def test_layouts_that_differ_in_order_alone_share_their_parts() -> None:
    one = Layout(pp=2, schedule="zb-v", virtual_stages=2, precision="fp32")
    other = Layout(dp=2, zero=1, precision="fp32")
    assert piece_layout(one) == piece_layout(other) == PLAIN


def test_parts_are_the_ends_and_the_longest_run_of_every_block() -> None:
    experts = Experts(count=4, top_k=2, width=8)
    model = decoder(
        "mixed", layers=6, hidden=8, heads=2, ffn=16, vocab=32, experts=experts, dense_layers=1
    )
    found = {part.name: part.stage_layers for part in parts_of(model)}
    assert found["dense"] == (0, 1, 5)
    assert found["moe"] == (1, 3, 2)


@pytest.mark.parametrize(("cores", "share"), [(2, 1.0), (3, 1.0), (4, 0.0)])
def test_exchange_hides_where_every_rank_has_a_second_core(cores: int, share: float) -> None:
    assert on_cores(2, cores).sm_share == share
