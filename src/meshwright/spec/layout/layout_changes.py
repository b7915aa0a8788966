"""A layout with some fields changed, and the fields that hang on them made to fit.

Nothing is judged here: whether the result suits a model and a cluster is for `JobSpec.check`.
"""

from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import MULTI_CHUNK_SCHEDULES, V_SCHEDULES
from meshwright.spec.layout.field_rules import nearest_multiple


def change_layout(layout: Layout, layers: int, **changed: Any) -> Layout:
    """Return the layout with `changed` fields, for a model of so many layers.

    Sequence parallelism goes with its tensor-parallel group, a schedule brings the chunks it
    needs, and layers are divided anew where the number of chunks is another.

    Raises:
        InputError: where the fields do not go together.
    """
    fields = dict(changed)
    if fields.get("tp") == 1:
        fields.setdefault("sequence_parallel", False)
    pp = fields.get("pp", layout.pp)
    schedule = fields.get("schedule", layout.schedule)
    chunks = fields.get("virtual_stages", layout.virtual_stages)
    if pp == 1:
        schedule, chunks = fields.get("schedule", "1f1b"), fields.get("virtual_stages", 1)
    elif "schedule" in changed and "virtual_stages" not in changed:
        chunks = _chunks_for(schedule, chunks)
    elif "virtual_stages" in changed and "schedule" not in changed:
        schedule = _schedule_for(schedule, chunks)
    fields["schedule"], fields["virtual_stages"] = schedule, chunks
    if "stage_layers" not in changed and type(pp) is type(chunks) is int:
        fields["stage_layers"] = _split(layout, layers, pp, chunks)
    return msgspec.structs.replace(layout, **fields)


def change_degrees(layout: Layout, layers: int, gpus: int, **changed: Any) -> Layout:
    """Return the layout with other degrees on as many GPUs: data parallelism takes up the rest."""
    degrees = [changed.get(name, getattr(layout, name)) for name in ("tp", "cp", "pp")]
    one = degrees[0] * degrees[1] * degrees[2]
    if one > 0 and gpus % one:
        what = f"{gpus:,} GPUs are no multiple of tp × cp × pp = {one:,}"
        fix = f"use {nearest_multiple(gpus, one):,} GPUs"
        raise InputError([Problem("gpus", what, fix)])
    return change_layout(layout, layers, **changed, dp=gpus // one if one > 0 else 1)


def list_changed_fields(old: Layout, new: Layout) -> dict[str, Any]:
    """Return the fields in which two layouts differ, with the values of the new one."""
    return {
        name: getattr(new, name)
        for name in Layout.__struct_fields__
        if getattr(new, name) != getattr(old, name)
    }


def _chunks_for(schedule: str, chunks: int) -> int:
    if schedule in V_SCHEDULES:
        return 2
    return max(2, chunks) if schedule in MULTI_CHUNK_SCHEDULES else 1


def _schedule_for(schedule: Any, chunks: int) -> Any:
    if chunks == 1:
        return "1f1b" if schedule in MULTI_CHUNK_SCHEDULES else schedule
    return schedule if schedule in MULTI_CHUNK_SCHEDULES else "interleaved"


def _split(layout: Layout, layers: int, pp: int, chunks: int) -> tuple[int, ...] | None:
    """Return the layers of each chunk; None where they divide and nobody asked to see them.

    What is left over leaves the ends of the model short: they hold the embedding and the head.
    Llama 3 405B was trained with its 126 layers so divided (arXiv 2407.21783).
    """
    total, given = pp * chunks, layout.stage_layers
    if (pp, chunks) == (layout.pp, layout.virtual_stages) and given and sum(given) == layers:
        return given
    if not 0 < total <= layers or (layers % total == 0 and given is None):
        return None
    each, rest = divmod(layers, total)
    split = [each + 1] * total if rest else [each] * total
    if rest:
        short = [total - 1, 0, *range(total - 2, 0, -1)][: total - rest]
        for index in short:
            split[index] = each
    return tuple(split)
