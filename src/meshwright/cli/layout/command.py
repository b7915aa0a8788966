"""`mw layout check|memory|export|import`: one layout held against model, cluster and frameworks."""

import argparse
import sys

from meshwright.cli.flags.work import (
    ResolvedWork,
    add_work,
    require_valid_layout,
    resolve_work,
    show_sources,
)
from meshwright.cli.parser import add_common, add_verbs
from meshwright.cli.render.step_bars import draw_memory_bar, stage_to_data
from meshwright.cli.result import (
    CommandResult,
    FieldsView,
    NoteView,
    TableView,
    TextView,
    View,
    make_fields,
    make_table,
)
from meshwright.predict import MemoryPrediction, TrainingRun, predict_memory
from meshwright.spec import bridge
from meshwright.spec.file_formats import dump_data, read_text
from meshwright.spec.model import count_parameters
from meshwright.spec.serialization import encode
from meshwright.spec.units import (
    format_bytes,
    format_count,
    format_flops,
    format_quantity,
    parse_count,
)
from meshwright.spec.workload import training_flops

EXAMPLES = (
    "mw layout check examples/llama3-70b.toml",
    "mw layout memory examples/llama3-70b.toml --recompute full",
    "mw layout export examples/llama3-70b.toml --to megatron",
    "mw layout import --from megatron flags.txt --gpus 64",
)

_VERBS = (
    (
        "check",
        "check a layout with a model and a cluster; every violated constraint, with a fix",
        (EXAMPLES[0], "mw layout check --model llama3.1-8b --cluster dgx-h100 --gpus 8 --tp 8"),
    ),
    (
        "memory",
        "memory of every pipeline stage and the FLOPs of a step",
        (
            EXAMPLES[1],
            "mw layout memory --model gpt3-175b --cluster dgx-a100-80g --gpus 512 --tp 8 --pp 8",
        ),
    ),
    (
        "export",
        "write a layout in the words of another framework",
        (EXAMPLES[2], "mw layout export examples/llama3-70b.toml --to torchtitan"),
    ),
    (
        "import",
        "read a layout from another framework's flags or file",
        (EXAMPLES[3], "mw layout import --from deepspeed ds_config.json --gpus 16"),
    ),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    found = add_verbs(parser, _VERBS)
    for verb in ("check", "memory", "export"):
        # Thirty-odd fields would make a wall of a usage line; the groups below list them.
        found[verb].usage = f"mw layout {verb} [FILE ...] [flags]"
        add_work(found[verb])
    found["export"].add_argument(
        "--to", required=True, metavar="NAME", help=f"one of {', '.join(bridge.BRIDGES)}"
    )
    reader = found["import"]
    reader.add_argument("file", metavar="FILE", help="file to read, or - for standard input")
    reader.add_argument(
        "--from", dest="source", required=True, metavar="NAME",
        help=f"one of {', '.join(bridge.BRIDGES)}",
    )  # fmt: skip
    reader.add_argument("--gpus", metavar="N", help="GPUs of the run, which set dp")
    reader.add_argument("--vocab", metavar="N", help="vocabulary size, where the source has none")
    for sub in found.values():
        add_common(sub)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer one of the verbs."""
    if args.verb == "import":
        return _import(args)
    resolved = resolve_work(args)
    if args.dry_run:
        return show_sources(resolved)
    if args.verb == "check":
        return _check(resolved)
    if args.verb == "memory":
        return _memory(resolved)
    return _export(resolved, args.to)


def _check(resolved: ResolvedWork) -> CommandResult:
    problems = resolved.work.check()
    data = {"ok": not problems, "problems": [problem._asdict() for problem in problems]}
    if problems:
        view: View = make_table("field, violated, fix", problems, wide="violated, fix")
        return CommandResult("layout.check/1", data, (view,), tuple(p.where for p in problems), 1)
    work = resolved.work
    line = (
        f"ok: {work.model.name} on {format_quantity(work.layout.gpus, 'GPU')} of "
        f"{work.cluster.name}"
    )
    return CommandResult("layout.check/1", data, (TextView(line),), ("ok",))


_PARTS = (
    ("params", "parameters_bytes"),
    ("grads", "gradients_bytes"),
    ("optim", "optimizer_bytes"),
    ("acts", "activations_bytes"),
    ("logits", "logits_bytes"),
    ("other", "framework_bytes"),
)
_LEGEND = (
    "█ states ▒ acts · rest; held: passes through a chunk in flight; "
    "other: backward of a layer, buffers, fragmentation, CUDA, NCCL"
)


def _memory(resolved: ResolvedWork) -> CommandResult:
    require_valid_layout(resolved)
    work, asked_for = resolved.work, resolved.workload
    length, batch = asked_for.sequence_length, asked_for.global_batch
    predicted = predict_memory(TrainingRun(work))
    # Documents that do not see each other cost attention as shorter sequences would.
    attended = max(1, round(asked_for.squared_length / length))
    per_token = training_flops(work.model, attended, asked_for.adapter)
    data = {
        "fits": predicted.fits,
        "capacity_bytes": predicted.capacity_bytes,
        "worst_stage": predicted.worst_stage.stage,
        "stages": [
            {**stage_to_data(stage), "framework_bytes": stage.framework_bytes}
            for stage in predicted.stages
        ],
        "sequence_length": length,
        "global_batch": batch,
        "parameters": count_parameters(work.model).total,
        "flops_per_token": per_token,
        "flops_per_step": per_token * length * batch,
    }
    views = (_summary(resolved, predicted, per_token), _stage_table(predicted), NoteView(_LEGEND))
    quiet = (str(predicted.worst_stage.total_bytes),)
    return CommandResult("layout.memory/1", data, views, quiet, 0 if predicted.fits else 1)


def _summary(resolved: ResolvedWork, predicted: MemoryPrediction, per_token: float) -> FieldsView:
    work, asked_for, worst = resolved.work, resolved.workload, predicted.worst_stage
    layout, tokens = work.layout, asked_for.tokens_per_step
    verdict = "fits" if predicted.fits else "does not fit"
    pairs = {
        "model": f"{work.model.name}, "
        f"{format_count(count_parameters(work.model).total)} parameters",
        "layout": f"{format_quantity(layout.gpus, 'GPU')}: tp {layout.tp}, cp {layout.cp}, "
        f"pp {layout.pp}, dp {layout.dp}",
        "step": f"{asked_for.global_batch:,} × {asked_for.sequence_length:,} tokens, "
        f"{format_flops(per_token * tokens)} ({format_flops(per_token)} per token, "
        "forward and backward)",
        "worst rank": f"stage {worst.stage}: {format_bytes(worst.total_bytes)} of "
        f"{format_bytes(predicted.capacity_bytes)}, {verdict}",
    }
    return make_fields(pairs)


def _stage_table(predicted: MemoryPrediction) -> TableView:
    rows = [
        (
            stage.stage,
            stage.layers,
            stage.in_flight,
            *(f"{getattr(stage, field) / 2**30:.1f}" for _, field in _PARTS),
            f"{stage.total_bytes / 2**30:.1f}",
            draw_memory_bar(stage, predicted.capacity_bytes, 8),
        )
        for stage in predicted.stages
    ]
    numbers = f"stage, layers, held, {', '.join(name for name, _ in _PARTS)}, total"
    title = "GiB on one rank of each stage"
    return make_table(f"{numbers}, of GPU", rows, title, right=numbers, bars="of GPU")


def _export(resolved: ResolvedWork, to: str) -> CommandResult:
    work = resolved.work
    asked_for = resolved.workload
    exported = bridge.find_bridge(to).export_config(
        work.layout,
        work.model,
        sequence_length=asked_for.sequence_length,
        global_batch=asked_for.global_batch,
    )
    violated = work.check()
    notes = [NoteView(f"this layout is not sound: {problem}") for problem in violated]
    # On a terminal the text's own comments say the rest; a pipe may drop them.
    notes += [NoteView(str(problem)) for problem in exported.unexpressed]
    notes += [NoteView(f"assumed: {problem}") for problem in exported.assumed]
    data = {
        "target": to,
        "text": exported.text,
        "unexpressed": [problem._asdict() for problem in exported.unexpressed],
        "assumed": [problem._asdict() for problem in exported.assumed],
        "problems": [problem._asdict() for problem in violated],
    }
    return CommandResult(
        "layout.export/1",
        data,
        (TextView(exported.text, verbatim=True), *notes),
        (exported.text.strip(),),
    )


def _import(args: argparse.Namespace) -> CommandResult:
    text = sys.stdin.read() if args.file == "-" else read_text(args.file)
    gpus = parse_count(args.gpus, "--gpus") if args.gpus else None
    vocab = parse_count(args.vocab, "--vocab") if args.vocab else None
    imported = bridge.find_bridge(args.source).import_config(text, gpus=gpus, vocab=vocab)
    described: dict[str, object] = {}
    if imported.model is not None:
        described["model"] = encode(imported.model)
    described["layout"] = encode(imported.layout)
    if imported.sequence_length is not None:
        described["workload"] = {"sequence_length": imported.sequence_length}
    notes = [NoteView(f"not understood: {problem}") for problem in imported.unknown]
    if imported.ignored:
        notes.append(NoteView(f"no part of a layout, left out: {', '.join(imported.ignored)}"))
    data = {
        **described,
        "sequence_length": imported.sequence_length,
        "ignored": list(imported.ignored),
        "unknown": [problem._asdict() for problem in imported.unknown],
    }
    body = dump_data(described, ".toml")
    return CommandResult("layout.import/1", data, (TextView(body), *notes), (body.strip(),))
