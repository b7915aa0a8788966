"""`mw simulate WORK`: one training step before a GPU is rented, and where its time goes."""

import argparse
from typing import Any, NamedTuple

from meshwright.cli.answer import Answer, Note, View
from meshwright.cli.faults import FLAG, flag_of
from meshwright.cli.long_run import add_reliability, is_long_run, long_run, reliability
from meshwright.cli.parser import add_common
from meshwright.cli.step_screen import Predicted, screen
from meshwright.cli.work import Asked, add_work, asked, explain, sound
from meshwright.errors import InputError, Problem
from meshwright.predict.changes import Change, best_changes
from meshwright.predict.memory import StageMemory, predict_memory
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.predict.reliability import Reliability
from meshwright.predict.run import Run
from meshwright.predict.simulate import SimulatedStep, simulate_step
from meshwright.predict.step import predict_step
from meshwright.spec.units import format_count, format_seconds, parse_count, parse_number
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
    group = parser.add_argument_group("the schedule, executed event by event")
    group.add_argument(
        "--straggler", metavar="RANK=X", action="append", default=[],
        help="passes of a pipeline rank take X times as long; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--jitter", metavar="CV", help="random spread of every pass: its coefficient of variation"
    )
    group.add_argument("--seed", metavar="N", default="0", help="where the spread starts")
    group.add_argument(
        "--timeline", metavar="FILE",
        help="write the simulated step for the Perfetto UI: .json or .json.gz",
    )  # fmt: skip
    add_reliability(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the predicted step."""
    resolved, disturbed, assumed = asked(args), _disturbance(args), reliability(args)
    if args.dry_run:
        return explain(resolved)
    sound(resolved)
    work, described = resolved.work, Run(resolved.work)
    step, memory, advice = predict_step(described), predict_memory(described), best_changes(work)
    even = simulate_step(described)
    simulated = _uneven(described, disturbed) if disturbed else even
    notes = [Note("mw validate training shows how far such predictions can be trusted")]
    if args.timeline:
        write_perfetto(simulated.timeline(), args.timeline)
        notes.append(Note(f"wrote {args.timeline}: open it at ui.perfetto.dev"))
    dollars = dollars_per_trillion_tokens(work, step.tokens_per_s)
    weeks = _weeks(resolved, step.step_s, assumed)
    predicted = Predicted(
        work=work,
        workload=resolved.workload,
        step=step,
        simulated=_executed(even, simulated),
        memory=memory,
        dollars=dollars,
        weeks=weeks.line,
        advice=advice,
    )
    data = {
        **{name: getattr(step, name) for name in step.__struct_fields__},
        "simulated_step_s": simulated.step_s,
        "undisturbed_step_s": even.step_s,
        "memory_bytes": memory.worst.total_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "fits": memory.fits,
        "worst_stage": memory.worst.stage,
        "dollars_per_trillion_tokens": dollars,
        "stages": [_stage_data(stage) for stage in memory.stages],
        "changes": [_change_data(change) for change in advice.best],
        "together": None if advice.together is None else _change_data(advice.together),
        "long_run": weeks.data,
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


def _disturbance(args: argparse.Namespace) -> dict[str, Any]:
    """Read what makes ranks uneven; empty where nothing was asked."""
    problems: list[Problem] = []
    slowdown: dict[int, float] = {}
    for text in args.straggler:
        for pair in text.split(","):
            rank, _, factor = pair.partition("=")
            try:
                slowdown[parse_count(rank, "--straggler")] = parse_number(factor, "--straggler")
            except InputError:
                what = f"{pair!r} is not a rank and a factor"
                problems.append(Problem("--straggler", what, "write it like 3=1.2"))
    values: dict[str, Any] = {"slowdown": slowdown} if slowdown else {}
    for name, key, read in (
        ("jitter", "jitter_cv", parse_number),
        ("seed", "seed", parse_count),
    ):
        text = getattr(args, name)
        if text is not None:
            try:
                values[key] = read(text, f"--{name}")
            except InputError as error:
                problems += error.problems
    if problems:
        raise InputError(problems)
    return values if set(values) != {"seed"} else {}


_FLAGS = {"slowdown": "--straggler", "jitter_cv": "--jitter"}


def _uneven(run: Run, disturbed: dict[str, Any]) -> SimulatedStep:
    try:
        return simulate_step(run, **disturbed)
    except InputError as error:
        raise InputError(
            problem._replace(where=_FLAGS.get(problem.where.partition(".")[0], problem.where))
            for problem in error.problems
        ) from None


def _executed(even: SimulatedStep, simulated: SimulatedStep) -> str:
    """Say how long the schedule takes event by event, and what the disturbance costs."""
    text = f"{format_seconds(simulated.step_s)}, the schedule run event by event"
    if simulated is even:
        return text
    return f"{text}, {simulated.step_s / even.step_s - 1:+.1%} by the uneven ranks"


def _stage_data(stage: StageMemory) -> dict[str, int]:
    fields = {name: getattr(stage, name) for name in stage.__struct_fields__}
    return {**fields, "total_bytes": stage.total_bytes}


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
