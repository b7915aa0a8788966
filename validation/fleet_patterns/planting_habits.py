"""Faults that are habits, and those of checkpoints: see `planting`."""

from validation.fleet_patterns.planting import between, hours_of, placed, plants
from validation.fleet_patterns.sound import trained
from validation.fleet_patterns.working import Work, run
from validation.fleet_patterns.world import GIB, H100, World


@plants("crash-loop")
def crash_loop(world: World) -> None:
    """A script that fails at once, in a loop."""
    user, found, hours = f"k{int(world.rng.integers(99))}", [], 0.0
    node = int(world.rng.choice([at for at, kind in enumerate(world.kinds) if kind is H100
                                 and at not in world.closed]))  # fmt: skip
    for _ in range(int(world.rng.integers(5, 25))):
        slot = placed(
            world, 4, between(world, 3, 28), only=[node], delay=int(between(world, 1, 30))
        )
        run(world, slot, Work(start=2, nvlink=1e9))
        found.append(world.job(slot, user=user, name="train-v2", state="failed", exit_code=1))
        hours += hours_of(slot, slot.minutes)
    world.label("crash-loop", found, hours=hours)


@plants("requeue-storm")
def requeue_storm(world: World) -> None:
    """A job that is requeued and never gets far."""
    number = ""
    for attempt in range(int(world.rng.integers(4, 12))):
        slot = placed(world, 8, between(world, 6, 80))
        run(world, slot, Work(start=2, nvlink=1e10))
        state = str(world.rng.choice(["requeued", "node_fail", "preempted"]))
        number = world.job(slot, number, attempt, user="storm", name="big", state=state)
    world.label("requeue-storm", [number])


@plants("repeated-error")
def mistake(world: World) -> None:
    """The same exit code in many scripts."""
    user, found = f"m{int(world.rng.integers(99))}", []
    code = int(world.rng.choice([2, 126, 127, 139]))
    for at in range(int(world.rng.integers(5, 14))):
        slot = placed(world, 4, between(world, 2, 12))
        run(world, slot, Work(start=2, nvlink=1e9))
        found.append(world.job(slot, user=user, name=f"try-{at}", state="failed", exit_code=code))
    world.label("repeated-error", found)


@plants("out-of-memory-again")
def out_of_memory(world: World) -> None:
    """The same request, too small each time."""
    user, found = f"o{int(world.rng.integers(99))}", []
    for _ in range(int(world.rng.integers(3, 7))):
        slot = placed(world, 4, between(world, 40, 200))
        run(world, slot, Work(nvlink=1e9))
        found.append(world.job(slot, user=user, name="vit", state="out_of_memory",
                               memory_requested=64 * GIB, memory_peak=64 * GIB))  # fmt: skip
    world.label("out-of-memory-again", found)


@plants("always-hits-time-limit")
def hits_limit(world: World) -> None:
    """Long runs that save nothing and are cut off."""
    user, found, hours = f"z{int(world.rng.integers(99))}", [], 0.0
    limit = int(between(world, 120, 400))
    for _ in range(int(world.rng.integers(3, 6))):
        slot = placed(world, 4, limit)
        run(world, slot, Work(nvlink=1e10))
        found.append(
            world.job(slot, user=user, name="long", state="timeout", time_limit_s=limit * 60.0)
        )
        hours += hours_of(slot, limit)
    world.label("always-hits-time-limit", found, hours=hours)


@plants("short-job-swarm")
def swarm(world: World) -> None:
    """A job for each of a hundred small tasks."""
    found = []
    for _ in range(int(world.rng.integers(45, 140))):
        slot = placed(world, 1, 2, delay=1)
        found.append(world.job(slot, user="swarm", name="tiny"))
        row = world.jobs[-1]
        row["end_s"] = row["start_s"] + between(world, 20, 90)
        world.held[-1]["end_s"] = row["end_s"]
    world.label("short-job-swarm", found)


@plants("bad-checkpoint-interval")
def bad_interval(world: World) -> None:
    """A checkpoint every few minutes."""
    slot = placed(world, 16, between(world, 300, 1200), nodes=2, kind=H100)
    every, pause = between(world, 4, 40), between(world, 0.7, 2.5)
    work = Work(nvlink=2e10, save_every=int(every), save=max(1, round(pause)))
    run(world, slot, work)
    number = world.job(slot)
    trained(world, number, slot, work, pause)
    world.label("bad-checkpoint-interval", [number])


@plants("slow-checkpoints")
def slow_checkpoints(world: World) -> None:
    """A checkpoint that takes minutes."""
    slot = placed(world, 16, between(world, 400, 1200), nodes=2, kind=H100)
    every = between(world, 35, 90)
    pause = every * between(world, 0.04, 0.25)
    work = Work(nvlink=2e10, save_every=int(every), save=max(1, round(pause)))
    run(world, slot, work)
    number = world.job(slot)
    trained(world, number, slot, work, pause)
    part = pause / (pause + int(every))
    world.label("slow-checkpoints", [number], hours=hours_of(slot, slot.minutes) * part)


@plants("never-checkpointed")
def never_checkpointed(world: World) -> None:
    """All or nothing, and then nothing."""
    slot = placed(world, 16, between(world, 370, 1400), nodes=2, kind=H100)
    run(world, slot, Work(nvlink=2e10))
    number = world.job(slot, state=str(world.rng.choice(["failed", "node_fail", "timeout"])))
    world.phase(number, "productive", slot.first + 5, slot.last)
    world.label("never-checkpointed", [number], hours=hours_of(slot, slot.minutes))
