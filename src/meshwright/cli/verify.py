"""`mw verify MODEL --layout …`: do layouts compute what one device computes, and if not, where?"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.job_outline import near
from meshwright.cli.layouts import LAYOUT_EXAMPLE, layout_at, read_layouts, within
from meshwright.cli.parser import add_common
from meshwright.cli.verify_dry_run import rehearsed
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.spec.bounds import require, whole
from meshwright.spec.files import FORMATS, load_data
from meshwright.spec.layout import Layout
from meshwright.spec.layout.words import words_of
from meshwright.spec.model import Model, count_parameters
from meshwright.spec.read import plain
from meshwright.spec.units import format_count, format_seconds, parse_count
from meshwright.spec.work import read_model

if TYPE_CHECKING:
    from meshwright.run.parallel.verify.shrink import Shrunk
    from meshwright.run.parallel.verify.step import MakeUpdates
    from meshwright.run.parallel.verify.verify import Verdict

EXAMPLES = (
    'mw verify llama3.1-8b --layout "tp=2,sequence_parallel=true" --layout "pp=2,dp=2,zero=1"',
    'mw verify deepseek-v3 --layout "dp=2,ep=2" --precision bf16',
    'mw verify llama3-70b --layout "tp=8,sequence_parallel=true,pp=4,dp=8,zero=1" --dry-run',
    'mw verify examples/train-tiny.toml --layout "tp=2,dp=2"',
)
_NEEDED = {"torch"}
_MEANING = (
    "error: root mean square of the difference over a rank's part, relative to the whole tensor "
    "in fp32; one device: the same without a layout; limit: what is let through"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = 'mw verify MODEL --layout "KEY=VALUE,…" [--layout …] [flags]'
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
        "--sequence", metavar="N", help="tokens of a sequence (default: 32; 4096 in a dry run)"
    )
    parser.add_argument(
        "--sequences", metavar="N", help="sequences of the step (default: 8; a dry run's: few)"
    )
    parser.add_argument("--seed", default="0", metavar="N", help="of weights and tokens")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="run nothing: play the ranks of the real model one by one, on shapes alone",
    )  # fmt: skip
    parser.add_argument(
        "--full", action="store_true", help="dry run: play every rank, not some of each kind"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with a verdict for each layout."""
    model, layouts = _asked(args)
    try:
        if args.dry_run:
            length = _count(args.sequence or "4096", "--sequence")
            batch = None if args.sequences is None else _count(args.sequences, "--sequences")
            return rehearsed(model, layouts, length, batch, full=args.full)
        if args.full:
            fix = "add --dry-run, or leave it out"
            raise InputError([Problem("--full", "is about dry runs", fix)])
        return _verified(args, model, layouts)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingPart(f"verifying needs {error.name}", hint) from None


def _asked(args: argparse.Namespace) -> tuple[Model, list[Layout]]:
    """Return the model and the layouts; a job or a work file has both."""
    path, layouts = Path(args.model), read_layouts(args.layouts)
    data = load_data(path) if path.suffix.lower() in FORMATS else {}
    if "model" not in data:
        model = read_model(args.model)
    else:
        model = read_model(near(path, data["model"]), f"{path}: model")
        layouts = layouts or read_layouts([args.model])
    if not layouts:
        fix = f"name one or more, such as {LAYOUT_EXAMPLE}"
        raise InputError([Problem("--layout", "is missing: there is nothing to verify", fix)])
    return model, layouts


def updates_for(model: Model) -> "MakeUpdates":
    """Return how the trainer's optimizer is made for a small model."""
    from meshwright.run.parallel.verify.step import CLIP, LEARNING_RATE, quiet_eps
    from meshwright.run.train.optimizer.optimizer import make_optimizer
    from meshwright.run.train.optimizer.settings import OptimizerSettings

    settings = OptimizerSettings(
        lr=LEARNING_RATE,
        warmup_steps=0,
        schedule="constant",
        clip=CLIP,
        eps=quiet_eps(count_parameters(model).total),
    )
    return partial(make_optimizer, settings=settings, total_steps=1)


def _count(text: str, where: str) -> int:
    found = parse_count(text, where)
    require(whole(where, found))
    return found


def _verified(args: argparse.Namespace, model: Model, layouts: list[Layout]) -> Answer:
    from meshwright.run.parallel.verify.fit import problems_of
    from meshwright.run.parallel.verify.shrink import shrink
    from meshwright.run.parallel.verify.step import Asked
    from meshwright.run.parallel.verify.verify import check, multiple_of, verify

    length = _count(args.sequence or "32", "--sequence")
    sequences = _count(args.sequences or "8", "--sequences")
    seed = parse_count(args.seed, "--seed")
    check(layouts, args.precision)
    problems = []
    for number, layout in enumerate(layouts, 1):
        at = layout_at(number, len(layouts))
        found = problems_of(model, layout, sequence=length, sequences=sequences)
        problems += [problem._replace(where=within(at, problem.where)) for problem in found]
    if problems:
        raise InputError(problems)
    small = shrink(model, layouts, sequence=length, multiple=multiple_of(args.precision))
    asked = Asked(small.model, sequences, length, seed, updates_for(small.model))
    verdicts = verify(asked, small.layouts, args.precision)
    agree = all(verdict.agrees for verdict in verdicts)
    step = f"{sequences} × {length} tokens, {args.precision}, against one device in fp32"
    data = {
        "model": model.name,
        "precision": args.precision,
        "sequence": length,
        "sequences": sequences,
        "seed": seed,
        "parameters": count_parameters(small.model).total,
        "shrunk": [change._asdict() for change in small.changes],
        "agree": agree,
        "layouts": [_data(verdict) for verdict in verdicts],
    }
    size = format_count(count_parameters(small.model).total)
    views: list[View] = [
        facts({"model": f"{model.name}, shrunk to {size} parameters", "step": step}),
        _shrunk(small),
        _verdicts(layouts, verdicts),
        _errors(verdicts, args.precision),
        *(_disagreement(number, verdict) for number, verdict in enumerate(verdicts, 1)
          if not verdict.agrees),
        Note(_MEANING),
    ]  # fmt: skip
    quiet = tuple("agrees" if verdict.agrees else "disagrees" for verdict in verdicts)
    return Answer("verify/1", data, tuple(views), quiet, 0 if agree else 1)


def _shrunk(small: "Shrunk") -> View:
    rows = [(change.what, _shown(change.before), _shown(change.after)) for change in small.changes]
    return table("shrunk, from, to", rows, right="from, to")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _verdicts(layouts: list[Layout], verdicts: "Sequence[Verdict]") -> View:
    rows = [
        (number, words_of(layout), layout.gpus, _word(verdict), format_seconds(verdict.wall_s))
        for number, (layout, verdict) in enumerate(zip(layouts, verdicts, strict=True), 1)
    ]
    numbers = "no., ranks, took"
    return table("no., layout, ranks, verdict, took", rows, right=numbers, wide="layout")


def _word(verdict: "Verdict") -> str:
    if verdict.failure:
        return "did not run"
    return "agrees" if verdict.agrees else "disagrees"


def _errors(verdicts: "Sequence[Verdict]", precision: str) -> View:
    rows = [
        (number, worst.kind, f"{worst.error:.1e}",
         "" if precision == "fp32" else f"{worst.alone:.1e}",
         f"{worst.limit:.1e}", worst.name, worst.rank)
        for number, verdict in enumerate(verdicts, 1)
        for worst in verdict.worst
    ]  # fmt: skip
    columns = "no., worst, error, one device, limit, tensor, rank"
    return table(columns, rows, right="no., error, one device, limit, rank", wide="tensor")


def _disagreement(number: int, verdict: "Verdict") -> View:
    title = f"layout {number}"
    if verdict.first is None:
        return facts({"did not run": verdict.failure}, title)
    first = verdict.first
    worst = first.worst
    return facts(
        {
            "first to disagree": f"{first.kind} {first.name}",
            "on ranks": ", ".join(map(str, first.ranks)),
            "error": f"{worst.error:.2e} on rank {worst.rank}, {worst.limit:.0e} is let through",
        },
        title,
    )


def _data(verdict: "Verdict") -> dict[str, Any]:
    first = verdict.first
    return {
        "layout": plain(verdict.layout),
        "agrees": verdict.agrees,
        "failure": verdict.failure,
        "wall_s": verdict.wall_s,
        "worst": [each._asdict() for each in verdict.worst],
        "first": None
        if first is None
        else {"kind": first.kind, "name": first.name, "ranks": first.ranks,
              "error": first.worst.error, "limit": first.worst.limit},
        "tensors": [each._asdict() for each in verdict.deviations],
    }  # fmt: skip
