"""A simulated step drawn as a timeline reads like a profile and accounts for every moment."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from meshwright.predict.event_sim.action_costs import build_run_pass_table
from meshwright.predict.event_sim.pass_layers import LayerSegments
from meshwright.predict.event_sim.pass_spans import COMPUTE, build_pass_spans, merge_layers
from meshwright.predict.event_sim.step_simulation import SimulatedStep, simulate_step
from meshwright.predict.step.pass_time import PassBreakdown
from meshwright.predict.step.pipeline_bubble import skips_optimizer_barrier
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.spec import catalog
from meshwright.spec.layout import ScheduleKind, count_rank_parameters, list_chunks
from meshwright.timeline import SpanKind, Timeline, write_perfetto
from meshwright.timeline.perfetto.track_rows import is_nested, sort_for_drawing
from tests.predict.runs import KINDS, LLAMA, MIXTRAL, run_of


def lanes_nest(timeline: Timeline) -> bool:
    lane, ranks = timeline.string_column("lane"), timeline.column("rank")
    start, length = timeline.column("start_ns"), timeline.column("duration_ns")
    for rank in timeline.ranks:
        for code in np.unique(lane.codes[ranks == rank]):
            some = (ranks == rank) & (lane.codes == code)
            order = sort_for_drawing(lane.codes[some], start[some], length[some])
            first = start[some][order]
            last = first + length[some][order]
            if not is_nested(first, last) or np.any(first[1:] < last[:-1]):
                return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more", [{"zero": 1}, {"zero": 2}, {"zero": 1, "offload": ("activations", "optimizer")}]
)
def test_spans_of_a_lane_do_not_overlap(kind: ScheduleKind, more: dict[str, Any]) -> None:
    run = run_of(kind, tp=2, sequence_parallel=True, dp=2, batch=24, recompute="full", **more)
    assert lanes_nest(simulate_step(run, jitter_cv=0.1).build_timeline())


@pytest.mark.parametrize("kind", KINDS)
def test_every_send_has_one_receive(kind: ScheduleKind) -> None:
    run = run_of(kind, batch=12)
    timeline = simulate_step(run).build_timeline()
    out, into = timeline.column("flow_out"), timeline.column("flow_in")
    out, into = out[out >= 0], into[into >= 0]
    assert np.array_equal(np.sort(out), np.sort(into))
    assert len(np.unique(out)) == len(out)
    routes = simulate_step(run).schedule.route_by_microbatch()
    moves = sum(sum(a != b for a, b in pairwise(r)) for r in routes)
    assert len(out) == 2 * moves


def ends_of(step: SimulatedStep) -> list[float]:
    parts = step.update_start_s, step.offload_s, step.optimizer_s
    return [sum(one) for one in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeline_lasts_as_long_as_the_step(kind: ScheduleKind) -> None:
    step = simulate_step(run_of(kind, dp=2, zero=1, batch=16))
    first, last = step.build_timeline().extent_ns
    assert first == 0
    assert last == pytest.approx(max(ends_of(step)) * 1e9, abs=1)
    if not skips_optimizer_barrier(step.run):
        assert max(ends_of(step)) == step.step_s


def test_ranks_are_the_first_gpus_of_their_stages() -> None:
    timeline = simulate_step(run_of(tp=2, dp=4, batch=16)).build_timeline()
    assert timeline.ranks == (0, 8, 16, 24)
    assert timeline.source == "simulated"


def rows_of(timeline: Timeline, **wanted: Any) -> list[dict[str, Any]]:
    return [
        row
        for row in timeline.spans.to_pylist()
        if all(row[name] == value for name, value in wanted.items())
    ]


def test_spans_say_what_they_are() -> None:
    run = run_of("zb-v", tp=2, sequence_parallel=True, dp=2, zero=1, batch=16, recompute="full")
    timeline = simulate_step(run).build_timeline()
    names = set(timeline.string_column("name").values)
    assert names >= {"attention forward", "mlp backward-input", "attention backward-weight"}
    assert names >= {"recompute", "head forward", "embedding backward-input", "optimizer"}
    forward = rows_of(timeline, process="host", name="forward", stage=3)[0]
    assert forward["extra"] == '{"chunk":3,"layers":[18,24]}'
    assert (forward["microbatch"], forward["layer"], forward["kind"]) == (0, 18, "host")
    sent = rows_of(timeline, name="send activations")[0]
    assert (sent["bytes"], sent["group"]) == (2 * 4096 * 4096 // 2, "pp")
    gather = rows_of(timeline, name="all_gather", group="tp")[0]
    assert (gather["bytes"], gather["collective"]) == (2 * 4096 * 4096, "all_gather")
    reduction = rows_of(timeline, name="reduce_scatter", group="dp")[0]
    assert reduction["layer"] >= 0


@pytest.mark.parametrize(("zero", "number"), [(1, 4 + 2), (3, 4)])
def test_the_exchange_of_adapters_is_drawn_with_their_bytes(zero: int, number: int) -> None:
    run = run_of(model=LLAMA, pp=1, dp=8, zero=zero, batch=8, frozen=True)
    (held,), (adapters,) = count_rank_parameters(run.layout, LLAMA), count_trained_parameters(run)
    drawn = sum(row["bytes"] for row in rows_of(simulate_step(run).build_timeline(), group="dp"))
    gathered = 2 * 2 * held.total if zero == 3 else 0  # for both passes
    assert drawn == pytest.approx(gathered + number * adapters.total, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("zero", "offload"), [(1, ()), (2, ()), (3, ()), (2, ("activations", "gradients", "optimizer"))]
)
def test_the_compute_lane_accounts_for_every_moment(
    kind: ScheduleKind, zero: int, offload: tuple[str, ...]
) -> None:
    run = run_of(
        kind, model=MIXTRAL, tp=2, expert_tp=1, ep=4, sequence_parallel=True, dp=4, zero=zero,
        batch=32, recompute="full", offload=offload,
    )  # fmt: skip
    step = simulate_step(run, jitter_cv=0.1)
    timeline = step.build_timeline()
    for rank, end_s in zip(timeline.ranks, ends_of(step), strict=True):
        lane = sorted(
            (row["start_ns"], row["start_ns"] + row["duration_ns"])
            for row in rows_of(timeline, rank=rank, lane=COMPUTE)
        )
        assert lane[0][0] == 0
        assert lane[-1][1] == round((end_s if skips_optimizer_barrier(run) else step.step_s) * 1e9)
        assert all(abs(one[1] - other[0]) <= 1 for one, other in pairwise(lane))


def busy_ns(timeline: Timeline, **wanted: Any) -> int:
    return sum(row["duration_ns"] for row in rows_of(timeline, **wanted))


def test_collectives_that_hide_run_beside_compute() -> None:
    run = run_of(model=LLAMA, tp=4, sequence_parallel=True, overlap_tp=True, batch=8)
    timeline = simulate_step(run).build_timeline()
    waits = busy_ns(timeline, name="wait for tp", lane=COMPUTE)
    whole = busy_ns(timeline, lane="comm tp")
    assert 0 < waits < 0.8 * whole


def test_forward_waits_for_tensor_parallel_collectives_that_cannot_hide() -> None:
    run = run_of("gpipe", model=LLAMA, tp=4, sequence_parallel=True, batch=8)
    timeline = simulate_step(run).build_timeline()
    # Layers 1 to 7 of the first stage in the forward of one microbatch.
    rows = [row for row in rows_of(timeline, rank=0, microbatch=0) if 1 <= (row["layer"] or 0) <= 7]
    last = max(row["start_ns"] for row in rows if row["name"] == "attention forward")
    rows = [row for row in rows if row["start_ns"] <= last and row["process"] == "gpu"]
    waits = sum(row["duration_ns"] for row in rows if row["kind"] == SpanKind.WAIT)
    collectives = sum(row["duration_ns"] for row in rows if row["group"] == "tp")
    assert waits == pytest.approx(collectives, rel=0.01)


def test_every_layer_shows_its_collectives() -> None:
    run = run_of(model=MIXTRAL, tp=2, sequence_parallel=True, expert_tp=1, ep=8, dp=4, batch=16)
    timeline = simulate_step(run).build_timeline()
    own = rows_of(timeline, rank=0, microbatch=0, layer=3)
    exchanges = [row for row in own if row["group"] == "ep"]
    # To the experts and back, forward and backward.
    assert [row["name"] for row in exchanges] == ["all_to_all"] * 4
    # A gather and a scatter around attention forward; backward gathers twice.
    assert len([row for row in own if row["group"] == "tp"]) == 5


def test_rings_show_what_attention_hides() -> None:
    run = run_of(model=LLAMA, cp=4, batch=8)
    timeline = simulate_step(run).build_timeline()
    ring = busy_ns(timeline, lane="comm cp")
    assert ring > busy_ns(timeline, name="wait for cp")
    assert {row["collective"] for row in rows_of(timeline, group="cp")} == {"send_recv"}


def test_sharded_parameters_travel_with_every_layer() -> None:
    run = run_of(pp=2, model=LLAMA, dp=8, zero=3, batch=16)
    timeline = simulate_step(run).build_timeline()
    own = rows_of(timeline, rank=0, microbatch=0, layer=3, group="dp")
    assert [row["name"] for row in own] == ["all_gather", "all_gather", "reduce_scatter"]


def test_scattered_gradients_travel_with_every_layer_but_in_the_last_backward() -> None:
    run = run_of(pp=2, model=LLAMA, dp=8, zero=2, batch=32)
    timeline = simulate_step(run).build_timeline()
    for microbatch in range(4):
        own = rows_of(timeline, rank=0, microbatch=microbatch, layer=3, group="dp")
        assert [row["name"] for row in own] == ["reduce_scatter"] * (microbatch < 3)
    last = rows_of(timeline, rank=0, layer=3, lane="comm dp, once a step")
    assert sorted(row["name"] for row in last) == ["all_gather", "reduce_scatter"]


def test_copies_to_and_from_the_host_are_drawn_with_what_waits_for_them() -> None:
    run = run_of(model=LLAMA, dp=2, zero=1, batch=16, offload=("activations", "optimizer"))
    step = simulate_step(run)
    timeline = step.build_timeline()
    copies = rows_of(timeline, rank=0, lane="host memory", microbatch=0, layer=3)
    assert [row["name"] for row in copies] == ["copy to host", "copy from host"]
    assert {row["kind"] for row in copies} == {SpanKind.MEMORY_COPY}
    waits = busy_ns(timeline, rank=0, name="wait for host memory") / 1e9
    exposed = step.actions.breakdown_s[
        step.actions.rank == 0, PassBreakdown._fields.index("offload")
    ].sum()
    assert exposed > 0
    assert waits == pytest.approx(exposed + step.offload_s[0], rel=1e-4)
    assert rows_of(timeline, name="wait for the optimizer on the host")


def test_gradients_are_reduced_while_the_last_backward_runs() -> None:
    timeline = simulate_step(run_of(model=LLAMA, dp=4, zero=1, batch=16)).build_timeline()
    last = max(row["start_ns"] for row in rows_of(timeline, rank=0, process="host"))
    starts = [row["start_ns"] for row in rows_of(timeline, rank=0, name="reduce_scatter")]
    ends = max(
        row["start_ns"] + row["duration_ns"] for row in rows_of(timeline, rank=0, process="host")
    )
    assert len(starts) == 8
    assert min(starts) > last
    assert sum(start < ends for start in starts) == 7


def test_what_is_in_flight_is_counted() -> None:
    timeline = simulate_step(run_of(batch=16)).build_timeline()
    rank = timeline.counters.column("rank").to_numpy()
    value = timeline.counters.column("value").to_numpy()
    assert [value[rank == one].max() for one in timeline.ranks] == [4, 3, 2, 1]
    assert all(value[rank == one][-1] == 0 for one in timeline.ranks)


@pytest.mark.parametrize("op", ["F", "B", "I", "W"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_pass_in_layers_is_as_long_as_predicted(op: str, at: int) -> None:
    run = run_of(
        model=catalog.get_model("deepseek-v3"),
        tp=2,
        sequence_parallel=True,
        expert_tp=1,
        ep=8,
        dp=8,
        zero=3,
        batch=64,
        recompute="full",
    )
    pieces = build_run_pass_table(run)[op, at]
    chunk = list_chunks(run.layout, run.model.layers)[at]
    in_full = LayerSegments(run).list_segments(op, chunk, pieces)
    for passes in (in_full, merge_layers(op, in_full)):
        lane = [beat for beat in build_pass_spans([passes]) if beat.lane == COMPUTE]
        assert max(beat.end for beat in lane) == pytest.approx(pieces.total)
        computes = sum(beat.end - beat.start for beat in lane if beat.kind == SpanKind.COMPUTE)
        assert computes == pytest.approx(pieces.compute + pieces.recompute)


def test_passes_too_many_to_draw_in_full_become_one_kernel_each() -> None:
    step = simulate_step(run_of(model=LLAMA, tp=4, sequence_parallel=True, batch=8))
    in_full, short = step.build_timeline(), step.build_timeline(most_layer_spans=100)
    kernels = rows_of(short, stage=1, lane=COMPUTE, kind="compute", microbatch=5)
    assert [row["name"] for row in kernels] == ["forward", "backward"]
    for wanted in ({"lane": COMPUTE, "kind": "compute"}, {"lane": "comm tp"}):
        assert busy_ns(short, **wanted) == pytest.approx(busy_ns(in_full, **wanted), rel=1e-4)


def test_a_simulated_step_opens_in_perfetto(tmp_path: Any) -> None:
    path = tmp_path / "step.json"
    write_perfetto(simulate_step(run_of("dualpipe")).build_timeline(), path)
    assert path.stat().st_size > 1000
