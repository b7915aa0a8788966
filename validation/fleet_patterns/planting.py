"""Faults of jobs: each function plants one, of a strength that is drawn, and notes what it is.

Strengths reach from what an operator would just mention to what nobody could overlook; they are
drawn from what is reported of clusters, not from the bounds of the detectors.
"""

from collections.abc import Callable

import numpy as np

from validation.fleet_patterns.sound import trained
from validation.fleet_patterns.working import Work, run, still, stretch
from validation.fleet_patterns.world import GIB, H100, Slot, World

Plant = Callable[[World], None]
JOB_FAULTS: dict[str, Plant] = {}


def plants(name: str) -> Callable[[Plant], Plant]:
    """Register what plants a pattern."""

    def register(function: Plant) -> Plant:
        JOB_FAULTS[name] = function
        return function

    return register


def between(world: World, low: float, high: float) -> float:
    """A strength."""
    return float(world.rng.uniform(low, high))


def placed(world: World, gpus: int, minutes: float, **given: object) -> Slot:
    """A place that there must be: faults are planted while the fleet is empty."""
    slot = world.place(gpus, int(minutes), **given)  # type: ignore[arg-type]
    assert slot is not None, "no room to plant in"
    return slot


def hours_of(slot: Slot, minutes: float) -> float:
    """GPU-hours of so many minutes."""
    return slot.rows.size * minutes / 60


@plants("never-used")
def never_used(world: World) -> None:
    """GPUs asked for by a script that runs on the host."""
    slot = placed(world, int(world.rng.choice([1, 2, 4, 8])), between(world, 65, 1400))
    run(world, slot, Work(active=0.0, sms=0, tensor=0, dram=0, fp32=0, memory=0.0, pcie=0))
    still(world, slot, 0, slot.minutes)
    world.label("never-used", [world.job(slot)], hours=hours_of(slot, slot.minutes))


@plants("finished-but-held")
def finished(world: World) -> None:
    """A script that waits for ever after its last step."""
    slot = placed(world, int(world.rng.choice([1, 4, 8])), between(world, 300, 1500))
    run(world, slot, Work(nvlink=1e10))
    tail = int(between(world, 50, 0.7 * slot.minutes))
    still(world, slot, slot.minutes - tail, slot.minutes)
    world.label("finished-but-held", [world.job(slot)], hours=hours_of(slot, tail))


@plants("idle-allocation")
def held_idle(world: World) -> None:
    """Work, long pauses, work."""
    slot = placed(world, int(world.rng.choice([1, 2, 8])), between(world, 500, 1500))
    run(world, slot, Work(nvlink=1e10))
    idle, at = 0, 60
    while at < slot.minutes - 200:
        length = int(between(world, 50, 300))
        length = min(length, slot.minutes - at - 100)
        still(world, slot, at, at + length)
        idle, at = idle + length, at + length + int(between(world, 60, 300))
    world.label("idle-allocation", [world.job(slot)], hours=hours_of(slot, idle))


@plants("idle-notebook")
def hoarding(world: World) -> None:
    """A notebook left open over nights."""
    slot = placed(world, int(world.rng.choice([1, 2, 4])), between(world, 900, 2500))
    run(world, slot, Work(active=0.4, tensor=0.1, memory=0.3, noise=0.3))
    for at in range(60, slot.minutes - 40, 480):
        still(world, slot, at, min(at + int(between(world, 240, 450)), slot.minutes - 10))
    world.label("idle-notebook", [world.job(slot, interactive=True, name="jupyter")])


@plants("some-gpus-unused")
def unused(world: World) -> None:
    """A script for one GPU with several."""
    gpus = int(world.rng.choice([2, 4, 8]))
    slot = placed(world, gpus, between(world, 120, 1200))
    run(world, slot, Work(active=between(world, 0.4, 0.98)))
    busy = int(world.rng.integers(1, max(2, gpus // 2 + 1)))
    rest = Slot(((slot.places[0][0], slot.places[0][1][busy:]),), slot.first, slot.last)
    still(world, rest, 0, slot.minutes)
    stretch(world, rest, 0, slot.minutes, memory_used=0.6 * GIB)
    world.label("some-gpus-unused", [world.job(slot)], hours=hours_of(rest, slot.minutes))


@plants("hung-job")
def hung(world: World) -> None:
    """A collective that never comes back."""
    nodes = int(world.rng.choice([1, 2, 4]))
    slot = placed(world, 8 * nodes, between(world, 300, 1500), nodes=nodes, kind=H100)
    run(world, slot, Work(nvlink=3e10))
    tail = int(between(world, 30, 400))
    tail = min(tail, slot.minutes - 120)
    stretch(world, slot, slot.minutes - tail, slot.minutes, gpu_util=1.0, sm_active=0.06,
            tensor_active=0.0, dram_active=0.002, nvlink_tx=0.0, pcie_rx=0.0,
            fp32_active=0.0, power_w=0.25 * 700)  # fmt: skip
    np.minimum(world.samples["gpu_util"], 1.0, out=world.samples["gpu_util"])
    world.label("hung-job", [world.job(slot, state="timeout")], hours=hours_of(slot, tail))


@plants("low-sm-activity")
def launch_bound(world: World) -> None:
    """Kernels too small for the chip."""
    slot = placed(world, int(world.rng.choice([1, 4, 8])), between(world, 400, 1500), kind=H100)
    run(world, slot, Work(active=between(world, 0.8, 0.99), sms=between(world, 0.05, 0.3),
                          tensor=between(world, 0.01, 0.1), dram=0.1, nvlink=5e9,
                          memory=between(world, 0.25, 0.9)))  # fmt: skip
    world.label("low-sm-activity", [world.job(slot)])


@plants("low-tensor-activity")
def low_tensor(world: World) -> None:
    """Products in full fp32."""
    slot = placed(world, int(world.rng.choice([1, 4, 8])), between(world, 400, 1500), kind=H100)
    run(world, slot, Work(active=between(world, 0.8, 0.99), sms=between(world, 0.5, 0.9),
                          tensor=between(world, 0.0, 0.1), fp32=between(world, 0.1, 0.5),
                          dram=between(world, 0.15, 0.45), nvlink=5e9))  # fmt: skip
    world.label("low-tensor-activity", [world.job(slot)])


@plants("mig-candidate")
def too_powerful(world: World) -> None:
    """A small model on a large GPU."""
    slot = placed(world, 1, between(world, 400, 2000))
    run(world, slot, Work(active=between(world, 0.03, 0.22), sms=0.05, tensor=0.01, dram=0.03,
                          memory=between(world, 0.03, 0.13), noise=0.15))  # fmt: skip
    job = world.job(slot, cpus=between(world, 1, 8), memory_requested=between(world, 8, 30) * GIB)
    world.label("mig-candidate", [job])


@plants("low-gpu-memory")
def memory_under(world: World) -> None:
    """A small batch on many GPUs."""
    slot = placed(world, int(world.rng.choice([2, 4, 8])), between(world, 300, 1500))
    run(world, slot, Work(active=between(world, 0.27, 0.53), sms=0.2, tensor=0.04, dram=0.1,
                          memory=between(world, 0.04, 0.22), nvlink=2e9))  # fmt: skip
    world.label("low-gpu-memory", [world.job(slot)])


@plants("low-utilization")
def low_utilization(world: World) -> None:
    """Waiting for nobody knows what."""
    slot = placed(world, int(world.rng.choice([2, 4, 8])), between(world, 450, 1500))
    run(world, slot, Work(active=between(world, 0.05, 0.28), sms=0.15, tensor=0.03, dram=0.1,
                          memory=between(world, 0.3, 0.9), noise=0.3, nvlink=1e9))  # fmt: skip
    world.label("low-utilization", [world.job(slot)])


@plants("uneven-memory")
def uneven_memory(world: World) -> None:
    """All ranks put something on the first GPU."""
    slot = placed(world, 8, between(world, 200, 1500))
    run(world, slot, Work(memory=between(world, 0.2, 0.45), nvlink=1e10))
    first = Slot(((slot.places[0][0], slot.places[0][1][:1]),), slot.first, slot.last)
    stretch(world, first, 10, slot.minutes, memory_used=between(world, 0.7, 0.95) * 80 * GIB)
    world.label("uneven-memory", [world.job(slot)])


@plants("uneven-work")
def uneven_work(world: World) -> None:
    """Stages of unequal depth."""
    slot = placed(world, 8, between(world, 300, 1500), kind=H100)
    run(world, slot, Work(nvlink=1e10, tensor=between(world, 0.3, 0.5)))
    part = np.ones(8)
    part[world.rng.permutation(8)[: int(world.rng.integers(4, 7))]] = between(world, 0.2, 0.65)
    span = slice(slot.first, slot.last)
    world.samples["tensor_active"][slot.rows, span] *= part[:, None]
    world.label("uneven-work", [world.job(slot)])


@plants("lasting-slowdown")
def slower(world: World) -> None:
    """Something takes a part of the speed at one moment."""
    slot = placed(world, 8, between(world, 500, 1500), kind=H100)
    run(world, slot, Work(nvlink=1e10, noise=between(world, 0.03, 0.1)))
    at = int(between(world, 100, slot.minutes - 180))
    part = between(world, 0.55, 0.9)
    span = slice(slot.first + at, slot.last)
    for name in ("tensor_active", "sm_active", "dram_active", "nvlink_tx"):
        world.samples[name][slot.rows, span] *= part
    lost = hours_of(slot, slot.minutes - at) * (1 - part)
    world.label("lasting-slowdown", [world.job(slot)], hours=lost)


def _waiting(world: World, gpus: int, work: Work) -> tuple[Slot, float]:
    slot = placed(world, gpus, between(world, 300, 1500))
    active = between(world, 0.12, 0.73)
    run(world, slot, work._replace(active=active, sms=0.6 * active, tensor=0.3 * active,
                                   dram=0.3 * active, nvlink=1e10, memory=0.6))  # fmt: skip
    return slot, hours_of(slot, slot.minutes) * (1 - active / 0.95)


@plants("cpu-starved")
def cpu_starved(world: World) -> None:
    """A few cores decode for many GPUs."""
    slot, lost = _waiting(world, int(world.rng.choice([1, 4, 8])), Work(cores=0.3))
    job = world.job(slot, cpus=float(slot.rows.size * world.rng.choice([1, 2, 4])))
    row = world.jobs[-1]
    row["cpu_s"] = between(world, 0.87, 1.0) * row["cpus"] * (row["end_s"] - row["start_s"])
    world.label("cpu-starved", [job], hours=lost)


@plants("metadata-storm")
def metadata_storm(world: World) -> None:
    """Millions of small files."""
    slot, lost = _waiting(
        world, 8, Work(metadata=10 ** between(world, 2.9, 4.8), io_wait=between(world, 0.02, 0.3))
    )
    world.label("metadata-storm", [world.job(slot)], hours=lost)


@plants("storage-bound")
def storage_bound(world: World) -> None:
    """Large files, slowly."""
    slot, lost = _waiting(
        world, 8, Work(io_wait=between(world, 0.07, 0.5), read=between(world, 5e8, 5e9))
    )
    world.label("storage-bound", [world.job(slot)], hours=lost)


@plants("pcie-bound")
def pcie_bound(world: World) -> None:
    """States offloaded to the host."""
    slot = placed(world, int(world.rng.choice([1, 4, 8])), between(world, 300, 1500), kind=H100)
    run(world, slot, Work(active=between(world, 0.5, 0.95), sms=0.4, dram=0.2, nvlink=1e9,
                          tensor=between(world, 0.04, 0.15),
                          pcie=between(world, 0.35, 0.85)))  # fmt: skip
    world.label("pcie-bound", [world.job(slot)])


@plants("nvlink-unused")
def nvlink_unused(world: World) -> None:
    """Peer access switched off."""
    slot = placed(world, int(world.rng.choice([2, 4, 8])), between(world, 300, 1500), kind=H100)
    run(world, slot, Work(active=0.95, sms=0.6, tensor=between(world, 0.12, 0.3), nvlink=0.0,
                          pcie=between(world, 0.03, 0.35)))  # fmt: skip
    world.label("nvlink-unused", [world.job(slot)])


def _told(world: World, phase: str, part: float, number: str, slot: Slot) -> float:
    """Let a job tell that a part of each ten minutes goes into a phase."""
    at = float(slot.first)
    while at < slot.last - 10:
        world.phase(number, "productive", at, at + 10 * (1 - part))
        world.phase(number, phase, at + 10 * (1 - part), at + 10)
        at += 10
    return hours_of(slot, slot.minutes) * part


@plants("data-wait")
def data_wait(world: World) -> None:
    """A loader with too few workers, told by the job."""
    part = between(world, 0.08, 0.5)
    slot = placed(world, 8, between(world, 200, 1200))
    run(world, slot, Work(active=0.95 * (1 - part), tensor=0.35 * (1 - part), nvlink=1e10))
    number = world.job(slot)
    world.label("data-wait", [number], hours=_told(world, "data_wait", part, number, slot))


@plants("exposed-communication")
def exposed(world: World) -> None:
    """Communication that nothing hides, told by the job."""
    part = between(world, 0.2, 0.6)
    slot = placed(world, 16, between(world, 200, 1200), nodes=2)
    run(world, slot, Work(active=0.98, tensor=0.4 * (1 - part), nvlink=6e10))
    number = world.job(slot)
    world.label(
        "exposed-communication", [number], hours=_told(world, "communication", part, number, slot)
    )


@plants("startup-heavy")
def startup(world: World) -> None:
    """Half an hour of loading for an hour of work."""
    slot = placed(world, 16, between(world, 90, 240), nodes=2)
    start = int(slot.minutes * between(world, 0.12, 0.45))
    start = min(start, 55)
    run(world, slot, Work(nvlink=2e10, start=start))
    number = world.job(slot)
    trained(world, number, slot, Work(start=start, save_every=60))
    world.label("startup-heavy", [number], hours=hours_of(slot, start))


@plants("host-memory-over-requested")
def memory_over(world: World) -> None:
    """Most of a node's memory for one GPU."""
    slot = placed(world, int(world.rng.choice([1, 2])), between(world, 300, 1500), kind=H100)
    run(world, slot, Work(nvlink=1e9))
    asked = 2048 * GIB * between(world, 0.28, 0.9)
    number = world.job(slot, memory_requested=asked, memory_peak=asked * between(world, 0.02, 0.35))
    world.label("host-memory-over-requested", [number])


@plants("cores-over-requested")
def cores_over(world: World) -> None:
    """Most of a node's cores for one GPU."""
    slot = placed(world, int(world.rng.choice([1, 2])), between(world, 300, 1500), kind=H100)
    run(world, slot, Work(nvlink=1e9))
    cpus = 128 * between(world, 0.28, 0.9)
    number = world.job(slot, cpus=cpus)
    row = world.jobs[-1]
    row["cpu_s"] = between(world, 0.02, 0.28) * cpus * (row["end_s"] - row["start_s"])
    world.label("cores-over-requested", [number])


@plants("time-limit-far-over")
def limit_over(world: World) -> None:
    """The longest limit there is, to be safe."""
    user, limit = f"t{int(world.rng.integers(99))}", between(world, 12, 48) * 3600
    found = []
    for _ in range(int(world.rng.integers(6, 12))):
        slot = placed(world, 1, between(world, 20, 0.25 * limit / 60))
        run(world, slot, Work())
        found.append(world.job(slot, user=user, name="sweep", time_limit_s=limit))
    world.label("time-limit-far-over", found)
