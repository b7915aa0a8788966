"""Work bound by memory, and what launching adds."""

import pytest

from meshwright.predict.cost import (
    build_device_costs,
    bytes_moved,
    cuda_graph_s,
    eager_s,
    exposed_launch_s,
    memory_s,
    optimizer_s,
)
from meshwright.predict.cost.curves import MEMORY_OPS, MemoryOp
from meshwright.predict.cost.memory_bound import ACCESSES_PER_ELEMENT
from meshwright.spec.catalog.hardware import get_gpu, list_gpus


@pytest.mark.parametrize("name", list(list_gpus()))
@pytest.mark.parametrize("op", MEMORY_OPS)
def test_no_kernel_beats_the_memory(name: str, op: MemoryOp) -> None:
    device = build_device_costs(list_gpus()[name])
    assert memory_s(device, op, 1e9) > 1e9 / device.gpu.memory_bytes_per_s


def test_a_small_kernel_takes_its_start() -> None:
    device = build_device_costs(get_gpu("h100"))
    assert memory_s(device, "norm", 1024) == pytest.approx(device.launch.kernel_s, rel=0.01)
    assert memory_s(device, "norm", 0) == 0.0


def test_a_gated_activation_reads_two_halves_and_writes_one() -> None:
    assert bytes_moved("activation", 2 * 14336 * 8192) == 3 * 14336 * 8192 * 2


def test_every_class_but_those_of_states_counts_its_own_bytes() -> None:
    assert set(MEMORY_OPS) - set(ACCESSES_PER_ELEMENT) == {"optimizer", "accumulate"}


def test_an_optimizer_step_is_bound_by_its_states() -> None:
    device = build_device_costs(get_gpu("h200"))
    # Measured: AdamW over 268 million fp32 parameters in 2.16 ms.
    assert optimizer_s(device, 28 * 2**28) == pytest.approx(2.16e-3, rel=0.03)


def test_launching_is_free_while_kernels_are_long() -> None:
    device = build_device_costs(get_gpu("h100"))
    assert eager_s(device, 100, 1.0) == 1.0
    assert exposed_launch_s(device, 100, 1.0) == 0.0


def test_the_host_sets_the_pace_of_short_kernels() -> None:
    device = build_device_costs(get_gpu("h100"))
    work = 100 * 2e-6
    assert eager_s(device, 100, work) == pytest.approx(100 * device.launch.host_s)
    assert exposed_launch_s(device, 100, work) == pytest.approx(100 * device.launch.host_s - work)


def test_a_graph_hides_the_host() -> None:
    device = build_device_costs(get_gpu("h100"))
    work = 100 * 2e-6
    assert cuda_graph_s(device, 100, work) == work
    assert cuda_graph_s(device, 1, 1e-6) == device.launch.graph_s
    assert cuda_graph_s(device, 0, 0.0) == 0.0
