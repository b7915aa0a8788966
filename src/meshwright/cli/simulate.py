"""`mw simulate WORK`: one training step before a GPU is rented, and where its time goes."""

import argparse
from functools import partial
from typing import Any, NamedTuple

from meshwright.cli.answer import Answer, Note, View
from meshwright.cli.bars import stage_data
from meshwright.cli.calibrations import add_calibration, add_software, used_for
from meshwright.cli.faults import FLAG, flag_of
from meshwright.cli.long_run import add_reliability, is_long_run, long_run, reliability
from meshwright.cli.parser import add_common
from meshwright.cli.step_screen import Predicted, screen
from meshwright.cli.uneven import add_uneven, execute, read_uneven
from meshwright.cli.work import Asked, add_work, asked, explain, sound
from meshwright.errors import InputError
from meshwright.predict.changes import Change, best_changes
from meshwright.predict.memory import predict_memory
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.predict.reliability import Reliability
from meshwright.predict.run import Run
from meshwright.predict.step import predict_step
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
    add_uneven(parser)
    add_reliability(parser)
    add_calibration(parser)
    add_software(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the predicted step."""
    resolved, uneven, assumed = asked(args), read_uneven(args), reliability(args)
    if args.dry_run:
        return explain(resolved)
    sound(resolved)
    work, used = resolved.work, used_for(args, resolved.work.cluster.gpu)
    run_of = partial(Run, calibration=used.calibration, software=used.software)
    described = run_of(work)
    step, memory = predict_step(described), predict_memory(described)
    advice = best_changes(work, run_of=run_of)
    executed = execute(described, uneven)
    notes = [Note("mw validate training holds such predictions against published runs")]
    filled = [name for name in ("global_batch", "sequence_length") if _is_default(resolved, name)]
    if filled:
        # Advice that changes dp would change a batch that is only filled in.
        flags = " ".join(flag_of(name, getattr(resolved.workload, name)) for name in filled)
        notes.append(Note(f"filled in as nothing was said: {flags}; keep them with any change"))
    if args.timeline:
        write_perfetto(executed.uneven.timeline(), args.timeline)
        notes.append(Note(f"wrote {args.timeline}: open it at ui.perfetto.dev"))
    dollars = dollars_per_trillion_tokens(work, step.tokens_per_s)
    weeks = _weeks(resolved, step.step_s, assumed)
    predicted = Predicted(
        work=work,
        workload=resolved.workload,
        step=step,
        executed=executed.words,
        memory=memory,
        dollars=dollars,
        weeks=weeks.line,
        advice=advice,
        costs=used.words,
    )
    data = {
        **{name: getattr(step, name) for name in step.__struct_fields__},
        "simulated_step_s": executed.uneven.step_s,
        "undisturbed_step_s": executed.even.step_s,
        "replicas_step_s": executed.replicas_s,
        "memory_bytes": memory.worst.total_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "fits": memory.fits,
        "worst_stage": memory.worst.stage,
        "dollars_per_trillion_tokens": dollars,
        "stages": [stage_data(stage) for stage in memory.stages],
        "changes": [_change_data(change) for change in advice.best],
        "together": None if advice.together is None else _change_data(advice.together),
        "long_run": weeks.data,
        "calibration": used.data,
        "software": args.software,
    }
    code = 0 if memory.fits else 1
    views = (*screen(predicted), *weeks.views, *notes)
    return Answer("simulate/1", data, views, (f"{step.step_s:.6g}",), code)


class _Weeks(NamedTuple):
    """The run that the step is a part of."""

    data: dict[str, Any] | None = None
    line: str = ""
    """For the screen of the step."""
    views: tuple[View, ...] = ()
    """In full, where it was asked for."""


def _weeks(resolved: Asked, step_s: float, assumed: Reliability) -> _Weeks:
    """Predict the whole run where its tokens are named; a flag asks for all of it."""
    if not is_long_run(resolved):
        return _Weeks()
    asked_for = resolved.origins["workload.tokens"] == FLAG
    try:
        found = long_run(resolved.work, step_s, assumed)
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


def _is_default(resolved: Asked, name: str) -> bool:
    return resolved.origins.get(f"workload.{name}") == "default"


def _change_data(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "what": change.what,
        "fields": change.fields,
        "flags": " ".join(flag_of(*field) for field in change.fields.items()),
        "step_s": change.step.step_s,
        "gain": change.gain,
        "memory_bytes": change.memory.worst.total_bytes,
        "fits": change.memory.fits,
        "changes_numerics": change.changes_numerics,
    }
