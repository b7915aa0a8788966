"""How long every action of a schedule takes, and what that time is spent on.

The pieces are those of the closed form (`stage_time`, `step`), cut by chunk and by pass. Nothing
here knows when an action runs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.schedule import Action, Schedule, groups
from meshwright.predict.run import Run
from meshwright.predict.stage_time import ChunkTime, StageTime, chunk_times
from meshwright.predict.step import sharded_exchange
from meshwright.spec.layout import rank_parameters

Floats = npt.NDArray[np.float64]


class Pieces(NamedTuple):
    """Seconds of one action by what they are spent on, in the order they are spent."""

    recompute: float = 0.0
    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    """Exposed gathers and scatters of fully sharded parameters."""

    @property
    def waits(self) -> float:
        """The exposed communication."""
        return self.tp + self.cp + self.ep + self.dp

    @property
    def total(self) -> float:
        """The whole action."""
        return self.recompute + self.compute + self.waits


def pieces_of_actions(
    run: Run,
    schedule: Schedule,
    *,
    slowdown: Mapping[int, float] | None = None,
    jitter_cv: float = 0.0,
    seed: int = 0,
) -> list[Floats]:
    """Return for every rank the pieces of each of its actions, a row per action.

    Where two actions are joined, the first row holds what both take together and the second only
    how long it computes beside the first.
    """
    slow = dict(slowdown or {})
    _check(slow, jitter_cv, schedule.ranks)
    tables = _tables(run, schedule)
    draw = np.random.default_rng(seed)
    # A log-normal factor with mean 1 and this coefficient of variation.
    sigma = float(np.sqrt(np.log1p(jitter_cv * jitter_cv)))
    found = []
    for rank, lane in enumerate(schedule.actions):
        rows = np.array(list(_rows(run, tables[rank], lane)), dtype=np.float64)
        rows = rows.reshape(len(lane), len(Pieces._fields)) * slow.get(rank, 1.0)
        if jitter_cv:
            factor = draw.lognormal(-sigma * sigma / 2, sigma, len(lane))
            joined = np.flatnonzero([action.joined for action in lane])
            factor[joined] = factor[joined - 1]  # both run side by side
            rows *= factor[:, None]
        found.append(rows)
    return found


def _check(slowdown: Mapping[int, float], jitter_cv: float, ranks: int) -> None:
    problems = []
    for rank, factor in slowdown.items():
        if not 0 <= rank < ranks:
            fix = f"use 0 to {ranks - 1}"
            problems.append(Problem("slowdown", f"{rank!r} is not a pipeline rank", fix))
        if not 0 < factor < float("inf"):
            what = f"{factor!r} is not a factor"
            problems.append(Problem(f"slowdown.{rank}", what, "use 1.1 for a tenth slower"))
    if not 0 <= jitter_cv < float("inf"):
        what = f"{jitter_cv!r} is not a coefficient of variation"
        problems.append(Problem("jitter_cv", what, "use a number from 0"))
    if problems:
        raise InputError(problems)


Table = dict[tuple[str, int], Pieces]
"""The pieces of a pass over a chunk."""


def _tables(run: Run, schedule: Schedule) -> list[Table]:
    """Return for every rank what each of its passes takes."""
    times = chunk_times(run)
    held_parameters = rank_parameters(run.layout, run.model) if run.layout.zero == 3 else ()
    found = []
    for rank in range(schedule.ranks):
        held = schedule.chunks_of(rank)
        late = 0.0
        if held_parameters:
            whole = _together([times[chunk].whole for chunk in held])
            late = sharded_exchange(run, whole, held_parameters[rank]) / whole.total
        found.append({key: one for chunk in held for key, one in _passes(times, chunk, late)})
    return found


def _together(some: list[StageTime]) -> StageTime:
    return StageTime(*(sum(column) for column in zip(*some, strict=True)))


def _passes(
    times: tuple[ChunkTime, ...], chunk: int, late: float
) -> Iterator[tuple[tuple[str, int], Pieces]]:
    """Cut a chunk's time into its passes; `late` is exposed sharding per second of pass."""
    whole, tp, cp, ep = times[chunk]
    forward = Pieces(0.0, whole.forward - tp - cp - ep, tp, cp, ep, late * whole.forward)
    waits = whole.tp - tp, whole.cp - cp, whole.ep - ep
    compute = whole.backward - whole.recompute - sum(waits)
    backward = Pieces(whole.recompute, compute, *waits, late * whole.backward)
    weight = whole.weight_gradient
    yield ("F", chunk), forward
    yield ("B", chunk), backward
    yield ("I", chunk), backward._replace(compute=compute - weight)
    yield ("W", chunk), Pieces(compute=weight)


def _rows(run: Run, table: Table, lane: tuple[Action, ...]) -> Iterator[Pieces]:
    """Give every action of a rank its pieces, joined pairs theirs."""
    for group in groups(lane):
        own = table[group[0].op, group[0].chunk]
        for other in group[1:]:
            own = _overlapped(run, own, table[other.op, other.chunk])
        yield own
        for _ in group[1:]:
            yield Pieces(compute=own.recompute + own.compute)


def _overlapped(run: Run, one: Pieces, other: Pieces) -> Pieces:
    """A forward and a backward together: each hides the other's exchange between experts."""
    both = Pieces(*(a + b for a, b in zip(one, other, strict=True)))
    if run.layout.overlap_ep:
        return both  # the layout hides it in every pass already
    return both._replace(ep=max(0.0, both.ep - run.constants.expert_hidden * both.compute))
