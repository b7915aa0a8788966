"""`verify_layouts`: one step of a small model under several layouts, compared with one device."""

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
from meshwright.run.nn.linear.fp8_linear import RECIPES
from meshwright.run.parallel.launch.rank_spawner import RanksFailedError, spawn_ranks
from meshwright.run.parallel.verify.deviation import (
    BaselineStep,
    Deviation,
    FirstDivergence,
    find_first_divergence,
    find_worst_by_kind,
    get_execution_order,
    list_deviations,
)
from meshwright.run.parallel.verify.shrunk_model import DEFAULT_MULTIPLE
from meshwright.run.parallel.verify.verification_step import (
    TORCH_DTYPES,
    FaultInjector,
    VerifyCase,
    run_verify_step,
)
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import Precision

MAX_RANKS = 8
"""Ranks that are run as processes of this machine."""
TIMEOUT_S = 300.0


class LayoutCheck(NamedTuple):
    """What came of one layout."""

    layout: Layout
    passed: bool
    worst_deviations: tuple[Deviation, ...]
    """Of activations, gradients and updates each the one nearest to its limit."""
    first_divergence: FirstDivergence | None
    """Where it begins to disagree."""
    deviations: tuple[Deviation, ...]
    """Of every tensor on every rank."""
    failure: str
    """Why it did not run to the end; empty where it did."""
    wall_s: float


def verify_layouts(
    asked: VerifyCase,
    layouts: Sequence[Layout],
    precision: Precision,
    *,
    inject_fault: FaultInjector | None = None,
) -> list[LayoutCheck]:
    """Run the step on one device and under each layout, all in one number format.

    `inject_fault` changes every rank of the layouts, not the one device.
    """
    check_layouts_supported(layouts, precision)
    _warm_up(asked)
    base = run_baseline(asked, precision)
    told = pickle.dumps(base)
    order = get_execution_order(asked.model)
    verdicts = []
    for asked_for in layouts:
        start = time.perf_counter()
        layout = replace(asked_for, precision=precision)
        try:
            by_rank = spawn_ranks(
                layout.gpus, _compared, asked, layout, told, inject_fault, timeout_s=TIMEOUT_S
            )
        except RanksFailedError as failed:
            took = time.perf_counter() - start
            verdicts.append(LayoutCheck(layout, False, (), None, (), _last_line(failed), took))
            continue
        found = [each for one in by_rank for each in one]
        first, worst = find_first_divergence(found, order), tuple(find_worst_by_kind(found))
        took = time.perf_counter() - start
        verdicts.append(LayoutCheck(layout, first is None, worst, first, tuple(found), "", took))
    return verdicts


def _warm_up(asked: VerifyCase) -> None:
    """Let the process that ranks are forked from load what they need, once for all of them."""
    made_by = getattr(asked.make_optimizer_step, "func", asked.make_optimizer_step)
    forkserver.set_forkserver_preload([__name__, made_by.__module__])
    forkserver.ensure_running()


def run_baseline(asked: VerifyCase, precision: Precision) -> BaselineStep:
    """Run the step on one device, in float32 and in a format; both at once where it is float32.

    Raises:
        InputError: the format cannot hold the gradients of one device (fp16 may overflow).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks do, so that one device adds up in the same order
    try:
        wanted = run_verify_step(asked, Layout(microbatch=asked.global_batch, precision="fp32"))
        if precision == "fp32":
            return BaselineStep(wanted, wanted)
        alone = run_verify_step(asked, Layout(precision=precision))
    finally:
        torch.set_num_threads(threads)
    if not math.isfinite(alone.grad_norm):
        what = f"gradients of one device are not finite in {precision}: there is nothing to compare"
        raise InputError([Problem("precision", what, "use bf16 or fp32")])
    return BaselineStep(wanted, alone)


def _compared(
    asked: VerifyCase, layout: Layout, told: bytes, inject_fault: FaultInjector | None
) -> list[Deviation]:
    mine = run_verify_step(asked, layout, inject_fault)
    base: BaselineStep = pickle.loads(told)  # noqa: S301 - from the process that started this one
    rank = dist.get_rank() if dist.is_initialized() else 0
    return list_deviations(asked.model, layout, rank, mine, base)


def get_width_multiple(precision: str) -> int:
    """Return what a small model's widths have to be multiples of in a format."""
    return RECIPES[precision].alignment if precision in RECIPES else DEFAULT_MULTIPLE


def check_layouts_supported(layouts: Sequence[Layout], precision: str) -> None:
    """Refuse what cannot be run on this machine."""
    found = []
    if precision not in TORCH_DTYPES:
        what = f"{precision} is not computed on a processor"
        found.append(Problem("precision", what, f"use one of {', '.join(TORCH_DTYPES)}"))
    for layout in layouts:
        if layout.gpus > MAX_RANKS:
            what = f"has {layout.gpus} ranks, more than the {MAX_RANKS} that are run here"
            found.append(Problem("layout", what, "use smaller degrees, or --dry-run"))
    if found:
        raise InputError(found)


def _last_line(failed: RanksFailedError) -> str:
    """Return what the first rank to fail said."""
    outcomes = enumerate(failed.rank_results)
    bad = [(one.wall_s, rank, one) for rank, one in outcomes if one.error or one.exit_code != 0]
    _, rank, one = min(bad, key=lambda each: each[:2])
    said = one.error or f"ended with exit code {one.exit_code}"
    return f"rank {rank}: {said}"
