"""What synthesis promises is what simulation finds: both take the same ways."""

import pytest

from benchmarks.collective_machines import Machine, machines
from meshwright.policy.collective.collective import Op
from meshwright.policy.collective.synthesis import synthesize
from meshwright.predict.collective import rank, simulate
from meshwright.spec import catalog
from meshwright.spec.cluster.damage import without

NBYTES = 16e9
"""So much that latency does not count."""

BOX = without(catalog.cluster("mi300x-box").link_graph(1), ["gpu0~gpu1"])
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
def test_a_schedule_simulates_at_the_rate_it_promises(machine: Machine, op: Op) -> None:
    made = synthesize(machine.graph, op, gpus=machine.gpus)
    names = [vertex.name for vertex in machine.graph.of_kind("gpu")]
    members = [names.index(gpu) for gpu in machine.members]
    result = simulate(made.collective, machine.graph, NBYTES, members=members)
    promised = made.rate_bytes_per_s
    assert 0.95 * promised <= result.algbw_bytes_per_s <= promised * (1 + 1e-6)
    assert NBYTES / result.bound_s == pytest.approx(made.bound.rate_bytes_per_s)
    library = rank(machine.graph, op, NBYTES, members=members)[0]
    assert library.result.algbw_bytes_per_s <= 1.02 * result.algbw_bytes_per_s
