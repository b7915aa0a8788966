"""`verify`: one step of a small model under several layouts, each held against one device."""

import math
import pickle
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.run.nn.fp8_linear import RECIPES
from meshwright.run.parallel.collective.launch import RanksFailed, launch
from meshwright.run.parallel.verify.compare import (
    Baseline,
    Deviation,
    First,
    deviations,
    first_off,
    in_execution_order,
    worst_by_kind,
)
from meshwright.run.parallel.verify.shrink import MULTIPLE
from meshwright.run.parallel.verify.step import DTYPES, Asked, Meddle, run_step
from meshwright.spec.layout import Layout
from meshwright.spec.layout.kinds import Precision

MOST_RANKS = 8
"""Ranks that are run as processes of this machine."""
PATIENCE_S = 300.0


class Verdict(NamedTuple):
    """What came of one layout."""

    layout: Layout
    agrees: bool
    worst: tuple[Deviation, ...]
    """Of activations, gradients and updates each the one nearest to its limit."""
    first: First | None
    """Where it begins to disagree."""
    deviations: tuple[Deviation, ...]
    """Of every tensor on every rank."""
    failure: str
    """Why it did not run to the end; empty where it did."""
    wall_s: float


def verify(
    asked: Asked, layouts: Sequence[Layout], precision: Precision, *, meddle: Meddle | None = None
) -> list[Verdict]:
    """Run the step on one device and under each layout, all in one number format.

    `meddle` changes every rank of the layouts, not the one device.
    """
    check(layouts, precision)
    _warm_up(asked)
    base = baseline(asked, precision)
    told = pickle.dumps(base)
    order = in_execution_order(asked.model)
    verdicts = []
    for asked_for in layouts:
        start = time.perf_counter()
        layout = replace(asked_for, precision=precision)
        try:
            by_rank = launch(
                layout.gpus, _compared, asked, layout, told, meddle, timeout_s=PATIENCE_S
            )
        except RanksFailed as failed:
            took = time.perf_counter() - start
            verdicts.append(Verdict(layout, False, (), None, (), _last_line(failed), took))
            continue
        found = [each for one in by_rank for each in one]
        first, worst = first_off(found, order), tuple(worst_by_kind(found))
        took = time.perf_counter() - start
        verdicts.append(Verdict(layout, first is None, worst, first, tuple(found), "", took))
    return verdicts


def _warm_up(asked: Asked) -> None:
    """Let the process that ranks are forked from load what they need, once for all of them."""
    made_by = getattr(asked.make_updates, "func", asked.make_updates)
    forkserver.set_forkserver_preload([__name__, made_by.__module__])
    forkserver.ensure_running()


def baseline(asked: Asked, precision: Precision) -> Baseline:
    """Run the step on one device, in float32 and in a format; both at once where it is float32.

    Raises:
        InputError: the format cannot hold the gradients of one device (fp16 may overflow).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks do, so that one device adds up in the same order
    try:
        wanted = run_step(asked, Layout(microbatch=asked.sequences, precision="fp32"))
        if precision == "fp32":
            return Baseline(wanted, wanted)
        alone = run_step(asked, Layout(precision=precision))
    finally:
        torch.set_num_threads(threads)
    if not math.isfinite(alone.norm):
        what = f"gradients of one device are not finite in {precision}: there is nothing to compare"
        raise InputError([Problem("precision", what, "use bf16 or fp32")])
    return Baseline(wanted, alone)


def _compared(asked: Asked, layout: Layout, told: bytes, meddle: Meddle | None) -> list[Deviation]:
    mine = run_step(asked, layout, meddle)
    base: Baseline = pickle.loads(told)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return deviations(asked.model, layout, rank, mine, base)


def multiple_of(precision: str) -> int:
    """Return what a small model's widths have to be multiples of in a format."""
    return RECIPES[precision].multiple if precision in RECIPES else MULTIPLE


def check(layouts: Sequence[Layout], precision: str) -> None:
    """Refuse what cannot be run on this machine."""
    found = []
    if precision not in DTYPES:
        what = f"{precision} is not computed on a processor"
        found.append(Problem("precision", what, f"use one of {', '.join(DTYPES)}"))
    for layout in layouts:
        if layout.gpus > MOST_RANKS:
            what = f"has {layout.gpus} ranks, more than the {MOST_RANKS} that are run here"
            found.append(Problem("layout", what, "use smaller degrees, or --dry-run"))
    if found:
        raise InputError(found)


def _last_line(failed: RanksFailed) -> str:
    """Return what the first rank to fail said."""
    outcomes = enumerate(failed.outcomes)
    bad = [(one.wall_s, rank, one) for rank, one in outcomes if one.error or one.exit_code != 0]
    _, rank, one = min(bad, key=lambda each: each[:2])
    said = one.error or f"ended with exit code {one.exit_code}"
    return f"rank {rank}: {said}"
