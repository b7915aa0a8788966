"""The dry run of `mw parity`: ranks of a layout played on shapes alone, and what they exchange."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.units import format_bytes, format_count, format_quantity, format_seconds

if TYPE_CHECKING:
    from meshwright.run.parallel.verify.dry_run import DryRun


def show_rank_communication(
    model: Model, layouts: Sequence[Layout], length: int, batch: int | None, *, full: bool
) -> CommandResult:
    """Answer with what the ranks of each layout would exchange."""
    from meshwright.run.parallel.compatibility import find_verify_problems
    from meshwright.run.parallel.verify.dry_run import dry_run_layout, find_min_microbatches

    problems, counts = [], []
    for number, layout in enumerate(layouts, 1):
        sequences = batch or find_min_microbatches(layout) * layout.dp * layout.microbatch
        counts.append(layout.count_microbatches(sequences))
        where = "--layout" if len(layouts) == 1 else f"--layout {number}"
        problems += [
            problem._replace(where=f"{where}: {problem.where}")
            for problem in find_verify_problems(
                model, layout, sequence_length=length, global_batch=sequences
            )
        ]
    if problems:
        raise InputError(problems)
    views: list[View] = []
    data, quiet, sound = [], [], True
    for number, (layout, count) in enumerate(zip(layouts, counts, strict=True), 1):
        ranks = range(layout.gpus) if full else None
        found = dry_run_layout(
            model, layout, sequence_length=length, microbatches=count, ranks=ranks
        )
        sound = sound and not found.problems
        quiet.append("sound" if not found.problems else "unsound")
        data.append(_data(layout, count, found))
        step = f"{count} microbatches of {layout.microbatch} × {length:,} tokens"
        views += _views(f"layout {number}: {model.name}", layout, step, found)
    views.append(
        NoteView("bytes are those of tensors handed over, by the busiest rank that was played")
    )
    body = {"model": model.name, "sequence_length": length, "sound": sound, "layouts": data}
    return CommandResult("parity.dry-run/1", body, tuple(views), tuple(quiet), 0 if sound else 1)


def _views(title: str, layout: Layout, step: str, found: "DryRun") -> list[View]:
    held = [one.parameters for one in found.rank_runs]
    least, most = min(held), max(held)
    summary = {
        "layout": f"{format_quantity(layout.gpus, 'rank')}: tp {layout.tp}, cp {layout.cp}, "
        f"pp {layout.pp}, dp {layout.dp}, ep {layout.ep}, zero {layout.zero}",
        "step": step,
        "played": f"{format_quantity(len(found.rank_runs), 'rank')} in "
        f"{format_seconds(found.wall_s)}",
        "each holds": f"{format_count(least)} to {format_count(most)} parameters",
        "schedule": found.schedule,
        "verdict": "every group does the same in the same order"
        if not found.problems
        else format_quantity(len(found.problems), "problem"),
    }
    shown: list[View] = [make_fields(summary, title)]
    rows = [
        (one.group, one.ranks, one.op, f"{one.calls:,}", format_bytes(one.size_bytes))
        for one in found.traffic()
    ]
    numbers = "ranks, calls, bytes"
    shown.append(make_table("group, ranks, operation, calls, bytes", rows, right=numbers))
    if found.problems:
        wrong = enumerate(found.problems, 1)
        shown.append(make_table("problem, what", wrong, right="problem", wide="what"))
    return shown


def _data(layout: Layout, count: int, found: "DryRun") -> dict[str, Any]:
    return {
        "ranks": layout.gpus,
        "microbatches": count,
        "played": [one.rank for one in found.rank_runs],
        "parameters": [one.parameters for one in found.rank_runs],
        "traffic": [one._asdict() for one in found.traffic()],
        "schedule": found.schedule,
        "problems": list(found.problems),
        "wall_s": found.wall_s,
    }
