"""The Triton kernel that carries out tasks: add up some places, write the sum to some places.

One kernel serves both ways of running. Launched once per step, the end of a launch is what lets
the next step see what this one wrote. Launched once for all steps, its programs meet after each
step, for which all of them must be on the device at the same time.

Sums of 16-bit numbers are formed in float32 and rounded once per task. A copy keeps every bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from meshwright.run.kernels.collective import kernel_program

FIELDS = tl.constexpr(kernel_program.FIELDS)
FIRST_TILE = tl.constexpr(kernel_program.FIRST_TILE)
ELEMENTS = tl.constexpr(kernel_program.ELEMENTS)
SOURCE = tl.constexpr(kernel_program.SOURCE)
SECOND_SOURCE = tl.constexpr(kernel_program.SECOND_SOURCE)
TARGET = tl.constexpr(kernel_program.TARGET)
SOURCES = tl.constexpr(kernel_program.SOURCES)
TARGETS = tl.constexpr(kernel_program.TARGETS)
MORE = tl.constexpr(kernel_program.MORE)


@triton.jit
def step_kernel(
    buffer,
    task_of_tile,
    tasks,
    more,
    first_tile,
    TILE: tl.constexpr,
    SUM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Carry out one step, with a program for each of its tiles.

    `OVERLAPS` says that the launch before this one may still be running: what does not depend on
    it is done before it is waited for.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    tile = first_tile + tl.program_id(0)
    task = _task(task_of_tile, tasks, tile)
    if OVERLAPS:
        gdc_wait()
    _move_tile(buffer, more, tile, task, TILE, SUM)


@triton.jit
def persistent_kernel(
    buffer,
    task_of_tile,
    tasks,
    more,
    step_tiles,
    arrived,
    steps,
    TILE: tl.constexpr,
    SUM: tl.constexpr,
):
    """Carry out all steps, with any number of programs that run at the same time."""
    programs = tl.num_programs(0)
    before = 0
    for step in range(steps):
        begin = tl.load(step_tiles + step)
        end = tl.load(step_tiles + step + 1)
        if (step > 0) & (programs > 1):
            _wait(arrived, before)
        for tile in range(begin + tl.program_id(0), end, programs):
            # Looked up for each tile anew: Triton 3.6 forgets to update a number that is carried
            # from one round of a loop to the next and ends a loop inside (3.9 does not).
            _move_tile(buffer, more, tile, _task(task_of_tile, tasks, tile), TILE, SUM)
        if (step + 1 < steps) & (programs > 1):
            before = _arrive(arrived)


@triton.jit
def _task(task_of_tile, tasks, tile):
    """Look up the row of the task that a tile belongs to."""
    row = tasks + tl.load(task_of_tile + tile).to(tl.int64) * FIELDS
    return (
        tl.load(row + FIRST_TILE),
        tl.load(row + ELEMENTS),
        tl.load(row + SOURCE),
        tl.load(row + SECOND_SOURCE),
        tl.load(row + TARGET),
        tl.load(row + SOURCES),
        tl.load(row + TARGETS),
        tl.load(row + MORE),
    )


@triton.jit
def _move_tile(buffer, more, tile, task, TILE: tl.constexpr, SUM: tl.constexpr):
    start = (tile - task[FIRST_TILE]) * TILE
    # Slots begin at multiples of 16 elements and so do tiles: with that said, Triton loads and
    # stores 16 bytes per thread.
    lane = tl.arange(0, TILE)
    left = tl.multiple_of(tl.minimum(task[ELEMENTS] - start, TILE).to(tl.int32), 16)
    inside = lane < left
    start = tl.multiple_of(start, 16)
    here = buffer + tl.multiple_of(task[SOURCE] + start, 16) + lane
    there = buffer + tl.multiple_of(task[TARGET] + start, 16) + lane
    rest = more + task[MORE]
    # .cg reads from the second-level cache: the first level may hold what an earlier step saw.
    if task[SOURCES] == 1:
        value = tl.load(here, mask=inside, cache_modifier=".cg")
        tl.store(there, value, mask=inside)
        for index in range(task[TARGETS] - 1):
            other = tl.multiple_of(tl.load(rest + index) + start, 16)
            tl.store(buffer + other + lane, value, mask=inside)
    else:
        second = buffer + tl.multiple_of(task[SECOND_SOURCE] + start, 16) + lane
        # Both loads are under way before either is waited for.
        one = tl.load(here, mask=inside, cache_modifier=".cg")
        two = tl.load(second, mask=inside, cache_modifier=".cg")
        total = one.to(SUM) + two.to(SUM)
        for index in range(task[SOURCES] - 2):
            other = tl.multiple_of(tl.load(rest + index) + start, 16)
            further = tl.load(buffer + other + lane, mask=inside, cache_modifier=".cg")
            total += further.to(SUM)
        tl.store(there, total.to(buffer.dtype.element_ty), mask=inside)


@triton.jit
def _arrive(arrived):
    """Tell the other programs that this one has done its step; returns what `_wait` needs.

    The counter needs no reset: one program adds 2³¹ less the number of the others, which add 1
    each, so that every meeting turns the sign and leaves the low bits at zero. CUDA's cooperative
    groups synchronize a grid the same way.
    """
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, 2147483647 - (others - 1), 1)
    tl.debug_barrier()
    return tl.atomic_add(arrived, share, sem="release", scope="gpu")


@triton.jit
def _wait(arrived, before):
    """Wait until all programs have arrived, and see what they wrote."""
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
