"""`mw parity MODEL --layout …`: do layouts compute what one device computes, and if not, where?"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.flags.job_outline import resolve_path
from meshwright.cli.flags.layouts import (
    LAYOUT_EXAMPLE,
    format_layout_position,
    nest_location,
    read_layouts,
)
from meshwright.cli.parity.dry_run import show_rank_communication
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.file_formats import FORMATS, load_data
from meshwright.spec.job_spec import read_model
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_names import describe_layout
from meshwright.spec.model import Model, count_parameters
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_count, format_seconds, parse_count

if TYPE_CHECKING:
    from meshwright.run.parallel.verify.layout_verification import LayoutCheck
    from meshwright.run.parallel.verify.shrunk_model import ShrunkModel
    from meshwright.run.parallel.verify.verification_step import OptimizerStepFactory


EXAMPLES = (
    'mw parity llama3.1-8b --layout "tp=2,sequence_parallel=true" --layout "pp=2,dp=2,zero=1"',
    'mw parity deepseek-v3 --layout "dp=2,ep=2" --precision bf16',
    'mw parity llama3-70b --layout "tp=8,sequence_parallel=true,pp=4,dp=8,zero=1" --dry-run',
    'mw parity examples/train-tiny.toml --layout "tp=2,dp=2"',
)

_NEEDED = {"torch"}

_MEANING = (
    "error: root mean square of the difference over a rank's part, relative to the whole tensor "
    "in fp32; one device: the same without a layout; limit: what is let through"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = 'mw parity MODEL --layout "KEY=VALUE,…" [--layout …] [flags]'
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="catalog name, a TOML file, a folder with config.json, or a job with its layout",
    )
    parser.add_argument(
        "--layout", action="append", default=[], metavar="LAYOUT", dest="layouts",
        help="fields of a layout, KEY=VALUE with commas, or a TOML file; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--precision", default="fp32", metavar="WORD",
        help="number format of the products: fp32, bf16, fp16 or fp8-… (default: fp32)",
    )  # fmt: skip
    parser.add_argument(
        "--sequence-length",
        metavar="N",
        help="tokens of a sequence (default: 32; 4096 in a dry run)",
    )
    parser.add_argument(
        "--global-batch", metavar="N", help="sequences of the step (default: 8; a dry run's: few)"
    )
    parser.add_argument("--seed", default="0", metavar="N", help="of weights and tokens")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="run nothing: play the ranks of the real model one by one, on shapes alone",
    )  # fmt: skip
    parser.add_argument(
        "--all-ranks", action="store_true", help="dry run: play every rank, not some of each kind"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with a verdict for each layout."""
    model, layouts = _asked(args)
    try:
        if args.dry_run:
            length = _count(args.sequence_length or "4096", "--sequence-length")
            batch = (
                None if args.global_batch is None else _count(args.global_batch, "--global-batch")
            )
            return show_rank_communication(model, layouts, length, batch, full=args.all_ranks)
        if args.all_ranks:
            fix = "add --dry-run, or leave it out"
            raise InputError([Problem("--all-ranks", "is about dry runs", fix)])
        return _verified(args, model, layouts)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingDependency(f"verifying needs {error.name}", hint) from None


def _asked(args: argparse.Namespace) -> tuple[Model, list[Layout]]:
    """Return the model and the layouts; a job or a work file has both."""
    path, layouts = Path(args.model), read_layouts(args.layouts)
    data = load_data(path) if path.suffix.lower() in FORMATS else {}
    if "model" not in data:
        model = read_model(args.model)
    else:
        model = read_model(resolve_path(path, data["model"]), f"{path}: model")
        layouts = layouts or read_layouts([args.model])
    if not layouts:
        fix = f"name one or more, such as {LAYOUT_EXAMPLE}"
        raise InputError([Problem("--layout", "is missing: there is nothing to verify", fix)])
    return model, layouts


def make_optimizer_factory(model: Model) -> "OptimizerStepFactory":
    """Return how the trainer's optimizer is made for a small model."""
    from meshwright.run.parallel.verify.verification_step import (
        CLIP_GRAD,
        LEARNING_RATE,
        compute_verify_eps,
    )
    from meshwright.run.train.optimizer.optimizer import make_optimizer
    from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig

    settings = OptimizerConfig(
        lr=LEARNING_RATE,
        warmup_steps=0,
        schedule="constant",
        clip_grad=CLIP_GRAD,
        eps=compute_verify_eps(count_parameters(model).total),
    )
    return partial(make_optimizer, settings=settings, total_steps=1)


def _count(text: str, where: str) -> int:
    found = parse_count(text, where)
    raise_problems(check_integer(where, found))
    return found


def _verified(args: argparse.Namespace, model: Model, layouts: list[Layout]) -> CommandResult:
    from meshwright.run.parallel.compatibility import find_verify_problems
    from meshwright.run.parallel.verify.layout_verification import (
        check_layouts_supported,
        get_width_multiple,
        verify_layouts,
    )
    from meshwright.run.parallel.verify.shrunk_model import shrink_model
    from meshwright.run.parallel.verify.verification_step import VerifyCase

    length = _count(args.sequence_length or "32", "--sequence-length")
    sequences = _count(args.global_batch or "8", "--global-batch")
    seed = parse_count(args.seed, "--seed")
    check_layouts_supported(layouts, args.precision)
    problems = []
    for number, layout in enumerate(layouts, 1):
        at = format_layout_position(number, len(layouts))
        found = find_verify_problems(model, layout, sequence_length=length, global_batch=sequences)
        problems += [problem._replace(where=nest_location(at, problem.where)) for problem in found]
    if problems:
        raise InputError(problems)
    small = shrink_model(
        model, layouts, sequence_length=length, multiple=get_width_multiple(args.precision)
    )
    asked = VerifyCase(small.model, sequences, length, seed, make_optimizer_factory(small.model))
    verdicts = verify_layouts(asked, small.layouts, args.precision)
    agree = all(verdict.passed for verdict in verdicts)
    step = f"{sequences} × {length} tokens, {args.precision}, against one device in fp32"
    data = {
        "model": model.name,
        "precision": args.precision,
        "sequence_length": length,
        "global_batch": sequences,
        "seed": seed,
        "parameters": count_parameters(small.model).total,
        "shrunk": [change._asdict() for change in small.changes],
        "agree": agree,
        "layouts": [_data(verdict) for verdict in verdicts],
    }
    size = format_count(count_parameters(small.model).total)
    views: list[View] = [
        make_fields({"model": f"{model.name}, shrunk to {size} parameters", "step": step}),
        _shrunk(small),
        _verdicts(layouts, verdicts),
        _errors(verdicts, args.precision),
        *(_disagreement(number, verdict) for number, verdict in enumerate(verdicts, 1)
          if not verdict.passed),
        NoteView(_MEANING),
    ]  # fmt: skip
    quiet = tuple("agrees" if verdict.passed else "disagrees" for verdict in verdicts)
    return CommandResult("parity/1", data, tuple(views), quiet, 0 if agree else 1)


def _shrunk(small: "ShrunkModel") -> View:
    rows = [
        (change.field, _shown(change.original), _shown(change.reduced)) for change in small.changes
    ]
    return make_table("shrunk, from, to", rows, right="from, to")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _verdicts(layouts: list[Layout], verdicts: "Sequence[LayoutCheck]") -> View:
    rows = [
        (
            number,
            describe_layout(layout),
            layout.gpus,
            _word(verdict),
            format_seconds(verdict.wall_s),
        )
        for number, (layout, verdict) in enumerate(zip(layouts, verdicts, strict=True), 1)
    ]
    numbers = "no., ranks, took"
    return make_table("no., layout, ranks, verdict, took", rows, right=numbers, wide="layout")


def _word(verdict: "LayoutCheck") -> str:
    if verdict.failure:
        return "did not run"
    return "agrees" if verdict.passed else "disagrees"


def _errors(verdicts: "Sequence[LayoutCheck]", precision: str) -> View:
    rows = [
        (number, worst.kind, f"{worst.error:.1e}",
         "" if precision == "fp32" else f"{worst.baseline_error:.1e}",
         f"{worst.limit:.1e}", worst.name, worst.rank)
        for number, verdict in enumerate(verdicts, 1)
        for worst in verdict.worst_deviations
    ]  # fmt: skip
    columns = "no., worst, error, one device, limit, tensor, rank"
    return make_table(columns, rows, right="no., error, one device, limit, rank", wide="tensor")


def _disagreement(number: int, verdict: "LayoutCheck") -> View:
    title = f"layout {number}"
    if verdict.first_divergence is None:
        return make_fields({"did not run": verdict.failure}, title)
    first = verdict.first_divergence
    worst = first.worst
    return make_fields(
        {
            "first to disagree": f"{first.kind} {first.name}",
            "on ranks": ", ".join(map(str, first.ranks)),
            "error": f"{worst.error:.2e} on rank {worst.rank}, {worst.limit:.0e} is let through",
        },
        title,
    )


def _data(verdict: "LayoutCheck") -> dict[str, Any]:
    first = verdict.first_divergence
    return {
        "layout": encode(verdict.layout),
        "agrees": verdict.passed,
        "failure": verdict.failure,
        "wall_s": verdict.wall_s,
        "worst": [each._asdict() for each in verdict.worst_deviations],
        "first": None
        if first is None
        else {"kind": first.kind, "name": first.name, "ranks": first.ranks,
              "error": first.worst.error, "limit": first.worst.limit},
        "tensors": [each._asdict() for each in verdict.deviations],
    }  # fmt: skip
