"""`mw simulate MODEL`: one training step before a GPU is rented, and where its time goes."""

import argparse

from meshwright.cli.answer import Answer, Facts, Note, Table, View, facts, table
from meshwright.cli.parser import add_common
from meshwright.cli.work import Asked, add_work, asked, explain
from meshwright.errors import InputError
from meshwright.predict.memory import MemoryPrediction, predict_memory
from meshwright.predict.run import Run
from meshwright.predict.simulate import simulate_step
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.spec.units import format_bytes, format_count, format_seconds
from meshwright.timeline import write_perfetto

EXAMPLES = (
    "mw simulate examples/llama3-70b.toml",
    "mw simulate --model llama3.1-405b --cluster h100-superpod --gpus 16384 --tp 8 --pp 16 "
    "--sequence-parallel --zero 1 --stage-layers 7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7 "
    "--global-batch 2048 --sequence-length 8192",
)
_PARTS = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("exposed tensor parallel", "tp_s"),
    ("exposed context parallel", "cp_s"),
    ("exposed experts", "ep_s"),
    ("exposed pipeline sends", "pp_s"),
    ("exposed data parallel", "dp_s"),
    ("pipeline bubble", "bubble_s"),
    ("optimizer", "optimizer_s"),
)
_BAR = 30


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw simulate [FILE ...] [flags]"
    add_work(parser)
    parser.add_argument(
        "--timeline", metavar="FILE",
        help="write the simulated step for the Perfetto UI: .json or .json.gz",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the predicted step."""
    resolved = asked(args)
    if args.dry_run:
        return explain(resolved)
    problems = [problem for problem in resolved.work.check() if problem.where != "memory"]
    if problems:
        raise InputError(problems)
    described = Run(resolved.work)
    step, simulated = predict_step(described), simulate_step(described)
    notes = [Note("the step model is young: mw validate training shows how far to trust it")]
    if args.timeline:
        write_perfetto(simulated.timeline(), args.timeline)
        notes.append(Note(f"wrote {args.timeline}: open it at ui.perfetto.dev"))
    memory = predict_memory(described)
    price = _price_per_trillion(resolved, step)
    data = {
        **{name: getattr(step, name) for name in step.__struct_fields__},
        "simulated_step_s": simulated.step_s,
        "memory_bytes": memory.worst.total_bytes,
        "fits": memory.fits,
        "dollars_per_trillion_tokens": price,
    }
    views: tuple[View, ...] = (
        _summary(resolved, step, memory, price),
        facts({"the schedule, executed event by event": format_seconds(simulated.step_s)}),
        _breakdown(step),
        *notes,
    )
    code = 0 if memory.fits else 1
    return Answer("simulate/1", data, views, (f"{step.step_s:.6g}",), code)


def _price_per_trillion(resolved: Asked, step: StepPrediction) -> float | None:
    hourly = resolved.work.cluster.price_per_gpu_hour
    if hourly is None:
        return None
    return 1e12 / step.tokens_per_s / 3600 * hourly * resolved.work.layout.gpus


def _summary(
    resolved: Asked, step: StepPrediction, memory: MemoryPrediction, price: float | None
) -> Facts:
    layout = resolved.work.layout
    worst = memory.worst
    verdict = "fits" if memory.fits else "does not fit"
    return facts(
        {
            "work": f"{resolved.work.model.name} on {layout.gpus:,} × "
            f"{resolved.work.cluster.gpu.title}",
            "step": format_seconds(step.step_s),
            "throughput": f"{format_count(step.tokens_per_s)} tokens/s, "
            f"{format_count(step.tokens_per_s / layout.gpus)} per GPU",
            "MFU": f"{step.mfu:.1%} of the {layout.precision} peak, attention counted exactly",
            "memory": f"{format_bytes(worst.total_bytes)} of {format_bytes(memory.capacity_bytes)}"
            f" on stage {worst.stage}, {verdict}",
            "price": None if price is None else f"${price:,.0f} per trillion tokens",
        }
    )


def _breakdown(step: StepPrediction) -> Table:
    rows = []
    for name, field in _PARTS:
        seconds = getattr(step, field)
        if seconds > 0:
            share = seconds / step.step_s
            rows.append((name, format_seconds(seconds), f"{share:.1%}", "█" * round(_BAR * share)))
    return table("where the time goes, time, share, bar", rows, right="time, share")
