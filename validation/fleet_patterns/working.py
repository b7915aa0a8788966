"""What work looks like in the samples: levels, phases, noise; of sound jobs and of faulty ones."""

from typing import NamedTuple

import numpy as np

from validation.fleet_patterns.world import PER_NODE, Slot, World


class Work(NamedTuple):
    """How hard a job works its GPUs and hosts, as shares unless said otherwise."""

    active: float = 0.97
    sms: float = 0.8
    tensor: float = 0.4
    dram: float = 0.4
    fp64: float = 0.0
    fp32: float = 0.05
    memory: float = 0.7
    pcie: float = 0.02
    nvlink: float = 0.0
    """Bytes a second."""
    cores: float = 0.3
    io_wait: float = 0.01
    read: float = 2e8
    metadata: float = 30.0
    noise: float = 0.04
    start: int = 4
    """Minutes before the first step."""
    save_every: int = 0
    save: int = 2
    """Minutes between checkpoints, and of one."""
    pause_every: int = 0
    pause: int = 10
    """Minutes between pauses in which nothing runs, and of one."""


def run(world: World, slot: Slot, work: Work, until: int | None = None) -> None:
    """Write into the samples what a job does in its slot, or in the first minutes of it."""
    rng = world.rng
    rows, first = slot.rows, slot.first
    length = slot.minutes if until is None else until
    if length <= 0:
        return
    on = np.ones(length)
    on[: min(work.start, length)] = 0.05
    for every, pause in ((work.save_every, work.save), (work.pause_every, work.pause)):
        for at in range(every, length, every) if every else ():
            on[at : at + pause] = 0.0
    shape = (rows.size, length)
    # Jobs drift together, each GPU has noise of its own.
    drift = 1 + 0.5 * work.noise * np.cumsum(rng.normal(0, 0.05, length))
    level = on * np.clip(drift, 0.9, 1.1) * rng.normal(1, work.noise, shape)
    level *= rng.normal(1, 0.01, (rows.size, 1))
    last = first + length
    put = world.samples
    # An SM that holds work is work on the GPU: it cannot be active for longer than the whole is.
    for name, share in (("gpu_util", work.active), ("sm_active", min(work.sms, work.active)),
                        ("tensor_active", work.tensor), ("dram_active", work.dram),
                        ("fp64_active", work.fp64), ("fp32_active", work.fp32)):  # fmt: skip
        put[name][rows, first:last] = np.clip(share * level, 0, 1)
    kinds = [world.kinds[row // PER_NODE] for row in rows]
    watts = np.array([kind.watts for kind in kinds])[:, None]
    load = np.clip(0.25 + 0.3 * work.sms * work.active + 1.1 * work.tensor + 0.25 * work.dram
                   + 0.6 * work.fp64 + 0.5 * work.fp32, 0, 1.15)  # fmt: skip
    power = np.clip(watts * (0.12 + (load - 0.12) * np.clip(level, 0, 1.1)), 0.1 * watts, watts)
    put["power_w"][rows, first:last] = power * rng.normal(1, 0.01, shape)
    busy = level * work.active > 0.1
    # What wants more watts than there are gets lower clocks; that is as it should be.
    over = max(0.0, load - 0.9)
    clock = np.array([kind.clock for kind in kinds])[:, None] * (1 - 0.5 * over)
    own = rng.normal(1, 0.01, shape) * world.silicon[rows][:, None]
    clock = clock * (own if over else rng.normal(1, 0.0005, shape))
    # A GPU that is slow for a hidden reason is not steadily so.
    clock = clock * np.where(world.slow[rows][:, None] < 1, rng.normal(1, 0.015, shape), 1.0)
    clock = np.minimum(clock * world.slow[rows][:, None],
                       np.array([kind.clock for kind in kinds])[:, None])  # fmt: skip
    rest = put["sm_clock_mhz"][rows, first:last]
    put["sm_clock_mhz"][rows, first:last] = np.where(busy, clock, rest)
    world.throttle[rows, first:last] = np.where(
        busy, np.where(rng.random(shape) < (0.8 if over else 0.01), 4, 0), 1
    )
    heat = 32 + 38 * power / watts + rng.normal(0, 1, shape)
    put["temperature_c"][rows, first:last] = heat
    memory = np.array([kind.memory for kind in kinds])[:, None]
    ramp = np.minimum(1.0, np.arange(length) / max(work.start, 1))
    filled = np.maximum(work.memory * memory * ramp * rng.normal(1, 0.01, (rows.size, 1)), 5e8)
    put["memory_used"][rows, first:last] = np.minimum(filled, 0.99 * memory)
    pcie = np.array([kind.pcie for kind in kinds])[:, None]
    put["pcie_rx"][rows, first:last] = np.clip(work.pcie * pcie * level, 0, 0.95 * pcie)
    put["nvlink_tx"][rows, first:last] = np.maximum(work.nvlink * level, 0)
    _hosts(world, slot, work, length)


def _hosts(world: World, slot: Slot, work: Work, length: int) -> None:
    span = slice(slot.first, slot.first + length)
    for node, gpus in slot.places:
        part = len(gpus) / PER_NODE
        hosts = world.hosts
        hosts["cpu_util"][node, span] = np.minimum(
            hosts["cpu_util"][node, span] + work.cores * part, 1.0
        )
        hosts["io_wait"][node, span] += work.io_wait * part
        hosts["storage_read"][node, span] += work.read * part
        hosts["metadata_ops"][node, span] += work.metadata * part
        hosts["memory_used"][node, span] += 0.4 * part * world.kinds[node].host_memory


def stretch(world: World, slot: Slot, first: int, last: int, **levels: float) -> None:
    """Overwrite a stretch of a job with other levels, given by metric."""
    rows, shape = slot.rows, (slot.rows.size, last - first)
    for name, value in levels.items():
        noise = world.rng.normal(1, 0.02, shape) if value else 1.0
        world.samples[name][rows, slot.first + first : slot.first + last] = value * noise


def still(world: World, slot: Slot, first: int, last: int) -> None:
    """Let nothing run for a stretch of a job, its memory kept."""
    zero = dict.fromkeys(("gpu_util", "sm_active", "tensor_active", "dram_active", "fp64_active",
                          "fp32_active", "pcie_rx", "nvlink_tx"), 0.0)  # fmt: skip
    stretch(world, slot, first, last, **zero)
    rows = slot.rows
    for row in rows:
        kind = world.kinds[row // PER_NODE]
        span = slice(slot.first + first, slot.first + last)
        world.samples["power_w"][row, span] = 0.12 * kind.watts
        world.samples["sm_clock_mhz"][row, span] = 0.2 * kind.clock
        world.throttle[row, span] = 1
