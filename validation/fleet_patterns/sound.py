"""Sound jobs, and those that look like faults and are none: what a detector must let pass."""

from collections.abc import Callable

import numpy as np

from validation.fleet_patterns.working import Work, run, still, stretch
from validation.fleet_patterns.world import H100, MINUTES, PER_NODE, Slot, World


def _between(world: World, low: float, high: float) -> float:
    return float(world.rng.uniform(low, high))


def _long(world: World, low: float, high: float) -> int:
    """Minutes of some hours, short ones more often."""
    return int(60 * np.exp(world.rng.uniform(np.log(low), np.log(high))))


def trained(world: World, number: str, slot: Slot, work: Work, pause: float = 0.5) -> None:
    """Let a training job tell of its phases, with a checkpoint of `pause` minutes."""
    world.phase(number, "startup", slot.first, slot.first + work.start)
    at = float(slot.first + work.start)
    every = float(work.save_every or 60)
    while at < slot.last:
        end = min(at + every, slot.last)
        world.phase(number, "productive", at, end)
        if end < slot.last:
            world.phase(number, "checkpoint", end, min(end + pause, slot.last))
        at = end + pause


def large_training(world: World) -> None:
    """Eight to thirty-two GPUs, busy with tensors, a checkpoint now and then."""
    nodes = int(world.rng.choice([1, 1, 2, 4]))
    slot = world.place(8 * nodes, _long(world, 3, 30), nodes=nodes)
    if slot is None:
        return
    work = Work(active=_between(world, 0.9, 0.99), sms=_between(world, 0.65, 0.9),
                tensor=_between(world, 0.2, 0.55), dram=_between(world, 0.3, 0.6),
                memory=_between(world, 0.5, 0.95), nvlink=_between(world, 5e9, 1e11),
                pcie=_between(world, 0.01, 0.1), save_every=int(_between(world, 50, 110)),
                save=1, start=int(_between(world, 2, 12)),
                cores=_between(world, 0.05, 0.6))  # fmt: skip
    run(world, slot, work)
    number = world.job(slot)
    if world.rng.random() < 0.5:
        trained(world, number, slot, work)


def small_training(world: World) -> None:
    """One to four GPUs, with a validation now and then."""
    gpus = int(world.rng.choice([1, 1, 1, 2, 4]))
    slot = world.place(gpus, _long(world, 0.5, 14))
    if slot is None:
        return
    active = _between(world, 0.55, 0.98)
    work = Work(active=active, sms=_between(world, 0.4, 0.85), tensor=_between(world, 0.12, 0.4),
                dram=_between(world, 0.2, 0.6), memory=_between(world, 0.25, 0.95),
                nvlink=_between(world, 1e9, 3e10) if gpus > 1 else 0.0,
                noise=_between(world, 0.03, 0.12), pcie=_between(world, 0.01, 0.15),
                pause_every=int(_between(world, 120, 400)), pause=int(_between(world, 2, 12)),
                cores=_between(world, 0.1, 0.8))  # fmt: skip
    run(world, slot, work)
    state = "failed" if world.rng.random() < 0.06 else "completed"
    world.job(slot, state=state, exit_code=1 if state == "failed" else 0)


def serving(world: World) -> None:
    """A server: busy by day, quiet by night, memory always full."""
    gpus = int(world.rng.choice([1, 2, 4]))
    slot = world.place(gpus, _long(world, 10, 40))
    if slot is None:
        return
    work = Work(active=0.6, sms=0.4, tensor=0.15, dram=0.4, memory=0.92, noise=0.15,
                nvlink=2e9 if gpus > 1 else 0.0)  # fmt: skip
    run(world, slot, work)
    phase = _between(world, 0, 1440)
    minute = np.arange(slot.first, slot.last)
    level = 0.65 + 0.35 * np.sin((minute + phase) / 1440 * 2 * np.pi)
    for name in ("gpu_util", "sm_active", "tensor_active", "dram_active", "nvlink_tx"):
        world.samples[name][slot.rows, slot.first : slot.last] *= level
    world.job(slot, name="serve")


def double_precision(world: World) -> None:
    """Physics in fp64, or a memory-bound solver: no tensor cores, and right so."""
    slot = world.place(int(world.rng.choice([1, 4, 8])), _long(world, 2, 16))
    if slot is None:
        return
    if world.rng.random() < 0.5:
        work = Work(tensor=0.0, fp64=_between(world, 0.15, 0.6), dram=0.4,
                    memory=_between(world, 0.1, 0.8))  # fmt: skip
    else:
        work = Work(tensor=_between(world, 0.0, 0.06), dram=_between(world, 0.56, 0.85),
                    memory=_between(world, 0.3, 0.9))  # fmt: skip
    run(world, slot, work)
    world.job(slot)


def short_session(world: World) -> None:
    """A notebook within its allowance, idle most of the time."""
    slot = world.place(1, int(_between(world, 60, 450)))
    if slot is None:
        return
    run(world, slot, Work(active=0.4, tensor=0.1, memory=_between(world, 0.05, 0.5), noise=0.3))
    still(world, slot, 20, slot.minutes - 5)
    world.job(slot, interactive=True, name="jupyter")


def used_session(world: World) -> None:
    """A long session that somebody works in, with lunch and meetings."""
    slot = world.place(1, int(_between(world, 600, 1000)))
    if slot is None:
        return
    run(world, slot, Work(active=0.5, tensor=0.12, memory=0.4, noise=0.3))
    for at in range(100, slot.minutes - 80, 190):
        still(world, slot, at, at + int(_between(world, 15, 75)))
    world.job(slot, interactive=True, name="jupyter")


def evaluation(world: World) -> None:
    """Bursts of generation with scoring on the host between them."""
    slot = world.place(int(world.rng.choice([1, 2, 8])), _long(world, 2, 10))
    if slot is None:
        return
    run(world, slot, Work(active=0.85, sms=0.6, tensor=0.14, dram=0.45, memory=0.85, noise=0.08,
                          nvlink=5e9, pause_every=int(_between(world, 35, 70)),
                          pause=int(_between(world, 8, 22))))  # fmt: skip
    world.job(slot, name="evaluate")


def prepares_first(world: World) -> None:
    """Half an hour of unpacking before training begins, an evaluation at the end."""
    slot = world.place(int(world.rng.choice([1, 4, 8])), int(_between(world, 400, 900)))
    if slot is None:
        return
    run(world, slot, Work(nvlink=1e10, tensor=_between(world, 0.2, 0.4)))
    still(world, slot, 0, int(_between(world, 15, 42)))
    stretch(world, slot, slot.minutes - int(_between(world, 15, 50)), slot.minutes,
            tensor_active=0.1, gpu_util=0.8)  # fmt: skip
    world.job(slot)


def busy_host(world: World) -> None:
    """Cores full, storage busy, and GPUs busy all the same."""
    slot = world.place(8, _long(world, 3, 10))
    if slot is None:
        return
    run(world, slot, Work(active=_between(world, 0.82, 0.95), cores=0.96, nvlink=1e10,
                          io_wait=_between(world, 0.05, 0.2), read=3e9,
                          metadata=_between(world, 50, 500)))  # fmt: skip
    number = world.job(slot)
    row = world.jobs[-1]
    row["cpu_s"] = 0.95 * row["cpus"] * (row["end_s"] - row["start_s"])
    assert number


def preempted(world: World) -> None:
    """Low priority: two or three attempts, each with a checkpoint shortly before its end."""
    number, user = "", f"u{int(world.rng.integers(0, 40)):02d}"
    for attempt in range(int(world.rng.integers(2, 4))):
        slot = world.place(4, int(_between(world, 60, 300)), kind=H100)
        if slot is None:
            return
        work = Work(nvlink=1e10, save_every=30, save=1)
        run(world, slot, work)
        number = world.job(slot, number, attempt, user=user, name="low-priority",
                           state="preempted")  # fmt: skip
        world.phase(number, "productive", slot.first, slot.last - 3, attempt)
        world.phase(number, "checkpoint", slot.last - 3, slot.last - 2, attempt)


def chained(world: World) -> None:
    """A chain that ends at its limit by design, and saves just before."""
    user = f"c{int(world.rng.integers(0, 90)):02d}"
    for _ in range(3):
        slot = world.place(8, 240)
        if slot is None:
            return
        work = Work(nvlink=1e10, save_every=60, save=1)
        run(world, slot, work)
        number = world.job(slot, user=user, name="chain", state="timeout", time_limit_s=240 * 60.0)
        trained(world, number, slot, work)
        world.phase(number, "checkpoint", slot.last - 3, slot.last - 2)


def failed_once(world: World) -> None:
    """A mistake, twice, then mended: as it happens."""
    user = f"f{int(world.rng.integers(0, 90)):02d}"
    for minutes, state in ((4, "failed"), (7, "failed"), (150, "completed")):
        slot = world.place(2, minutes)
        if slot is None:
            return
        run(world, slot, Work(start=2, nvlink=1e9))
        world.job(slot, user=user, name="mine", state=state, exit_code=int(state == "failed"))


def light(world: World) -> None:
    """Small models that are fine: little memory, much compute; or few hours of tinkering."""
    slot = world.place(int(world.rng.choice([1, 2])), _long(world, 0.5, 3))
    if slot is None:
        return
    run(world, slot, Work(active=_between(world, 0.55, 0.95), sms=0.6,
                          tensor=_between(world, 0.12, 0.3), memory=_between(world, 0.05, 0.2),
                          nvlink=1e9))  # fmt: skip
    world.job(slot)


def pipelined(world: World) -> None:
    """Pipeline stages that differ a little in work and memory."""
    slot = world.place(8, _long(world, 3, 12))
    if slot is None:
        return
    run(world, slot, Work(nvlink=2e10, tensor=0.4, memory=0.6))
    span = slice(slot.first, slot.last)
    part = np.linspace(0.88, 1.05, slot.rows.size)[:, None]
    world.samples["tensor_active"][slot.rows, span] *= part
    world.samples["memory_used"][slot.rows, span] *= np.linspace(1.3, 0.8, slot.rows.size)[:, None]
    world.job(slot)


def waited_its_turn(world: World) -> None:
    """A job that other jobs had to end for: it waits, and is not ready before."""
    slot = world.place(8, _long(world, 1, 5))
    if slot is None:
        return
    run(world, slot, Work(nvlink=1e10))
    start = world.time_s(slot.first)
    world.job(slot, submit_s=start - 8 * 3600, eligible_s=start - 300, reason="Dependency")


def stops_early(world: World) -> None:
    """A sweep whose trials mostly end early, under a limit that the best of them need."""
    user, limit = f"e{int(world.rng.integers(0, 90)):02d}", _between(world, 4, 16) * 3600
    for part in (
        *world.rng.uniform(0.02, 0.2, int(world.rng.integers(5, 9))),
        _between(world, 0.5, 0.95),
    ):
        slot = world.place(1, max(5, int(part * limit / 60)))
        if slot is None:
            return
        run(world, slot, Work(tensor=_between(world, 0.2, 0.4)))
        world.job(slot, user=user, name="search", time_limit_s=limit)


SOUND: tuple[tuple[Callable[[World], None], float], ...] = (
    (large_training, 6), (small_training, 14), (serving, 3), (double_precision, 4),
    (short_session, 4), (used_session, 2), (evaluation, 3), (prepares_first, 2), (busy_host, 2),
    (preempted, 1), (chained, 0.7), (failed_once, 1.5), (light, 4), (pipelined, 1),
    (waited_its_turn, 1), (stops_early, 0.5),
)  # fmt: skip
"""What runs in a fleet, and how often."""


def fill(world: World, number: int) -> None:
    """Let so many sound jobs run, and the errors that every fleet has."""
    makers, weights = [one for one, _ in SOUND], np.array([weight for _, weight in SOUND])
    for at in world.rng.choice(len(makers), number, p=weights / weights.sum()):
        makers[at](world)
    background(world)


def background(world: World) -> None:
    """Corrected errors here and there, which mean nothing."""
    rng, nodes = world.rng, len(world.kinds)
    for kind, per_day, of_gpu in (("ecc", 0.03, True), ("pcie", 0.02, True),
                                  ("infiniband", 0.15, False), ("nvlink", 0.01, True)):  # fmt: skip
        mean = per_day * MINUTES / 1440 * nodes * (PER_NODE if of_gpu else 1)
        for _ in range(int(rng.poisson(mean))):
            world.event(
                int(rng.integers(nodes)), float(rng.uniform(0, MINUTES)), kind,
                int(rng.integers(PER_NODE)) if of_gpu else None, count=float(rng.geometric(0.4)),
            )  # fmt: skip
