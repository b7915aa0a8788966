"""What synthesis promises is what simulation finds: both take the same ways."""

import pytest

from benchmarks.collective_machines import Machine, machines
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.policy.collective.synthesis import synthesize
from meshwright.predict.collective import rank_algorithms, simulate_collective
from meshwright.spec import catalog
from meshwright.spec.cluster.failed_components import remove_components

NBYTES = 16e9
"""So much that latency does not count."""

BOX = remove_components(catalog.get_cluster("mi300x-box").build_link_graph(1), ["gpu0~gpu1"])
MACHINES = [*machines(), Machine("xGMI box with its host, one link failed", BOX)]
CASES = [
    pytest.param(
        machine,
        op,
        id=f"{machine.title}, {op}",
        marks=[pytest.mark.slow] if len(machine.members) > 16 else [],
    )
    for machine in MACHINES
    for op in ("all_gather", "all_reduce")
]


@pytest.mark.parametrize(("machine", "op"), CASES)
def test_a_schedule_simulates_at_the_rate_it_promises(machine: Machine, op: CollectiveOp) -> None:
    made = synthesize(machine.graph, op, gpus=machine.gpus)
    names = [vertex.name for vertex in machine.graph.vertices_of_kind("gpu")]
    members = [names.index(gpu) for gpu in machine.members]
    result = simulate_collective(made.collective, machine.graph, NBYTES, members=members)
    promised = made.rate_bytes_per_s
    assert 0.95 * promised <= result.algbw_bytes_per_s <= promised * (1 + 1e-6)
    assert NBYTES / result.bound_s == pytest.approx(made.bound.rate_bytes_per_s)
    library = rank_algorithms(machine.graph, op, NBYTES, members=members)[0]
    assert library.result.algbw_bytes_per_s <= 1.02 * result.algbw_bytes_per_s
