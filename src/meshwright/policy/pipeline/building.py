"""`build` makes the schedule of a kind, `for_layout` the one a layout asks for.

All that a kind needs is checked here once; the modules that write the actions take sound numbers.
"""

from collections.abc import Callable
from functools import partial

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.activations import in_flight
from meshwright.policy.pipeline.dualpipe import dualpipe, dualpipe_v
from meshwright.policy.pipeline.earliest import UNIT
from meshwright.policy.pipeline.folded import BLOCKS, repeated_block, zb_v
from meshwright.policy.pipeline.interleaved import (
    default_group,
    interleaved,
    least_interleaved,
)
from meshwright.policy.pipeline.lane import Asked
from meshwright.policy.pipeline.schedule import Action, Schedule
from meshwright.policy.pipeline.straight import gpipe, one_f_one_b, zb_h1, zb_h2
from meshwright.policy.pipeline.tuning import EAGER, tune
from meshwright.spec.layout import Layout, ScheduleKind, chunks
from meshwright.spec.layout.kinds import CHUNKED_SCHEDULES

Writer = Callable[[int, Asked], tuple[Action, ...]]

WRITERS: dict[ScheduleKind, Writer] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
"""What writes the actions of one rank, for every kind."""

MOST_ACTIONS = 20_000_000
"""Actions of the largest schedule that is written out: some gigabytes."""


def build(
    kind: ScheduleKind,
    ranks: int,
    microbatches: int,
    *,
    virtual_stages: int | None = None,
    max_in_flight: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Return the schedule of a kind, without transfers.

    Args:
        kind: One of the kinds a layout can name.
        ranks: Pipeline ranks, the layout's pp.
        microbatches: Microbatches per step; any number works with any kind.
        virtual_stages: Chunks per rank; None takes two where the kind wants several, else one.
        max_in_flight: The most chunk-microbatches a rank may hold. GPipe then runs in rounds, the
            1F1B family warms up less, and zb-v becomes V-Half or V-Min. The dualpipe kinds have
            no smaller form.
        group: Microbatches that pass a chunk in a row under `interleaved`; None takes Megatron's.

    Raises:
        InputError: with everything that does not fit.
    """
    if virtual_stages is None:
        virtual_stages = 2 if kind in CHUNKED_SCHEDULES and ranks != 1 else 1
    _check(kind, ranks, microbatches, virtual_stages, max_in_flight=max_in_flight, group=group)
    size = group or default_group(ranks, microbatches)
    asked = Asked(ranks, microbatches, virtual_stages, size, max_in_flight)
    usual = _write(kind, asked, WRITERS[kind] if ranks > 1 or kind == "gpipe" else _alone)
    if max_in_flight is None or max(in_flight(usual)) <= max_in_flight:
        return usual
    return tune(within(forms(usual, asked), max_in_flight)[0], UNIT, max_in_flight, EAGER)


def for_layout(layout: Layout, microbatches: int, max_in_flight: int | None = None) -> Schedule:
    """Return the schedule that a layout asks for."""
    return build(
        layout.schedule,
        layout.pp,
        microbatches,
        virtual_stages=layout.virtual_stages,
        max_in_flight=max_in_flight,
    )


def routes(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the rank of every chunk, once per direction in which microbatches run."""
    held = chunks(layout, layout.chunks)
    sides = len(held) // layout.chunks
    return tuple(tuple(chunk.rank for chunk in held[side::sides]) for side in range(sides))


def _write(kind: ScheduleKind, asked: Asked, writer: Writer) -> Schedule:
    layout = Layout(pp=asked.p, virtual_stages=asked.virtual_stages, schedule=kind)
    return Schedule(
        kind=kind,
        routes=routes(layout),
        microbatches=asked.microbatches,
        actions=tuple(writer(rank, asked) for rank in range(asked.p)),
    )


def _alone(_: int, asked: Asked) -> tuple[Action, ...]:
    """One rank waits for nobody: every microbatch forward and at once backward."""
    each = range(asked.microbatches)
    return tuple(action for i in each for action in (Action("F", 0, i), Action("B", 0, i)))


def forms(usual: Schedule, asked: Asked) -> list[Schedule]:
    """Return a schedule and then the forms of its kind that hold less."""
    if usual.kind != "zb-v" or asked.p == 1:
        return [usual]
    return [usual, *(_write("zb-v", asked, partial(repeated_block, block)) for block in BLOCKS)]


def within(found: list[Schedule], limit: int) -> list[Schedule]:
    """Return the forms that hold no more than the limit; where none does, say what the least is."""
    fitting = [form for form in found if max(in_flight(form)) <= limit]
    if not fitting:
        least = min(max(in_flight(form)) for form in found)
        what = f"{found[0].kind} on {found[0].ranks} ranks cannot hold as little as {limit}"
        raise InputError([Problem("max_in_flight", what, f"use {least} or more")])
    return fitting


def _check(
    kind: ScheduleKind,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    *,
    max_in_flight: int | None,
    group: int | None,
) -> None:
    """Raise with everything that does not fit."""
    problems = _bad_layout(kind, ranks, virtual_stages)
    numbers = {"microbatches": microbatches, "max_in_flight": max_in_flight, "group": group}
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or number < 1):
            what = f"{number!r} is not a whole number from 1"
            problems.append(Problem(name, what, "use 1 or more"))
    if problems:
        raise InputError(problems)
    actions = 3 * ranks * virtual_stages * microbatches
    if actions > MOST_ACTIONS:
        what = f"up to {actions:,} actions are more than the {MOST_ACTIONS:,} that are written out"
        raise InputError(
            [Problem("microbatches", what, f"use {microbatches * MOST_ACTIONS // actions}")]
        )
    size = default_group(ranks, microbatches)
    if group is not None and kind != "interleaved":
        problems.append(Problem("group", f"has no meaning for {kind}", "leave it out"))
    elif group is not None and not min(ranks, microbatches) <= group <= microbatches:
        what = f"{group} is not from {min(ranks, microbatches)} to {microbatches}"
        problems.append(Problem("group", what, f"use {size}"))
    elif group is not None and 0 < microbatches % group < ranks:
        what = (
            f"{group} leaves {microbatches % group} over: less than {ranks}, ranks could deadlock"
        )
        problems.append(Problem("group", what, f"use {size}"))
    least = least_interleaved(Asked(ranks, microbatches, virtual_stages, group or size))
    if kind == "interleaved" and max_in_flight is not None and max_in_flight < least:
        what = f"{max_in_flight} is less than a microbatch needs to reach the last chunk"
        problems.append(Problem("max_in_flight", what, f"use {least} or more"))
    if problems:
        raise InputError(problems)


def _bad_layout(kind: ScheduleKind, ranks: int, virtual_stages: int) -> list[Problem]:
    try:
        Layout(pp=ranks, virtual_stages=virtual_stages, schedule=kind)
    except InputError as error:
        names = {"pp": "ranks", "schedule": "kind"}
        return [p._replace(where=names.get(p.where, p.where)) for p in error.problems]
    return []
