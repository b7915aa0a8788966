"""`mw simulate WORK`: one training step before a GPU is rented, and where its time goes."""

import argparse
from functools import partial
from typing import Any, NamedTuple

from meshwright.cli.flags.calibration import add_calibration, add_software, choose_calibration
from meshwright.cli.flags.long_run import (
    add_reliability,
    build_long_run_views,
    is_long_run,
    read_reliability,
)
from meshwright.cli.flags.problems import FLAG, format_flag
from meshwright.cli.flags.work import (
    ResolvedWork,
    add_work,
    require_valid_layout,
    resolve_work,
    show_sources,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.step_bars import stage_to_data
from meshwright.cli.render.step_screen import StepReport, render_step
from meshwright.cli.result import CommandResult, NoteView, View
from meshwright.cli.simulate.imbalance import add_variation, read_variation, simulate_variation
from meshwright.errors import InputError
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.predict.whatif.layout_suggestions import LayoutSuggestion, suggest_layouts
from meshwright.spec.units import format_count, format_seconds
from meshwright.timeline import write_perfetto

EXAMPLES = (
    "mw simulate examples/llama3-70b.toml",
    "mw simulate llama3-405b --cluster h100-superpod --gpus 16384 --tp 8 --pp 16 "
    "--sequence-parallel --zero 1 --stage-layers 7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7 "
    "--global-batch 2048 --sequence-length 8192",
    "mw simulate examples/llama3-70b.toml --straggler 2=1.2 --timeline step.json.gz",
    "mw simulate examples/llama3-70b.toml --tokens 15T",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw simulate [WORK ...] [flags]"
    add_work(parser)
    add_variation(parser)
    add_reliability(parser)
    add_calibration(parser)
    add_software(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the predicted step."""
    resolved, uneven, assumed = resolve_work(args), read_variation(args), read_reliability(args)
    if args.dry_run:
        return show_sources(resolved)
    require_valid_layout(resolved)
    work, used = resolved.work, choose_calibration(args, resolved.work.cluster.gpu)
    run_of = partial(TrainingRun, calibration=used.calibration, framework=used.framework)
    described = run_of(work)
    step, memory = predict_step(described), predict_memory(described)
    advice = suggest_layouts(work, run_of=run_of)
    executed = simulate_variation(described, uneven)
    notes = [NoteView("mw validate training compares such predictions with published runs")]
    filled = [name for name in ("global_batch", "sequence_length") if _is_default(resolved, name)]
    if filled:
        # Advice that changes dp would change a batch that is only filled in.
        flags = " ".join(format_flag(name, getattr(resolved.workload, name)) for name in filled)
        notes.append(NoteView(f"defaults used: {flags}; keep them with any change"))
    if args.timeline:
        write_perfetto(executed.uneven_step.build_timeline(), args.timeline)
        notes.append(NoteView(f"wrote {args.timeline}: open it at ui.perfetto.dev"))
    dollars = dollars_per_trillion_tokens(work, step.tokens_per_s)
    weeks = _weeks(resolved, step.step_s, assumed)
    predicted = StepReport(
        work=work,
        workload=resolved.workload,
        step=step,
        executed=executed.description,
        memory=memory,
        dollars=dollars,
        long_run=weeks.line,
        advice=advice,
        cost_source=used.description,
    )
    data = {
        **{name: getattr(step, name) for name in step.__struct_fields__},
        "simulated_step_s": executed.uneven_step.step_s,
        "undisturbed_step_s": executed.even_step.step_s,
        "replicas_step_s": executed.replicas_s,
        "memory_bytes": memory.worst_stage.total_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "fits": memory.fits,
        "worst_stage": memory.worst_stage.stage,
        "dollars_per_trillion_tokens": dollars,
        "stages": [stage_to_data(stage) for stage in memory.stages],
        "changes": [_change_data(change) for change in advice.best],
        "together": None if advice.combined_gain is None else _change_data(advice.combined_gain),
        "long_run": weeks.data,
        "calibration": used.data,
        "framework": args.framework,
    }
    code = 0 if memory.fits else 1
    views = (*render_step(predicted), *weeks.views, *notes)
    return CommandResult("simulate/2", data, views, (f"{step.step_s:.6g}",), code)


class _Weeks(NamedTuple):
    """The run that the step is a part of."""

    data: dict[str, Any] | None = None
    line: str = ""
    """For the screen of the step."""
    views: tuple[View, ...] = ()
    """In full, where it was asked for."""


def _weeks(resolved: ResolvedWork, step_s: float, assumed: Reliability) -> _Weeks:
    """Predict the whole run where its tokens are named; a flag asks for all of it."""
    if not is_long_run(resolved):
        return _Weeks()
    asked_for = resolved.origins["workload.tokens"] == FLAG
    try:
        found = build_long_run_views(resolved.work, step_s, assumed)
    except InputError as error:
        if asked_for:
            raise
        return _Weeks(line=f"cannot be predicted: {error.problems[0].what}")
    if asked_for:
        return _Weeks(found.data, views=found.views)
    price = found.data["price"]
    line = f"{format_count(resolved.workload.tokens)} tokens take "
    line += f"{format_seconds(found.data['calendar_s'])}, failures included"
    line += "" if price is None else f", and ${format_count(price)}"
    return _Weeks(found.data, line=line)


def _is_default(resolved: ResolvedWork, name: str) -> bool:
    return resolved.origins.get(f"workload.{name}") == "default"


def _change_data(change: LayoutSuggestion) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "what": change.description,
        "fields": change.fields,
        "flags": " ".join(format_flag(*field) for field in change.fields.items()),
        "step_s": change.step.step_s,
        "gain": change.gain,
        "memory_bytes": change.memory.worst_stage.total_bytes,
        "fits": change.memory.fits,
        "changes_numerics": change.changes_numerics,
    }
