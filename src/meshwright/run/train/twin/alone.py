"""Training steps of one device: timed as they come, and some of them recorded kernel by kernel.

A chip at rest is faster than one that trains, so steps run for a while before any counts. Nobody
waits for the device between steps: its own events mark where each ends. Tokens are random and come
from the host through pinned memory, as a loader hands them over.
"""

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.run.kernels.products import fastest_products
from meshwright.run.train.data.batch import Batch, Sequence
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.profile import ChosenSteps, StepProfiler
from meshwright.run.train.readback import Moment
from meshwright.run.train.step import TrainStep, make_decoder
from meshwright.run.train.twin.pieces import SETTINGS
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.timeline import Timeline, read

WARM_STEPS = 3
"""Fewest before the first that counts: kernels are compiled, memory is asked for."""
AHEAD = 2
"""Steps that the host may be ahead of the device."""
BATCHES = 4
"""Different batches, taken in turn."""


class Alone(NamedTuple):
    """Steps of one device."""

    steps_s: tuple[float, ...]
    """What each took."""
    peak_bytes: int
    """Most that tensors held at once; 0 where nobody counts, as on a processor."""
    timeline: Timeline
    """The recorded ones, which came after those that were timed."""
    recorded: int
    """How many those are."""
    losses: tuple[float, float]
    """Of the first step and of the last: random tokens teach little, but a broken step shows."""


class Times(NamedTuple):
    """How long things go on."""

    heat_s: float = 4.0
    """Before the first step that counts."""
    least_s: float = 4.0
    """Steps are timed for so long at least,"""
    least_steps: int = 5
    """and so many."""
    recorded: int = 2


def run_alone(
    model: Model, layout: Layout, *, length: int, sequences: int, folder: Path, times: Times
) -> Alone:
    """Train on random tokens for a while; the timeline is written into a folder and read back."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    step = _step(model, layout, device, length=length, sequences=sequences)
    try:
        return _run(step, device, folder, times)
    finally:
        del step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _run(
    step: Callable[[], torch.Tensor], device: torch.device, folder: Path, times: Times
) -> Alone:
    first = float(step())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _go_on(step, device, times.heat_s, WARM_STEPS)
    taken = _go_on(step, device, times.least_s, times.least_steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    profiler = StepProfiler(ChosenSteps(1, times.recorded), folder)
    for number in range(1, times.recorded + 1):
        with profiler.step(number):
            loss = step()
    profiler.close()
    return Alone(tuple(taken), peak, read(folder), times.recorded, (first, float(loss)))


def _go_on(
    step: Callable[[], torch.Tensor], device: torch.device, seconds: float, steps: int
) -> list[float]:
    """Take steps for a time, and a number of them, at least; return how long each took."""
    moments, begun = [Moment(device)], time.perf_counter()
    while len(moments) <= steps or time.perf_counter() - begun < seconds:
        step()
        moments.append(Moment(device))
        if len(moments) > AHEAD:
            moments[-1 - AHEAD].wait()
    moments[-1].wait()
    return [after.seconds_after(before) for before, after in pairwise(moments)]


def _step(
    model: Model, layout: Layout, device: torch.device, *, length: int, sequences: int
) -> Callable[[], torch.Tensor]:
    """Return a call that takes the next step and hands back its loss, still on the device."""
    decoder = make_decoder(model, layout, device=device, products=fastest_products(device))
    optimizer = make_optimizer(decoder.named_parameters(), layout, SETTINGS, total_steps=10**6)
    train = TrainStep(decoder, optimizer, microbatch=layout.microbatch)
    whole = Sequence(documents=1, longest=length, targets=length, filled=length)
    shape = (BATCHES, sequences, length + 1)
    drawn = torch.randint(0, model.vocab, shape, generator=torch.Generator().manual_seed(0))
    drawn = drawn.pin_memory() if device.type == "cuda" else drawn
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        rows = drawn[done % BATCHES].to(device, non_blocking=True)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        figures = train(Batch(done, tokens, labels, None, None, (whole,) * sequences), done)
        done += 1
        return figures.losses.mean

    return step
