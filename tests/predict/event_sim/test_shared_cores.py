"""Ranks without a core each get equal parts of one; who waits leaves his part to the others."""

import pytest
from msgspec.structs import replace

from meshwright.predict.event_sim.shared_cores import CoreAssignment, assign_cores
from meshwright.predict.event_sim.step_simulation import SimulatedStep, simulate_step
from meshwright.predict.step.measured_costs import MeasuredCosts, MeasuredLayer, SizeCurve
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.spec.workload import TrainingWorkload

MODEL = build_decoder_model("tiny", layers=4, hidden=8, heads=2, ffn=16, vocab=32)
OWN = MeasuredCosts(
    blocks={"dense": MeasuredLayer(forward_s=1.0, backward_s=2.0, dgrad_s=1.0, wgrad_s=1.0)},
    collectives={f"all_reduce {ranks}": SizeCurve(((1.0, 0.0),)) for ranks in (2, 4)},
)
FORWARD = 0
_PAIR = catalog.get_cluster("cpu-host")
HOST = replace(_PAIR, gpus_per_node=4, scale_up=replace(_PAIR.scale_up, gpus=4))


def simulated(
    layout: Layout, cores: int, sequences: int, measured: MeasuredCosts = OWN
) -> SimulatedStep:
    step = TrainingWorkload(sequence_length=16, global_batch=sequences, tokens=16 * sequences)
    work = JobSpec(model=MODEL, cluster=HOST, layout=layout, workload=step)
    shared = replace(measured, shared_cores=cores)
    return simulate_step(TrainingRun(work, framework=MESHWRIGHT, measured=shared))


def test_neighbours_sit_on_different_cores() -> None:
    # Ranks 0 and 1 are the replicas of the first stage, 2 and 3 those of the second.
    assert assign_cores(Layout(pp=2, dp=2), 2) == [CoreAssignment(0, 1), CoreAssignment(0, 1)]
    assert assign_cores(Layout(pp=4), 2) == [
        CoreAssignment(0, 1),
        CoreAssignment(1, 1),
        CoreAssignment(0, 1),
        CoreAssignment(1, 1),
    ]
    assert assign_cores(Layout(dp=4), 2) == [CoreAssignment(0, 2)]


def test_one_microbatch_takes_as_long_as_with_cores_of_their_own() -> None:
    # One stage works while the other waits, so nobody has to share.
    assert simulated(Layout(pp=2), 1, 1).step_s == simulated(Layout(pp=2), 0, 1).step_s == 12.0


def test_two_stages_on_one_core_leave_no_bubble_and_take_the_sum_of_their_work() -> None:
    step = simulated(Layout(pp=2), 1, 4)
    assert step.step_s == pytest.approx(4 * 4 * 3.0)  # with a core each: 30


def test_a_pass_takes_twice_as_long_while_another_rank_computes() -> None:
    step = simulated(Layout(pp=2), 1, 2)
    first = step.actions.rank == 0
    lengths = (step.actions.end_s - step.actions.start_s)[first & (step.actions.op == FORWARD)]
    # The first forward is alone on the core. The second shares it with the other stage's.
    assert lengths.tolist() == pytest.approx([2.0, 4.0])


def test_replicas_beside_each_other_slow_each_other_down_all_the_time() -> None:
    assert simulated(Layout(dp=4), 2, 4).step_s == pytest.approx(2 * 12.0)


def test_four_ranks_of_a_hybrid_layout_on_two_cores_take_what_two_whole_replicas_take() -> None:
    hybrid = simulated(Layout(pp=2, dp=2), 2, 8)
    assert hybrid.step_s == pytest.approx(simulated(Layout(dp=2), 0, 8).step_s)


def test_work_is_never_done_sooner_than_cores_allow() -> None:
    step = simulated(Layout(pp=4), 2, 4)
    work = 4 * 4 * 3.0
    assert work / 2 <= step.step_s <= work


def test_a_rank_that_waits_for_what_it_sent_begins_later() -> None:
    sent = replace(OWN, stage_transfer=SizeCurve(((512.0, 0.5),)))
    waits = simulated(Layout(pp=2, overlap_pp=False), 1, 4, sent).step_s
    assert waits >= simulated(Layout(pp=2), 1, 4, sent).step_s


def test_the_exchange_of_a_stage_that_is_done_slows_down_the_passes_of_another() -> None:
    # Two turns of an exchange of all at once: each rank needs 3 of a core.
    costly = replace(OWN, collectives={"all_reduce 2": SizeCurve(((1.0, 6.0), (1e9, 6.0)))})
    step = simulated(Layout(pp=2, dp=2), 2, 2, costly)
    last, other = (step.actions.end_s[step.actions.rank == rank].max() for rank in (0, 1))
    # The second stage is done first; the last backward of the first, 4 long, has it beside.
    assert step.step_s == pytest.approx(12.0 + 2 * 3.0)
    assert last == pytest.approx(12.0 + 3.0)
    assert other == pytest.approx(8.0)
