"""The quick pipeline time meets the event simulation for every schedule, split and sharding."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.step.pass_time import NO_WAITS
from meshwright.predict.step.pipeline_bubble import predict_bubble, sum_rank_times
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.step.step_prediction import predict_step
from meshwright.spec import catalog
from meshwright.spec.layout import ScheduleKind
from tests.predict.runs import CHUNKED, KINDS, LLAMA, MIXTRAL, run_of

# Layers of every chunk by ranks: even, and uneven in one place or in many.
SPLITS: dict[tuple[int, int], tuple[tuple[int, ...] | None, ...]] = {
    (2, 1): (None, (14, 18)),
    (4, 1): (None, (5, 9, 9, 9), (4, 8, 12, 8), (10, 8, 8, 6)),
    (8, 1): (None, (3, 4, 4, 4, 5, 4, 4, 4)),
    (2, 2): (None, (7, 9, 9, 7)),
    (4, 2): (None, (3, 4, 4, 4, 5, 4, 4, 4), (2, 4, 6, 4, 4, 6, 4, 2)),
    (8, 2): (None, (1, 2, 2, 2, 2, 3, *[2] * 10)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_the_closed_form_is_within_two_percent_of_the_events(
    kind: ScheduleKind, zero: int, frozen: bool, pp: int
) -> None:
    for split in SPLITS[pp, 2 if kind in CHUNKED else 1]:
        for microbatches in (pp // 2, pp, 2 * pp + 1, 8 * pp):
            run = run_of(
                kind, model=LLAMA, pp=pp, tp=2, sequence_parallel=True, dp=4, zero=zero,
                frozen=frozen, stage_layers=split, batch=4 * microbatches,
            )  # fmt: skip
            gap = predict_step(run).step_s / simulate_step(run).step_s - 1
            assert abs(gap) < 0.02, (split, microbatches, gap)


OFFLOADS: tuple[tuple[str, ...], ...] = (
    ("activations",),
    ("gradients",),
    ("optimizer",),
    ("parameters",),
    ("activations", "gradients", "optimizer", "parameters"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("zero", "offload"), [(2, ()), *((z, o) for z in (1, 3) for o in OFFLOADS)]
)
def test_it_is_within_one_percent_for_host_memory_and_scattered_gradients(
    kind: ScheduleKind, zero: int, offload: tuple[str, ...]
) -> None:
    for split in SPLITS[4, 2 if kind in CHUNKED else 1]:
        for microbatches in (2, 4, 9, 32):
            run = run_of(
                kind, model=LLAMA, tp=2, sequence_parallel=True, dp=4, zero=zero,
                offload=offload, stage_layers=split, batch=4 * microbatches,
            )  # fmt: skip
            gap = predict_step(run).step_s / simulate_step(run).step_s - 1
            assert abs(gap) < 0.01, (split, microbatches, gap)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 70),
    st.sampled_from([1, 8]),
    st.fixed_dictionaries(
        {
            "overlap_pp": st.booleans(),
            "overlap_ep": st.booleans(),
            "overlap_gradients": st.booleans(),
            "overlap_parameters": st.booleans(),
            "zero": st.integers(0, 3),
            "dp": st.sampled_from([8, 64]),
            "recompute": st.sampled_from(["none", "full"]),
            "offload": st.sampled_from([(), *OFFLOADS]),
        }
    ),
)
def test_it_is_so_for_experts_and_every_overlap(
    kind: ScheduleKind, pp: int, microbatches: int, ep: int, more: dict[str, Any]
) -> None:
    if pp == 1 and kind in (*CHUNKED, "dualpipe"):
        kind = "1f1b"
    run = run_of(kind, model=MIXTRAL, pp=pp, ep=ep, batch=more["dp"] * microbatches, **more)
    assert predict_step(run).step_s == pytest.approx(simulate_step(run).step_s, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_few_microbatches_are_worked_out_exactly(kind: ScheduleKind) -> None:
    run = run_of(kind, model=LLAMA, batch=12)
    assert predict_step(run).step_s == pytest.approx(simulate_step(run).step_s, rel=1e-4)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 49), (3, 62), (4, 37), (5, 164)])
def test_groups_that_do_not_divide_the_microbatches_are_kept(pp: int, microbatches: int) -> None:
    run = run_of("interleaved", model=LLAMA, pp=pp, batch=microbatches)
    assert predict_step(run).step_s == pytest.approx(simulate_step(run).step_s, rel=0.01)


def test_a_long_step_grows_by_its_slowest_stage() -> None:
    long, longer = (run_of(model=LLAMA, batch=batch) for batch in (400, 401))
    grows = predict_step(longer).step_s - predict_step(long).step_s
    assert grows == pytest.approx(
        max(one.total_s for one in sum_rank_times(long, chunk_times(long)))
    )


def test_transfers_are_told_apart_from_the_bubble() -> None:
    fast = run_of(model=LLAMA, tp=8, batch=8)
    slow = run_of(model=LLAMA, tp=8, batch=8)
    slow.cluster = catalog.get_cluster("jean-zay-a100").with_gpus(32)
    quick, late = predict_step(fast), predict_step(slow)
    assert late.pp_s > 3 * quick.pp_s
    # The slower chip has longer passes, and the bubble follows those alone.
    assert late.bubble_s / late.compute_s == pytest.approx(
        quick.bubble_s / quick.compute_s, rel=0.2
    )


def test_overlapped_passes_hide_the_exchange_of_experts() -> None:
    # Two microbatches side by side, where ranks hold one chunk each of the same model.
    apart, beside = (
        predict_step(run_of(kind, model=MIXTRAL, pp=4, ep=8, dp=8, batch=8 * 32))
        for kind in ("1f1b", "dualpipe")
    )
    assert 0 < beside.ep_s < 0.6 * apart.ep_s


def test_ranks_hold_what_their_chunks_take() -> None:
    run = run_of("interleaved", model=LLAMA, virtual_stages=4)
    times = chunk_times(run)
    for rank, held in enumerate(sum_rank_times(run, times)):
        assert held.total_s == pytest.approx(
            sum(one.total.total_s for one in times[rank :: run.layout.pp])
        )


def test_edges_say_when_ranks_begin_and_end() -> None:
    run = run_of(model=LLAMA, batch=64)
    step = simulate_step(run)
    found = predict_bubble(run, chunk_times(run), (NO_WAITS,) * 4)
    assert found.end_s == pytest.approx(max(step.passes_end_s))
    for rank, (edge,) in enumerate(found.chunk_edges):
        own = step.actions.rank == rank
        assert edge.first_forward_start_s == pytest.approx(step.actions.start_s[own][0])
        assert found.end_s + edge.last_backward_end_s == pytest.approx(step.passes_end_s[rank])
        assert found.end_s + edge.last_backward_start_s == pytest.approx(
            step.actions.start_s[own][-1]
        )


def test_blocking_transfers_cost_the_sender() -> None:
    free = run_of(model=LLAMA, batch=16)
    bound = run_of(model=LLAMA, batch=16, overlap_pp=False)
    assert predict_step(bound).step_s > predict_step(free).step_s
