"""`build_schedule` makes the schedule of a kind, `build_layout_schedule` the one a layout asks for.

All that a kind needs is checked here once; the modules that write the actions take sound numbers.
"""

from collections.abc import Callable
from functools import partial

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.action_times import UNIT_DURATIONS
from meshwright.policy.pipeline.dualpipe_schedules import (
    build_dualpipe_actions,
    build_dualpipe_v_actions,
)
from meshwright.policy.pipeline.in_flight_activations import count_in_flight
from meshwright.policy.pipeline.interleaved_1f1b import (
    build_interleaved_actions,
    count_min_in_flight,
    get_default_group_size,
)
from meshwright.policy.pipeline.rank_writer import ScheduleParams
from meshwright.policy.pipeline.schedule import PipelineAction, PipelineSchedule
from meshwright.policy.pipeline.schedule_tuner import EAGER_RULES, tune_schedule
from meshwright.policy.pipeline.single_chunk_schedules import (
    build_1f1b_actions,
    build_gpipe_actions,
    build_zb_h1_actions,
    build_zb_h2_actions,
)
from meshwright.policy.pipeline.v_schedules import (
    BUILDING_BLOCKS,
    build_repeated_block,
    build_zb_v_actions,
)
from meshwright.spec.layout import Layout, ScheduleKind, list_chunks
from meshwright.spec.layout.choices import MULTI_CHUNK_SCHEDULES

ActionWriter = Callable[[int, ScheduleParams], tuple[PipelineAction, ...]]

ACTION_WRITERS: dict[ScheduleKind, ActionWriter] = {
    "gpipe": build_gpipe_actions,
    "1f1b": build_1f1b_actions,
    "interleaved": build_interleaved_actions,
    "zb-h1": build_zb_h1_actions,
    "zb-h2": build_zb_h2_actions,
    "zb-v": build_zb_v_actions,
    "dualpipe": build_dualpipe_actions,
    "dualpipe-v": build_dualpipe_v_actions,
}
"""What writes the actions of one rank, for every kind."""

MAX_ACTIONS = 20_000_000
"""Actions of the largest schedule that is written out: some gigabytes."""


def build_schedule(
    kind: ScheduleKind,
    ranks: int,
    microbatches: int,
    *,
    virtual_stages: int | None = None,
    max_in_flight: int | None = None,
    group: int | None = None,
) -> PipelineSchedule:
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
        virtual_stages = 2 if kind in MULTI_CHUNK_SCHEDULES and ranks != 1 else 1
    _check(kind, ranks, microbatches, virtual_stages, max_in_flight=max_in_flight, group=group)
    size = group or get_default_group_size(ranks, microbatches)
    asked = ScheduleParams(ranks, microbatches, virtual_stages, size, max_in_flight)
    usual = _write(kind, asked, ACTION_WRITERS[kind] if ranks > 1 or kind == "gpipe" else _alone)
    if max_in_flight is None or max(count_in_flight(usual)) <= max_in_flight:
        return usual
    return tune_schedule(
        filter_by_in_flight(list_memory_variants(usual, asked), max_in_flight)[0],
        UNIT_DURATIONS,
        max_in_flight,
        EAGER_RULES,
    )


def build_layout_schedule(
    layout: Layout, microbatches: int, max_in_flight: int | None = None
) -> PipelineSchedule:
    """Return the schedule that a layout asks for."""
    return build_schedule(
        layout.schedule,
        layout.pp,
        microbatches,
        virtual_stages=layout.virtual_stages,
        max_in_flight=max_in_flight,
    )


def list_chunk_routes(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the rank of every chunk, once per direction in which microbatches run."""
    held = list_chunks(layout, layout.chunks)
    sides = len(held) // layout.chunks
    return tuple(tuple(chunk.rank for chunk in held[side::sides]) for side in range(sides))


def _write(kind: ScheduleKind, asked: ScheduleParams, writer: ActionWriter) -> PipelineSchedule:
    layout = Layout(pp=asked.ranks, virtual_stages=asked.virtual_stages, schedule=kind)
    return PipelineSchedule(
        kind=kind,
        routes=list_chunk_routes(layout),
        microbatches=asked.microbatches,
        actions=tuple(writer(rank, asked) for rank in range(asked.ranks)),
    )


def _alone(_: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """One rank waits for nobody: every microbatch forward and at once backward."""
    each = range(asked.microbatches)
    return tuple(
        action for i in each for action in (PipelineAction("F", 0, i), PipelineAction("B", 0, i))
    )


def list_memory_variants(usual: PipelineSchedule, asked: ScheduleParams) -> list[PipelineSchedule]:
    """Return a schedule and then the forms of its kind that hold less."""
    if usual.kind != "zb-v" or asked.ranks == 1:
        return [usual]
    return [
        usual,
        *(_write("zb-v", asked, partial(build_repeated_block, block)) for block in BUILDING_BLOCKS),
    ]


def filter_by_in_flight(found: list[PipelineSchedule], limit: int) -> list[PipelineSchedule]:
    """Return the forms that hold no more than the limit; where none does, say what the least is."""
    fitting = [form for form in found if max(count_in_flight(form)) <= limit]
    if not fitting:
        least = min(max(count_in_flight(form)) for form in found)
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
    if actions > MAX_ACTIONS:
        what = f"up to {actions:,} actions are more than the {MAX_ACTIONS:,} that are written out"
        raise InputError(
            [Problem("microbatches", what, f"use {microbatches * MAX_ACTIONS // actions}")]
        )
    size = get_default_group_size(ranks, microbatches)
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
    least = count_min_in_flight(ScheduleParams(ranks, microbatches, virtual_stages, group or size))
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
