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

from meshwright.run.kernels.gemm.gemm import select_gemm_backend
from meshwright.run.train.async_metrics import DeviceTimestamp
from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.profiling.layer_timing import TIMING_OPTIMIZER
from meshwright.run.train.profiling.step_profiler import ProfiledSteps, StepProfiler
from meshwright.run.train.train_step import TrainStep
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.timeline import Timeline, read_timeline

WARMUP_STEPS = 3
"""Fewest before the first that counts: kernels are compiled, memory is asked for."""
PREFETCH_STEPS = 2
"""Steps that the host may be ahead of the device."""
NUM_BATCHES = 4
"""Different batches, taken in turn."""


class SingleDeviceTiming(NamedTuple):
    """Steps of one device."""

    step_times_s: tuple[float, ...]
    """What each took."""
    peak_bytes: int
    """Most that tensors held at once; 0 where nobody counts, as on a processor."""
    timeline: Timeline
    """The recorded ones, which came after those that were timed."""
    profiled_steps: int
    """How many those are."""
    first_and_last_loss: tuple[float, float]
    """Of the first step and of the last: random tokens teach little, but a broken step shows."""


class TimingBudget(NamedTuple):
    """How long things go on."""

    warmup_s: float = 4.0
    """Before the first step that counts."""
    min_s: float = 4.0
    """Steps are timed for so long at least,"""
    min_steps: int = 5
    """and so many."""
    profiled_steps: int = 2


def time_single_device(
    model: Model, layout: Layout, *, length: int, sequences: int, folder: Path, times: TimingBudget
) -> SingleDeviceTiming:
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
    step: Callable[[], torch.Tensor], device: torch.device, folder: Path, times: TimingBudget
) -> SingleDeviceTiming:
    first = float(step())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _go_on(step, device, times.warmup_s, WARMUP_STEPS)
    taken = _go_on(step, device, times.min_s, times.min_steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    profiler = StepProfiler(ProfiledSteps(1, times.profiled_steps), folder)
    for number in range(1, times.profiled_steps + 1):
        with profiler.step(number):
            loss = step()
    profiler.close()
    return SingleDeviceTiming(
        tuple(taken), peak, read_timeline(folder), times.profiled_steps, (first, float(loss))
    )


def _go_on(
    step: Callable[[], torch.Tensor], device: torch.device, seconds: float, steps: int
) -> list[float]:
    """Take steps for a time, and a number of them, at least; return how long each took."""
    moments, begun = [DeviceTimestamp(device)], time.perf_counter()
    while len(moments) <= steps or time.perf_counter() - begun < seconds:
        step()
        moments.append(DeviceTimestamp(device))
        if len(moments) > PREFETCH_STEPS:
            moments[-1 - PREFETCH_STEPS].wait()
    moments[-1].wait()
    return [after.elapsed_since_s(before) for before, after in pairwise(moments)]


def _step(
    model: Model, layout: Layout, device: torch.device, *, length: int, sequences: int
) -> Callable[[], torch.Tensor]:
    """Return a call that takes the next step and hands back its loss, still on the device."""
    decoder = make_decoder(model, layout, device=device, gemm=select_gemm_backend(device))
    optimizer = make_optimizer(
        decoder.named_parameters(), layout, TIMING_OPTIMIZER, total_steps=10**6
    )
    train = TrainStep(decoder, optimizer, microbatch=layout.microbatch)
    whole = SequenceInfo(
        documents=1, max_document_length=length, num_targets=length, num_tokens=length
    )
    shape = (NUM_BATCHES, sequences, length + 1)
    drawn = torch.randint(0, model.vocab, shape, generator=torch.Generator().manual_seed(0))
    drawn = drawn.pin_memory() if device.type == "cuda" else drawn
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        rows = drawn[done % NUM_BATCHES].to(device, non_blocking=True)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        figures = train(TrainBatch(done, tokens, labels, None, None, (whole,) * sequences), done)
        done += 1
        return figures.losses.mean_loss

    return step
