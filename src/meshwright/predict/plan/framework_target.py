"""What a framework can run of all layouts, learnt from its bridge, and what it makes of a plan.

The bridge is asked, value by value: a layout that hangs on the value is exported and read back. A
value that survives in any of the tried places is allowed. What a framework refuses only beside
other values is left to `apply_framework`, which takes a plan as the exported text means it and
predicts that, so that what is shown is what will run.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan import Plan, PlanAnswer, PlanQuestion
from meshwright.predict.plan.question.layout_space import FIXED_BY_USER
from meshwright.predict.plan.space.recompute_options import list_recompute_choices
from meshwright.predict.step.step_prediction import predict_step
from meshwright.spec.bridge import FrameworkBridge, find_bridge
from meshwright.spec.bridge.spec_diff import diff_layouts
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import MULTI_CHUNK_SCHEDULES

IN_CODE: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepspeed": {"pp": (), "stage_layers": (), "recompute": ("none", "full")},
    "fsdp2": {"sequence_parallel": (), "overlap_tp": ()},
}
"""What a framework leaves to the user's own code, and what that usually can; () is anything."""

_SPELT_ALIKE = {"nemo": "megatron"}
"""Targets that hold the same settings as another one, whose text is quicker to read back."""

_ALL_AXES = Layout(dp=2, tp=2, cp=2, pp=2, ep=2, sequence_parallel=True, zero=2, overlap_pp=False)
_PLACES: tuple[Layout, ...] = (
    Layout(dp=4, zero=1),
    Layout(dp=4, zero=3),
    Layout(dp=2, tp=2, sequence_parallel=True, zero=1),
    Layout(dp=2, cp=2, zero=3),
    Layout(dp=2, pp=4, zero=1),
    Layout(dp=2, pp=4, zero=1, schedule="interleaved", virtual_stages=2),
    Layout(dp=4, ep=4, zero=1),
    Layout(dp=4, ep=4, zero=1, pp=2, schedule="interleaved", virtual_stages=2),
    _ALL_AXES,
)
"""Small layouts that between them use every axis."""

_ASKED = (
    "sequence_parallel", "cp_kind", "schedule", "zero", "recompute", "overlap_gradients",
    "overlap_parameters", "overlap_tp", "overlap_pp", "overlap_ep", "offload", "order", "precision",
)  # fmt: skip
_NEEDS = {
    "sequence_parallel": "tp", "overlap_tp": "tp", "cp_kind": "cp", "schedule": "pp",
    "overlap_pp": "pp", "overlap_ep": "ep",
}  # fmt: skip
"""The axis without which a field means nothing."""


def restrict_to_framework(question: PlanQuestion, bridge: FrameworkBridge) -> PlanQuestion:
    """Return a question whose layouts are, field by field, what a framework can say.

    Raises:
        InputError: where all values that a field may take cannot be said.
    """
    asked = find_bridge(_SPELT_ALIKE.get(bridge.name, bridge.name))
    space, fixed, problems = question.space, dict(question.space.fixed), []
    in_code = IN_CODE.get(bridge.name, {})
    for name in _ASKED:
        values = space.get_allowed(name) or ()
        if name in in_code:
            kept = tuple(one for one in values if not in_code[name] or one in in_code[name])
        elif name == "recompute":
            kept = _recomputes(question, asked, fixed)
        else:
            kept = tuple(value for value in values if _says(asked, name, value))
        if name == "order":
            # The usual one first: it stands for all that cost the same.
            kept = tuple(sorted(kept, key=lambda order: order != Layout().order))
        fixed[name] = kept
        if not kept:
            said = " or ".join(map(str, values))
            what = f"{name.replace('_', ' ')} {said} cannot be said in {bridge.title}"
            problems.append(Problem(f"--for {bridge.name}", what, f"allow more of {name}"))
    if not _says(asked, "ep", 2):
        fixed["ep"] = (1,)
    if problems:
        raise InputError(problems)
    return replace(question, space=replace(space, fixed=fixed))


def _recomputes(
    question: PlanQuestion, bridge: FrameworkBridge, fixed: dict[str, tuple[Any, ...]]
) -> tuple[str, ...]:
    """Return the kinds of recompute; the sets of operations go into `fixed`."""
    kinds = question.space.get_allowed("recompute") or ()
    kept = [one for one in kinds if one != "selective" and _says(bridge, "recompute", one)]
    every = (
        again.ops for again in list_recompute_choices(question) if again.recompute == "selective"
    )
    sets = tuple(ops for ops in every if _says(bridge, "recompute_ops", ops))
    if sets:
        fixed["recompute_ops"] = sets
        kept.append("selective")
    return tuple(kept)


def _says(bridge: FrameworkBridge, name: str, value: Any) -> bool:
    """Tell whether a value comes back from the framework's settings in some place it matters."""
    for layout in _with(name, value):
        back = _read_back(bridge, layout)
        if back is not None and name not in {one.path for one in diff_layouts(layout, back)}:
            return True
    return False


def _with(name: str, value: Any) -> Iterator[Layout]:
    """Yield the places with a value, those where it would mean nothing left out."""
    changes: dict[str, Any] = {name: value}
    places = _PLACES
    if name == "schedule":
        changes["virtual_stages"] = 2 if value in MULTI_CHUNK_SCHEDULES else 1
    elif name == "recompute_ops":
        places, changes["recompute"] = _PLACES[:1], "selective"
    elif name == "offload" and "activations" in value:
        changes["recompute"] = "full"
    elif name == "order":
        places = (_ALL_AXES,)
    for place in places:
        try:
            layout = replace(place, **changes)
        except InputError:
            continue
        if name not in _NEEDS or getattr(layout, _NEEDS[name]) > 1:
            yield layout


def _read_back(bridge: FrameworkBridge, layout: Layout) -> Layout | None:
    """Return the layout that a framework's settings mean; None where it refuses its own."""
    try:
        exported = bridge.export_config(replace(layout, global_batch=layout.dp * 8))
        return bridge.import_config(exported.text, gpus=layout.gpus).layout
    except InputError:
        return None


def apply_framework(answer: PlanAnswer, bridge: FrameworkBridge) -> PlanAnswer:
    """Return an answer whose plans are what the framework runs when given them.

    No layout that it can say is faster than the bound of the wider search, so the bound stays.

    Raises:
        InputError: where none of the plans fits as the framework runs it.
    """
    plans = [_as_run(answer.question, plan, bridge) for plan in answer.plans]
    fitting = sorted((p for p in plans if p.memory.fits), key=lambda plan: plan.step.step_s)
    if not fitting:
        what = f"none of the {len(plans)} best layouts fits as {bridge.title} runs it"
        raise InputError(
            [Problem(f"--for {bridge.name}", what, "use --max-memory 0.9 or --top 20")]
        )
    distinct = tuple({plan.layout: plan for plan in reversed(fitting)}.values())[::-1]
    proved = answer.is_proved and distinct[0].step.step_s <= answer.bound_s * (1 + 1e-9)
    return replace(answer, plans=distinct, is_proved=proved)


def _as_run(question: PlanQuestion, plan: Plan, bridge: FrameworkBridge) -> Plan:
    layout, workload = plan.layout, question.workload
    exported = bridge.export_config(
        layout,
        question.model,
        sequence_length=workload.sequence_length,
        global_batch=workload.global_batch,
    )
    try:
        back = bridge.import_config(
            exported.text, gpus=layout.gpus, vocab=question.model.vocab
        ).layout
    except InputError:
        return plan  # the export's own list says what is wrong
    kept = {*FIXED_BY_USER, *IN_CODE.get(bridge.name, {})}
    lost = [one for one in diff_layouts(layout, back) if one.path not in kept]
    if not lost:
        return plan
    try:
        runs = replace(layout, **{one.path: one.converted for one in lost})
    except InputError:
        return plan
    run = question.build_run(runs)
    return Plan(
        job=question.build_job(runs),
        step=predict_step(run),
        memory=predict_memory(run),
        simulated_s=None if plan.simulated_s is None else simulate_step(run).step_s,
    )
