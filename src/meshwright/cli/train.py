"""`mw train JOB`: train a model as one TOML file says, and go on where an earlier sitting ended."""

import argparse
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.answer import Answer, Facts, Note, facts, table
from meshwright.cli.parser import add_common
from meshwright.cli.train_page import write_report
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.spec.units import format_bytes, format_count

if TYPE_CHECKING:
    from meshwright.run.train.job import Job
    from meshwright.run.train.sitting import Outcome

EXAMPLES = (
    "mw train examples/train-tiny.toml",
    "mw train examples/train-tiny.toml optimizer.lr=1e-3 layout.microbatch=4 --folder runs/wider",
    "mw train examples/train-tiny.toml --profile 10-12",
    "mw train examples/train-tiny.toml --dry-run",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw train JOB [KEY=VALUE ...] [flags]"
    parser.add_argument("job", metavar="JOB", help="TOML file: model, layout, workload, data, …")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="values in place of the file's"
    )
    parser.add_argument("--folder", metavar="RUN", help="the run's folder (default: runs/<JOB>)")
    parser.add_argument(
        "--fresh", action="store_true",
        help="begin anew; an earlier run in the folder is moved aside, not deleted",
    )  # fmt: skip
    parser.add_argument("--until", metavar="STEP", type=int, help="end this sitting after a step")
    parser.add_argument(
        "--profile", metavar="STEPS", help="record steps, such as 10-12, into RUN/timeline"
    )
    parser.add_argument("--dry-run", action="store_true", help="show every value, and stop")
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with how the sitting ended."""
    # Long blocks of many sizes come and go in training; torch reads this when it first allocates.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    job = _job(args.job, args.changes)
    if args.dry_run:
        return _shown(job)
    from meshwright.run.train.loop import train
    from meshwright.run.train.profile import ChosenSteps

    chosen = ChosenSteps.parse(args.profile) if args.profile else None
    folder = Path(args.folder or Path("runs") / Path(args.job).stem)
    notes = []
    if args.fresh and folder.exists():
        notes.append(Note(f"moved the earlier run to {_moved_aside(folder)}"))
    outcome = train(job, folder, profile=chosen, until=args.until)
    report = write_report(folder, job, outcome)
    notes.append(Note(f"wrote {report}"))
    if chosen is not None:
        notes.append(Note(f"mw timeline show {folder / 'timeline'} looks into the profiled steps"))
    if outcome.steps < outcome.all_steps:
        notes.append(Note("the same command goes on from here"))
    data = {**outcome._asdict(), "folder": str(outcome.folder)}
    quiet = tuple(
        f"{value:.6g}" for value in (outcome.held_out_loss or outcome.loss,) if value is not None
    )
    return Answer("train/1", data, (summary(outcome), *notes), quiet)


def summary(outcome: "Outcome") -> Facts:
    """Return how a sitting ended, for people."""
    done = f"{outcome.steps:,} of {outcome.all_steps:,}"
    pairs: dict[str, object] = {
        "run": outcome.folder,
        "steps": done if outcome.resumed_at is None else f"{done}, from {outcome.resumed_at:,} on",
        "tokens": format_count(outcome.tokens),
        "loss": _or_none(outcome.loss, "{:.4f} nats per token, mean of the last steps"),
        "held-out loss": _or_none(outcome.held_out_loss, "{:.4f} nats per token"),
        "speed": _or_none(outcome.tokens_per_s, "{:,.0f} tokens/s"),
        "MFU": _or_none(outcome.mfu, "{:.1%} of the device's peak in this precision"),
        "memory": None if outcome.memory_bytes is None else format_bytes(outcome.memory_bytes),
        "data wait": _or_none(outcome.data_wait_share, "{:.2%} of the time"),
        "device": outcome.device,
    }
    return facts({name: value for name, value in pairs.items() if value is not None})


def _or_none(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _job(path: str, changes: Sequence[str]) -> "Job":
    try:
        from meshwright.run.train.job import load_job
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "safetensors", "tokenizers"}:
            raise
        raise MissingPart(
            f"training needs {error.name}", "pip install 'meshwright[train]'"
        ) from None
    return load_job(path, changed(changes))


def changed(words: Sequence[str]) -> dict[str, Any]:
    """Turn `optimizer.lr=1e-4` into nested data; a value is TOML, or text where that fails."""
    data: dict[str, Any] = {}
    problems = []
    for word in words:
        path, equals, text = word.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            problems.append(Problem(word, "changes nothing", "write it like optimizer.lr=1e-4"))
            continue
        inner = data
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = _value(text.strip())
    if problems:
        raise InputError(problems)
    return data


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _shown(job: "Job") -> Answer:
    import msgspec

    from meshwright.spec.files import dump
    from meshwright.spec.model import count_parameters

    count = count_parameters(job.model).total
    about = facts(
        {
            "model": f"{job.model.name}, {format_count(count)} parameters",
            "steps": f"{job.workload.steps:,} of {job.workload.tokens_per_step:,} tokens",
        }
    )
    rows = [(line,) for line in dump(job).splitlines() if line]
    data = msgspec.to_builtins(job)
    return Answer("train.job/1", data, (about, table(("job",), rows)))


def _moved_aside(folder: Path) -> Path:
    """Rename a folder to the first free name beside it."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
