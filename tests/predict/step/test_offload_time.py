"""What is kept in host memory costs the time its bytes need, as far as passes do not hide it."""

from typing import Any

import msgspec
import pytest

from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import LinkCurve
from meshwright.predict.event_sim.noise import NO_NOISE
from meshwright.predict.event_sim.replicas import simulate_replicas
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.step.offload_time import (
    HOST_CONSTANTS,
    SOCKET_BYTES_PER_S,
    HostTraffic,
    gpu_host_bytes_per_s,
    host_bytes_per_s,
    pass_traffic,
    transfer_s,
)
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.layout import Layout, ScheduleKind, count_rank_parameters
from tests.predict.runs import KINDS, LLAMA, MIXTRAL, run_of

ALL = ("activations", "gradients", "optimizer", "parameters")
ONE_BY_ONE = [(kind,) for kind in ALL]


def step_of(**fields: Any) -> StepPrediction:
    return predict_step(run_of(**{"model": LLAMA, "pp": 1, "dp": 8, "batch": 64, **fields}))


def with_host(run: TrainingRun, **fields: Any) -> TrainingRun:
    host = msgspec.structs.replace(run.cluster.host, **fields)
    run.cluster = msgspec.structs.replace(run.cluster, host=host)
    return run


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("what", [*ONE_BY_ONE, ALL])
def test_whatever_saves_memory_costs_time(zero: int, what: tuple[str, ...]) -> None:
    here = run_of(model=LLAMA, pp=1, dp=8, batch=64, zero=zero)
    there = run_of(model=LLAMA, pp=1, dp=8, batch=64, zero=zero, offload=what)
    assert (
        predict_memory(there).worst_stage.total_bytes < predict_memory(here).worst_stage.total_bytes
    )
    assert predict_step(there).step_s > predict_step(here).step_s


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", [*ONE_BY_ONE, ALL])
def test_host_memory_has_a_part_of_its_own_beside_the_update(
    kind: ScheduleKind, what: tuple[str, ...]
) -> None:
    fields: dict[str, Any] = {"dp": 4, "batch": 64, "zero": 1}  # all stages alike
    here, there = (predict_step(run_of(kind, **fields, offload=some)) for some in ((), what))
    assert there.offload_s > 0
    assert there.compute_s == pytest.approx(here.compute_s, rel=0.01)
    assert (there.optimizer_s > 5 * here.optimizer_s) == ("optimizer" in what)


def test_what_fits_behind_a_pass_costs_nothing() -> None:
    # One layer's input is all that full recompute keeps.
    fields: dict[str, Any] = {"recompute": "full", "zero": 1}
    here, there = step_of(**fields), step_of(**fields, offload=("activations",))
    assert there.step_s == here.step_s
    assert there.offload_s == 0


def test_what_does_not_fit_is_exposed_byte_by_byte() -> None:
    run = run_of(model=LLAMA, pp=1, batch=8, offload=("activations",))
    slow, slower = (with_host(run_of(model=LLAMA, pp=1, batch=8, offload=("activations",)),
                              gpu_bytes_per_s=rate) for rate in (1e9, 0.5e9))  # fmt: skip
    moved = pass_traffic(run)[0]
    kept = predict_memory(run_of(model=LLAMA, pp=1, batch=8)).stages[0].activations_bytes
    assert moved.forward == HostTraffic(to_host_bytes=kept)
    assert moved.backward == HostTraffic(to_device_bytes=kept)
    more = predict_step(slower).step_s - predict_step(slow).step_s
    assert more == pytest.approx(8 * 2 * kept / (HOST_CONSTANTS.link_share * 1e9))


@pytest.mark.parametrize("kind", KINDS)
def test_only_offloaded_layers_move(kind: ScheduleKind) -> None:
    fields: dict[str, Any] = {"batch": 16, "offload": ("activations",)}
    every, (none, third) = (
        pass_traffic(run_of(kind, **fields)),
        (pass_traffic(run_of(kind, **fields, offload_layers=layers)) for layers in (0, 2)),
    )
    chunk = 6 if len(every) == 8 else 12
    for whole, nothing, some in zip(every, none, third, strict=True):
        assert nothing.forward == nothing.backward == HostTraffic()
        assert some.forward.to_host_bytes == pytest.approx(2 / chunk * whole.forward.to_host_bytes)
        assert some.backward.to_device_bytes == some.forward.to_host_bytes


def test_few_enough_layers_hide_behind_the_others() -> None:
    def step(layers: int | None) -> StepPrediction:
        return step_of(batch=8, offload=("activations",), offload_layers=layers)

    assert step(None).offload_s == step(32).offload_s > step(24).offload_s > 0
    assert step(4).offload_s == 0
    assert step(4).step_s == step(0).step_s


def test_a_faster_link_hides_what_a_slow_one_does_not() -> None:
    fields: dict[str, Any] = {"model": LLAMA, "pp": 1, "batch": 8, "offload": ("activations",)}
    pcie, c2c = run_of(**fields), run_of(**fields)
    with_host(c2c, link="c2c", gpu_bytes_per_s=450e9)
    assert predict_step(c2c).offload_s < 0.2 * predict_step(pcie).offload_s


def test_gpus_of_a_node_share_the_memory_of_their_host() -> None:
    alone, all_eight = run_of(pp=1), run_of(pp=1, dp=8)
    assert gpu_host_bytes_per_s(alone) == 8 * gpu_host_bytes_per_s(all_eight)
    # Eight links both ways carry more than the memory of such a host.
    both, one_way = HostTraffic(1e9, 1e9), HostTraffic(1e9)
    assert transfer_s(all_eight, both) == pytest.approx(
        2e9 / (HOST_CONSTANTS.memory_share * gpu_host_bytes_per_s(all_eight))
    )
    assert transfer_s(alone, both) == pytest.approx(
        (1 + HOST_CONSTANTS.crossing) * transfer_s(alone, one_way)
    )


def test_a_link_that_was_measured_takes_the_place_of_the_usual_one() -> None:
    run = run_of(pp=1)
    gpu = run.cluster.gpu.name
    link = LinkCurve(share=0.5, crossing=0.0)
    run.calibration = Calibration(gpu=gpu, source="here", link=link)
    wire = run.cluster.host.gpu_bytes_per_s
    assert transfer_s(run, HostTraffic(1e9)) == pytest.approx(1e9 / (0.5 * wire))
    assert transfer_s(run, HostTraffic(1e9, 1e9)) == pytest.approx(1e9 / (0.5 * wire))


def test_host_memory_is_as_fast_as_the_cluster_says_or_its_generation_has() -> None:
    assert host_bytes_per_s(catalog.get_cluster("h100-superpod")) == 2 * SOCKET_BYTES_PER_S["pcie5"]
    said = with_host(run_of(), memory_bytes_per_s=1e12)
    assert host_bytes_per_s(said.cluster) == 1e12


def test_an_update_on_the_host_takes_as_long_as_its_memory_needs() -> None:
    run = run_of(model=LLAMA, pp=1, dp=8, zero=1, batch=8, offload=("optimizer",))
    # Moments and master weights in and out, the gradient in, the two-byte weight out.
    moved = (4 * 4 + 2 * 4 + 4 + 2) * count_rank_parameters(Layout(), LLAMA)[0].total / 8
    expected = moved / (HOST_CONSTANTS.update_share * gpu_host_bytes_per_s(run))
    assert predict_step(run).optimizer_s == pytest.approx(expected, rel=0.02)


def test_sharding_divides_what_an_update_on_the_host_takes() -> None:
    whole, sharded = (step_of(zero=zero, offload=("optimizer",)) for zero in (0, 1))
    assert whole.optimizer_s == pytest.approx(8 * sharded.optimizer_s, rel=0.02)


def test_parameters_come_up_for_every_pass() -> None:
    few, many = (step_of(dp=1, batch=batch, offload=("parameters",)).offload_s for batch in (4, 16))
    assert many > 3 * few


def test_gradients_of_later_microbatches_meet_their_sum() -> None:
    first, later = (
        pass_traffic(run_of(model=LLAMA, pp=1, batch=batch, offload=("gradients",)))[0].backward
        for batch in (1, 4)
    )
    assert first.to_device_bytes == 0
    assert later == HostTraffic(first.to_host_bytes, 0.75 * first.to_host_bytes)


def test_frozen_weights_have_no_gradients_to_move() -> None:
    run = run_of(model=LLAMA, pp=2, batch=8, frozen=True, offload=("gradients", "optimizer"))
    assert predict_step(run).offload_s == 0


def test_what_is_offloaded_makes_a_prediction_less_sure() -> None:
    def doubt(**fields: Any) -> float:
        step = step_of(**fields)
        return step.high_s / step.step_s

    assert doubt(offload=("optimizer",), zero=1) > doubt(zero=1)
    assert doubt(offload=("activations",), zero=1) > doubt(zero=1)


@pytest.mark.parametrize("what", [*ONE_BY_ONE, ALL])
def test_all_replicas_together_take_as_long_as_one(what: tuple[str, ...]) -> None:
    run = run_of(model=MIXTRAL, dp=8, ep=4, zero=2, batch=64, offload=what)
    assert simulate_replicas(run, NO_NOISE).step_s == pytest.approx(simulate_step(run).step_s)
