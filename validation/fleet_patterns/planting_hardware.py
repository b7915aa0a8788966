"""Faults of hardware and of placement, planted in nodes: see `planting`."""

import numpy as np

from validation.fleet_patterns.planting import between, hours_of, placed, plants
from validation.fleet_patterns.sound import trained
from validation.fleet_patterns.working import Work, run
from validation.fleet_patterns.world import H100, MINUTES, PER_NODE, World


def _sick_node(world: World) -> int:
    """An H100 node that no other fault is planted in, with training on it."""
    taken = {name for label in world.labels for name in label.nodes}
    taken |= {world.names[at] for at in world.closed}
    able = [at for at, kind in enumerate(world.kinds)
            if kind is H100 and world.names[at] not in taken]  # fmt: skip
    node = int(world.rng.choice(able))
    for _ in range(2):
        slot = world.place(8, int(between(world, 300, 900)), only=[node])
        if slot is not None:
            run(world, slot, Work(nvlink=2e10, tensor=between(world, 0.25, 0.5)))
            world.job(slot)
    return node


def _hold_back(
    world: World, node: int, gpus: list[int], bit: int, part: float, *, often: float,
    heat: float = 0.0, power: float | None = None, flat: bool = False,
) -> None:  # fmt: skip
    """Once all jobs have run: lower clocks under load, and say why in the bits."""

    def apply() -> None:
        for gpu in gpus:
            row = node * PER_NODE + gpu
            busy = world.samples["gpu_util"][row] > 0.3
            hit = busy & (world.rng.random(MINUTES) < often)
            clock = world.samples["sm_clock_mhz"][row]
            if flat:
                clock[busy] = part * world.kinds[node].clock
                world.throttle[row][busy] = bit
            else:
                clock[hit] *= part
                world.throttle[row][hit] |= bit
            if power is not None:
                np.minimum(world.samples["power_w"][row], power,
                           out=world.samples["power_w"][row])  # fmt: skip
            world.samples["temperature_c"][row][busy] += heat

    world.later.append(apply)


def _some_gpus(world: World) -> list[int]:
    number = int(world.rng.integers(1, PER_NODE + 1))
    return [int(gpu) for gpu in world.rng.permutation(PER_NODE)[:number]]


@plants("thermal-throttled")
def thermal(world: World) -> None:
    """A fan that fails."""
    node = _sick_node(world)
    _hold_back(world, node, _some_gpus(world), 0x20, between(world, 0.7, 0.96),
               often=between(world, 0.1, 0.9), heat=18)  # fmt: skip
    world.label("thermal-throttled", nodes=[node], also=("straggler-gpu", "slow-node"))


@plants("power-throttled")
def power(world: World) -> None:
    """A power supply that fails, or a limit left behind."""
    node = _sick_node(world)
    if world.rng.random() < 0.5:
        _hold_back(world, node, list(range(8)), 0x80, between(world, 0.55, 0.93),
                   often=between(world, 0.2, 0.8), power=between(world, 300, 600))  # fmt: skip
    else:
        _hold_back(world, node, list(range(8)), 0x4, between(world, 0.65, 0.92),
                   often=0.95, power=between(world, 300, 600))  # fmt: skip
    world.label("power-throttled", nodes=[node], also=("slow-node",))


@plants("clocks-locked-low")
def locked(world: World) -> None:
    """Clocks locked by a benchmark and never freed."""
    node = _sick_node(world)
    _hold_back(world, node, list(range(8)), 0x2, between(world, 0.5, 0.93), often=1.0, flat=True)
    world.label("clocks-locked-low", nodes=[node], also=("slow-node",))


@plants("straggler-gpu")
def straggler(world: World) -> None:
    """One slow GPU in a job."""
    nodes = int(world.rng.choice([1, 2]))
    slot = placed(world, 8 * nodes, between(world, 200, 1200), nodes=nodes, kind=H100)
    row, part = int(world.rng.choice(slot.rows)), between(world, 0.6, 0.96)
    world.slow[row] = part
    run(world, slot, Work(nvlink=3e10, tensor=between(world, 0.2, 0.5)))
    world.slow[row] = 1.0
    world.label("straggler-gpu", [world.job(slot)], hours=hours_of(slot, slot.minutes) * (1 - part))


@plants("slow-node")
def slow_node(world: World) -> None:
    """A node that is slow for everybody."""
    node = int(world.rng.choice([at for at, kind in enumerate(world.kinds) if kind is H100
                                 and at not in world.closed]))  # fmt: skip
    world.slow[node * PER_NODE : (node + 1) * PER_NODE] = between(world, 0.88, 0.98)
    for gpus in (8, 2, 4, 1, 1, 8, 4, 2, 1, 1, 2):
        slot = world.place(gpus, int(between(world, 60, 300)), only=[node])
        if slot is not None:
            run(world, slot, Work(nvlink=1e10, tensor=between(world, 0.15, 0.45)))
            world.job(slot)
    world.label("slow-node", nodes=[node], also=("straggler-gpu",))


@plants("pcie-link-slow")
def pcie_slow(world: World) -> None:
    """A link that came up with half its lanes."""
    node, gpu = _sick_node(world), int(world.rng.integers(PER_NODE))
    part = between(world, 0.12, 0.65)

    def apply() -> None:
        world.samples["pcie_rx"][node * PER_NODE + gpu] *= part

    world.later.append(apply)
    world.label("pcie-link-slow", nodes=[node])


def _failing(world: World) -> tuple[str, list[int], int, list[int], float]:
    """A training job that fails: its number, nodes, last minute, GPUs of the first, hours lost."""
    nodes = int(world.rng.choice([1, 2, 4]))
    slot = placed(world, 8 * nodes, between(world, 200, 1400), nodes=nodes, kind=H100)
    work = Work(nvlink=2e10, save_every=60, save=1)
    run(world, slot, work)
    state = str(world.rng.choice(["failed", "node_fail"]))
    number = world.job(slot, state=state, exit_code=1)
    lost = float(slot.minutes)
    if world.rng.random() < 0.7:
        trained(world, number, slot, work)
        saves = [row["end_s"] for row in world.progress
                 if row["job"] == number and row["phase"] == "checkpoint"]  # fmt: skip
        lost = (world.time_s(slot.last) - max(saves, default=world.time_s(slot.first))) / 60
    return number, slot.nodes, slot.last, list(slot.places[0][1]), hours_of(slot, lost)


@plants("gpu-errors-before-failure")
def gpu_errors(world: World) -> None:
    """An Xid, or ECC errors, then the end."""
    number, nodes, last, gpus, lost = _failing(world)
    gpu = int(world.rng.choice(gpus))
    if world.rng.random() < 0.6:
        code = int(world.rng.choice([48, 63, 64, 79, 94, 95, 119]))
        world.event(nodes[0], last - between(world, 1.5, 30), "xid", gpu, code=code)
    else:
        for _ in range(int(world.rng.integers(3, 12))):
            world.event(nodes[0], last - between(world, 1.5, 50), "ecc", gpu, count=4)
    world.label("gpu-errors-before-failure", [number], [nodes[0]], hours=lost,
                also=("errors-rising",))  # fmt: skip


@plants("nvlink-errors-before-failure")
def nvlink_errors(world: World) -> None:
    """A link between GPUs that fails."""
    number, nodes, last, gpus, lost = _failing(world)
    gpu = int(world.rng.choice(gpus))
    if world.rng.random() < 0.5:
        world.event(nodes[0], last - between(world, 1.5, 30), "xid", gpu, code=74)
    else:
        for _ in range(int(world.rng.integers(2, 10))):
            world.event(nodes[0], last - between(world, 1.5, 50), "nvlink", gpu, count=20)
    world.label("nvlink-errors-before-failure", [number], [nodes[0]], hours=lost,
                also=("errors-rising",))  # fmt: skip


@plants("infiniband-errors-before-failure")
def infiniband_errors(world: World) -> None:
    """A cable that fails."""
    number, nodes, last, _, lost = _failing(world)
    for _ in range(int(world.rng.integers(3, 12))):
        world.event(nodes[0], last - between(world, 1.5, 50), "infiniband", count=30)
    world.label("infiniband-errors-before-failure", [number], [nodes[0]], hours=lost,
                also=("errors-rising",))  # fmt: skip


@plants("application-fault")
def application_fault(world: World) -> None:
    """An illegal address in a kernel."""
    slot = placed(world, int(world.rng.choice([1, 8])), between(world, 40, 600))
    run(world, slot, Work(nvlink=1e9))
    node, gpus = slot.places[0]
    code = int(world.rng.choice([13, 31, 31, 43]))
    world.event(node, slot.last - between(world, 1.2, 4), "xid", int(gpus[0]), code=code)
    number = world.job(slot, state="failed", exit_code=1)
    world.label("application-fault", [number], hours=hours_of(slot, slot.minutes))


@plants("errors-rising")
def errors_rising(world: World) -> None:
    """Corrected errors, more each day, and no failure yet."""
    kind = str(world.rng.choice(["ecc", "pcie", "infiniband", "nvlink"]))
    node, gpu = int(world.rng.integers(len(world.kinds))), int(world.rng.integers(PER_NODE))
    begin = between(world, 0, 0.7 * MINUTES)
    for _ in range(int(between(world, 4, 40))):
        minute = begin + (MINUTES - begin) * float(world.rng.beta(2, 1))
        world.event(node, minute, kind, None if kind == "infiniband" else gpu, count=3)
    world.label("errors-rising", nodes=[node])


@plants("lemon-node")
def lemon(world: World) -> None:
    """A node on which jobs of many users fail."""
    node = _sick_node(world)
    for at in range(int(world.rng.integers(6, 11))):
        slot = world.place(int(world.rng.choice([1, 2, 4])), int(between(world, 10, 200)),
                           only=[node])  # fmt: skip
        if slot is not None:
            run(world, slot, Work(nvlink=1e10))
            good = world.rng.random() < 0.2
            world.job(slot, user=f"l{at}", name="mine", state="completed" if good else "failed",
                      exit_code=0 if good else 1)  # fmt: skip
            again = None if good else world.place(2, int(between(world, 60, 200)))
            if again is not None:
                # Elsewhere it runs.
                run(world, again, Work(nvlink=1e10))
                world.job(again, user=f"l{at}", name="mine")
    world.label("lemon-node", nodes=[node])


@plants("stray-processes")
def stray(world: World) -> None:
    """Processes that outlive their job."""
    slot = placed(world, 4, between(world, 100, 600))
    run(world, slot, Work(nvlink=1e9))
    world.job(slot)
    node, gpus = slot.places[0]
    length = int(between(world, 45, 900))
    length = min(length, MINUTES - slot.last - 5)
    for gpu in gpus[: int(world.rng.integers(1, 5))]:
        row = node * PER_NODE + gpu
        memory = between(world, 3, 60) * 2**30
        world.samples["memory_used"][row, slot.last : slot.last + length] = memory
        world.free_at[row] = slot.last + length + 2
    world.label("stray-processes", nodes=[node])


@plants("spread-job")
def spread(world: World) -> None:
    """Two GPUs on two nodes."""
    nodes = int(world.rng.choice([2, 4]))
    slot = placed(world, nodes * int(world.rng.choice([1, 2])), between(world, 90, 900),
                  nodes=nodes)  # fmt: skip
    run(world, slot, Work(nvlink=1e9))
    world.label("spread-job", [world.job(slot)])


def close(world: World, number: int) -> list[int]:
    """Nodes that nothing else is put on."""
    able = [
        at for at, kind in enumerate(world.kinds[:-1])
        if kind is not H100 and at not in world.closed
        and not world.free_at[at * PER_NODE : (at + 1) * PER_NODE].any()
    ]  # fmt: skip
    found = able[:number]
    assert len(found) == number, "too few nodes to close"
    world.closed.update(found)
    return found


@plants("queue-starved-by-fragmentation")
def fragmentation(world: World) -> None:
    """Enough GPUs free, none of the nodes whole."""
    nodes = close(world, 2)
    first, wait = int(between(world, 100, 800)), int(between(world, 120, 900))
    for node in nodes:
        world.stand(node, 0, None, "up", partition="small")
        world.closed.discard(node)
        slot = placed(world, int(world.rng.integers(1, 4)), first + wait, only=[node], delay=3)
        world.closed.add(node)
        run(world, slot, Work(nvlink=1e9))
        world.job(slot, partition="small")
    world.closed.discard(nodes[0])
    slot = placed(world, 8, 200, only=[nodes[0]], delay=5)
    world.closed.add(nodes[0])
    run(world, slot, Work(nvlink=1e10))
    start = world.time_s(slot.first)
    number = world.job(slot, partition="small", submit_s=start - wait * 60.0)
    world.label("queue-starved-by-fragmentation", [number])


@plants("forgotten-drain")
def forgotten(world: World) -> None:
    """A node set aside and forgotten."""
    node = close(world, 1)[0]
    first = int(between(world, 0, 0.4 * MINUTES))
    world.stand(node, 0, first, "up")
    world.stand(node, first, None, str(world.rng.choice(["down", "draining"])), reason="check PSU")
    world.label("forgotten-drain", nodes=[node], hours=8 * (MINUTES - first) / 60)


@plants("reservation-unused")
def reservation(world: World) -> None:
    """A workshop that nobody came to."""
    node = close(world, 1)[0]
    last = int(between(world, 1700, MINUTES))
    world.stand(node, 0, last, "reserved", reason="workshop")
    world.stand(node, last, None, "up")
    world.label("reservation-unused", nodes=[node], hours=8 * last / 60)
