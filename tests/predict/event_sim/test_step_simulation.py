"""The event simulation keeps the schedule's order, conserves work and waits where it must."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.pipeline import add_transfers, build_schedule, count_in_flight
from meshwright.predict.event_sim.step_simulation import (
    PASSES,
    SimulatedActions,
    SimulatedStep,
    simulate_step,
)
from meshwright.predict.step.pipeline_bubble import sum_rank_times
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import ScheduleKind
from tests.predict.runs import KINDS, run_of


def hop_s(step: SimulatedStep) -> float:
    return float(step.transfers.end_s[0] - step.transfers.start_s[0])


def ends_of(actions: SimulatedActions) -> dict[tuple[str, int, int], tuple[float, float]]:
    rows = zip(
        actions.op, actions.chunk, actions.microbatch, actions.start_s, actions.end_s, strict=True
    )
    return {(PASSES[op], int(c), int(m)): (float(s), float(e)) for op, c, m, s, e in rows}


schedules = st.builds(
    run_of,
    st.sampled_from(KINDS),
    batch=st.integers(1, 20),
    pp=st.sampled_from([2, 4, 6]),
    overlap_pp=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(schedules, st.sampled_from([0.0, 0.3]))
def test_no_action_starts_before_what_it_needs(run: TrainingRun, jitter_cv: float) -> None:
    step = simulate_step(run, jitter_cv=jitter_cv)
    found, hop = ends_of(step.actions), hop_s(step)
    last = step.schedule.chunks - 1
    for (op, chunk, microbatch), (start, _) in found.items():
        source = None
        if op == "F" and chunk:
            source = "F", chunk - 1
        elif op in ("B", "I") and chunk < last:
            source = "B" if ("B", chunk + 1, microbatch) in found else "I", chunk + 1
        if source is not None:
            ranks = step.schedule.route_of(microbatch)
            there = found[(*source, microbatch)][1]
            assert start >= there + (hop if ranks[source[1]] != ranks[chunk] else 0) - 1e-12
        if op in ("B", "I"):
            assert start >= found["F", chunk, microbatch][1] - 1e-12
        if op == "W":
            assert start >= found["I", chunk, microbatch][1] - 1e-12


@settings(max_examples=40, deadline=None)
@given(schedules)
def test_every_rank_runs_its_actions_one_after_the_other(run: TrainingRun) -> None:
    actions = simulate_step(run).actions
    own = ~actions.is_concurrent
    for rank in range(run.layout.pp):
        some = own & (actions.rank == rank)
        assert np.all(actions.start_s[some][1:] >= actions.end_s[some][:-1])


@settings(max_examples=40, deadline=None)
@given(schedules)
def test_work_is_conserved(run: TrainingRun) -> None:
    # Dense layers exchange nothing that joined passes could hide, so every order does the same.
    step = simulate_step(run)
    each = sum(one.total.total_s for one in chunk_times(run))
    assert sum(step.busy_s) == pytest.approx(run.num_microbatches * each)


@pytest.mark.parametrize("offload", [(), ("activations", "optimizer")])
def test_busy_exchange_update_and_idle_fill_the_step(offload: tuple[str, ...]) -> None:
    run = run_of(tp=2, sequence_parallel=True, dp=4, zero=1, batch=32, offload=offload)
    step = simulate_step(run)
    around = step.exposed_grad_reduce_s, step.offload_s, step.optimizer_s
    for parts in zip(step.busy_s, *around, step.idle_s, strict=True):
        assert sum(parts) == pytest.approx(step.step_s)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_1f1b_idles_one_pass_of_every_other_stage(pp: int, rounds: int) -> None:
    run = run_of(pp=pp, batch=pp * rounds)
    step = simulate_step(run)
    other = sum(one.total_s for one in sum_rank_times(run, chunk_times(run))[1:])
    # Transfers: both ways once, and in the steady state at most two per microbatch.
    hops = 2 * (pp - 1) + 2 * run.num_microbatches
    assert other <= step.idle_s[0] + 1e-4 <= other + hops * hop_s(step) + 2e-4


def test_chunks_add_up_to_stages() -> None:
    run = run_of("interleaved", virtual_stages=3, tp=2, sequence_parallel=True)
    times, stages = chunk_times(run), sum_rank_times(run, chunk_times(run))
    for rank, stage in enumerate(stages):
        held = [times[chunk].total for chunk in range(rank, 12, 4)]
        for name in stage._fields:
            assert sum(getattr(one, name) for one in held) == pytest.approx(getattr(stage, name))


UNEVEN = [(8, 16, 16, 8), (16, 8, 8, 16), (6, 14, 14, 14), (20, 10, 10, 8)]


@pytest.mark.parametrize("layers", UNEVEN)
def test_uneven_stages_under_1f1b_wait_for_the_longest_path(layers: tuple[int, ...]) -> None:
    run = run_of(stage_layers=layers, batch=16, tp=4, sequence_parallel=True)
    stages, paths = sum_rank_times(run, chunk_times(run)), []
    for rank, stage in enumerate(stages):
        # A stage stands still until the first microbatch is back from those behind it, less what
        # it warms up meanwhile, and again at the end, less the backwards it still has.
        behind = sum(one.total_s for one in stages[rank + 1 :])
        later = len(stages) - 1 - rank
        before = max(0.0, behind - later * stage.forward_s)
        after = max(0.0, behind - later * stage.backward_s)
        ahead = sum(one.total_s for one in stages[:rank])
        paths.append(ahead + run.num_microbatches * stage.total_s + before + after)
    step = simulate_step(run)
    assert max(paths) <= max(step.passes_end_s) + 1e-9
    assert max(step.passes_end_s) == pytest.approx(max(paths), rel=0.02)


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (4, 2), (4, 4), (8, 3)])
def test_interleaving_exposes_each_hop_of_one_microbatch_once(pp: int, chunks: int) -> None:
    run = run_of("interleaved", pp=pp, virtual_stages=chunks, batch=4 * pp)
    step = simulate_step(run)
    mean = sum(one.total_s for one in sum_rank_times(run, chunk_times(run))) / pp
    bubble = (pp - 1) * mean / chunks
    exposed = (step.idle_s[0] - bubble) / hop_s(step)
    assert exposed == pytest.approx(2 * (pp * chunks - 1), rel=0.1)


def test_transfers_that_block_their_sender_cost_time() -> None:
    assert simulate_step(run_of(overlap_pp=False)).step_s > simulate_step(run_of()).step_s


def test_cost_does_not_depend_on_replicas() -> None:
    few, many = (simulate_step(run_of(dp=dp, batch=8 * dp)) for dp in (1, 512))
    assert len(few.actions.rank) == len(many.actions.rank)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 3), st.floats(1, 3))
def test_a_straggler_slows_the_step_by_at_most_its_factor(
    kind: ScheduleKind, rank: int, factor: float
) -> None:
    run = run_of(kind)
    usual, slow = simulate_step(run), simulate_step(run, slowdown={rank: factor})
    extra = slow.step_s - usual.step_s
    assert -1e-9 <= extra <= (factor - 1) * usual.step_s + 1e-9
    # Its own work is what grows, so no more than that is lost.
    assert extra <= (factor - 1) * usual.busy_s[rank] + 1e-9


def test_the_same_seed_gives_the_same_step() -> None:
    run = run_of()
    one, same, other = (simulate_step(run, jitter_cv=0.1, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.actions.end_s, same.actions.end_s)
    assert one.step_s != other.step_s


def test_jitter_keeps_the_mean_work_and_lengthens_the_step() -> None:
    run = run_of(batch=64)
    usual = simulate_step(run)
    noisy = [simulate_step(run, jitter_cv=0.2, seed=seed) for seed in range(8)]
    assert np.mean([sum(one.busy_s) for one in noisy]) == pytest.approx(sum(usual.busy_s), rel=0.01)
    assert all(one.step_s > usual.step_s for one in noisy)


def test_bad_options_are_all_named() -> None:
    with pytest.raises(InputError) as caught:
        simulate_step(run_of(), slowdown={9: 1.5, 1: 0.0}, jitter_cv=-1)
    assert [one.where for one in caught.value.problems] == ["slowdown", "slowdown.1", "jitter_cv"]


def test_a_given_schedule_is_executed() -> None:
    run = run_of("1f1b")
    given_order = add_transfers(build_schedule("gpipe", 4, run.num_microbatches))
    usual = simulate_step(run_of("gpipe"))
    assert simulate_step(run, schedule=given_order).step_s == pytest.approx(usual.step_s)


def test_a_limit_on_what_is_in_flight_costs_time_and_is_kept() -> None:
    run = run_of(batch=16)
    shallow = build_schedule("1f1b", 4, 16, max_in_flight=2)
    step = simulate_step(run, schedule=shallow)
    assert max(count_in_flight(shallow)) == 2
    assert step.step_s > simulate_step(run).step_s
    held = step.build_timeline().counters.column("value").to_numpy()
    assert held.max() == 2


def test_a_schedule_that_cannot_finish_is_refused() -> None:
    sound = build_schedule("1f1b", 2, 2, max_in_flight=1)
    first, second = sound.actions
    stuck = msgspec.structs.replace(sound, actions=(first, (*second[2:], *second[:2])))
    with pytest.raises(InputError, match="waits for ever"):
        simulate_step(run_of(pp=2, batch=2), schedule=stuck)


def test_fully_sharded_parameters_lengthen_every_pass() -> None:
    sharded, whole = (simulate_step(run_of(dp=8, zero=zero, batch=64)) for zero in (3, 1))
    assert np.all(
        (sharded.actions.end_s - sharded.actions.start_s)
        > (whole.actions.end_s - whole.actions.start_s)
    )
    assert not sharded.buckets


@pytest.mark.parametrize("kind", KINDS)
def test_zero_2_lengthens_every_backward_but_the_last_of_each_chunk(kind: ScheduleKind) -> None:
    scattered, once = (
        simulate_step(run_of(kind, dp=8, zero=zero, batch=64)).actions for zero in (2, 1)
    )
    longer = scattered.end_s - scattered.start_s > once.end_s - once.start_s + 1e-9
    for rank, chunk in set(zip(once.rank.tolist(), once.chunk.tolist(), strict=True)):
        own = (once.rank == rank) & (once.chunk == chunk)
        backward = np.flatnonzero(own & np.isin(once.op, [PASSES.index("B"), PASSES.index("I")]))
        assert np.all(longer[backward[:-1]])
        assert not np.any(longer[own & (once.op == PASSES.index("W"))])
        if not once.is_concurrent[backward[-1]]:
            assert not longer[backward[-1]]


@pytest.mark.parametrize("kind", ["zb-h1", "zb-h2", "zb-v"])
def test_ranks_that_validate_later_take_their_own_longest_round(kind: ScheduleKind) -> None:
    step = simulate_step(run_of(kind, batch=16))
    spans = [
        step.actions.end_s[own].max() - step.actions.start_s[own].min()
        for own in (step.actions.rank == rank for rank in range(4))
    ]
    assert step.step_s == pytest.approx(max(map(sum, zip(spans, step.optimizer_s, strict=True))))
    assert step.step_s <= max(step.passes_end_s) + max(step.optimizer_s)


def test_zero_bubble_leaves_none_where_passes_are_equal() -> None:
    run = run_of("zb-h2", batch=32)
    step = simulate_step(run)
    ends = min(step.idle_s[1:3]) / step.step_s
    assert ends < 0.05
