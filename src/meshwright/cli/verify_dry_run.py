"""The dry run of `mw verify`: ranks of a layout played on shapes alone, and what they exchange."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.errors import InputError
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.units import format_bytes, format_count, format_seconds, format_some

if TYPE_CHECKING:
    from meshwright.run.parallel.rehearsal import Rehearsal


def rehearsed(
    model: Model, layouts: Sequence[Layout], length: int, batch: int | None, *, full: bool
) -> Answer:
    """Answer with what the ranks of each layout would exchange."""
    from meshwright.run.parallel.rehearsal import fewest_microbatches, rehearse
    from meshwright.run.parallel.verify.fit import problems_of

    problems, counts = [], []
    for number, layout in enumerate(layouts, 1):
        sequences = batch or fewest_microbatches(layout) * layout.dp * layout.microbatch
        counts.append(layout.microbatches(sequences))
        where = "--layout" if len(layouts) == 1 else f"--layout {number}"
        problems += [
            problem._replace(where=f"{where}: {problem.where}")
            for problem in problems_of(model, layout, sequence=length, sequences=sequences)
        ]
    if problems:
        raise InputError(problems)
    views: list[View] = []
    data, quiet, sound = [], [], True
    for number, (layout, count) in enumerate(zip(layouts, counts, strict=True), 1):
        ranks = range(layout.gpus) if full else None
        found = rehearse(model, layout, sequence_length=length, microbatches=count, ranks=ranks)
        sound = sound and not found.problems
        quiet.append("sound" if not found.problems else "unsound")
        data.append(_data(layout, count, found))
        step = f"{count} microbatches of {layout.microbatch} × {length:,} tokens"
        views += _views(f"layout {number}: {model.name}", layout, step, found)
    views.append(
        Note("bytes are those of tensors handed over, by the busiest rank that was played")
    )
    body = {"model": model.name, "sequence": length, "sound": sound, "layouts": data}
    return Answer("verify.dry-run/1", body, tuple(views), tuple(quiet), 0 if sound else 1)


def _views(title: str, layout: Layout, step: str, found: "Rehearsal") -> list[View]:
    held = [one.parameters for one in found.played]
    least, most = min(held), max(held)
    summary = {
        "layout": f"{format_some(layout.gpus, 'rank')}: tp {layout.tp}, cp {layout.cp}, "
        f"pp {layout.pp}, dp {layout.dp}, ep {layout.ep}, zero {layout.zero}",
        "step": step,
        "played": f"{format_some(len(found.played), 'rank')} in {format_seconds(found.wall_s)}",
        "each holds": f"{format_count(least)} to {format_count(most)} parameters",
        "schedule": found.schedule,
        "verdict": "every group does the same in the same order"
        if not found.problems
        else format_some(len(found.problems), "problem"),
    }
    shown: list[View] = [facts(summary, title)]
    rows = [
        (one.group, one.ranks, one.op, f"{one.calls:,}", format_bytes(one.size_bytes))
        for one in found.traffic()
    ]
    numbers = "ranks, calls, bytes"
    shown.append(table("group, ranks, operation, calls, bytes", rows, right=numbers))
    if found.problems:
        wrong = enumerate(found.problems, 1)
        shown.append(table("problem, what", wrong, right="problem", wide="what"))
    return shown


def _data(layout: Layout, count: int, found: "Rehearsal") -> dict[str, Any]:
    return {
        "ranks": layout.gpus,
        "microbatches": count,
        "played": [one.rank for one in found.played],
        "parameters": [one.parameters for one in found.played],
        "traffic": [one._asdict() for one in found.traffic()],
        "schedule": found.schedule,
        "problems": list(found.problems),
        "wall_s": found.wall_s,
    }
