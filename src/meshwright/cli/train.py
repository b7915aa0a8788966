"""`mw train JOB`: train a model as one TOML file says, and go on where an earlier sitting ended."""

import argparse
import math
import os
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from meshwright.cli.answer import Answer, Facts, Note, View, facts, table
from meshwright.cli.parser import add_common
from meshwright.cli.train_page import write_report
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.spec.fields import fields
from meshwright.spec.model import count_parameters
from meshwright.spec.units import format_bytes, format_count

if TYPE_CHECKING:
    from meshwright.run.train.job_file import AskedJob
    from meshwright.run.train.outcome import Outcome

EXAMPLES = (
    "mw train examples/train-tiny.toml",
    "mw train examples/train-tiny.toml optimizer.lr=1e-3 layout.microbatch=4 --folder runs/slow",
    "mw train examples/train-tiny.toml --profile 10-12",
    "mw train examples/train-tiny.toml --dry-run",
)

_NEEDED = {"torch", "safetensors", "tokenizers"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw train JOB [KEY=VALUE ...] [flags]"
    parser.add_argument(
        "job",
        metavar="JOB",
        help="TOML file: model, layout, workload, data, …; or a run to go on with",
    )
    # Of this name, the words after a flag are added to it too.
    parser.add_argument(
        "files", nargs="*", default=[], metavar="KEY=VALUE", help="values in place of the file's"
    )
    parser.add_argument("--folder", metavar="RUN", help="the run's folder (default: runs/JOB)")
    parser.add_argument(
        "--fresh", action="store_true",
        help="begin anew; an earlier run in the folder is moved aside, not deleted",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", metavar="N", help="start so many ranks on this machine and train over them"
    )
    parser.add_argument("--until", metavar="STEP", help="end this sitting after a step")
    parser.add_argument(
        "--profile", metavar="STEPS", help="record steps, such as 10-12, into RUN/timeline"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show every value and where it came from, and stop"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with how the sitting ended."""
    _set_up(os.environ)
    if args.nproc is not None and not args.dry_run:  # what is shown is the same for all ranks
        raise SystemExit(_ranks_ended(args))
    with _notes_for_people(), _needs_torch():
        from meshwright.run.train.job_file import ask_job
        from meshwright.run.train.run_folder import holds_run

        if holds_run(Path(args.job)):
            args.job = str(Path(args.job) / "config.toml")
        try:
            asked = ask_job(args.job, changed(args.files))
        except InputError as refusal:
            _refuse(refusal)
        return _explained(asked) if args.dry_run else _trained(args, asked)


def _set_up(environment: "os._Environ[str]") -> None:
    """Choose what torch reads from the environment once, when it is loaded."""
    # Long blocks of many sizes come and go in training.
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch's profiler logs its own starting and stopping otherwise.
    environment.setdefault("KINETO_LOG_LEVEL", "6")


def _ranks_ended(args: argparse.Namespace) -> int:
    """Train by ranks of this machine, each a process, of which the first answers."""
    from meshwright.run.parallel.launch import local

    if not args.nproc.isdecimal() or not int(args.nproc):
        fix = "give a number from 1 on"
        raise InputError([Problem("--nproc", f"{args.nproc!r} is no number of ranks", fix)])
    words = [args.job, *args.files]
    for flag in ("folder", "until", "profile"):
        value = getattr(args, flag)
        words += [] if value is None else [f"--{flag}", value]
    words += [f"--{flag}" for flag in ("fresh", "json", "quiet") if getattr(args, flag)]
    return local.run(words, int(args.nproc))


def _refuse(refusal: InputError) -> NoReturn:
    """Refuse a job that cannot be read; where there are several ranks, on all of them."""
    from meshwright.run.train.joining import refuse_together

    refuse_together(refusal, os.environ)


def _speaks(environment: Mapping[str, str]) -> bool:
    """Say whether this process answers: of several ranks the first does."""
    from meshwright.run.parallel.launch.environment import world_of

    return world_of(environment).rank == 0


def _trained(args: argparse.Namespace, asked: "AskedJob") -> Answer:
    from meshwright.run.train.guards import TrainingStopped
    from meshwright.run.train.loop import train
    from meshwright.run.train.profile import ChosenSteps
    from meshwright.run.train.recording import profile_folder
    from meshwright.run.train.run_folder import holds_run

    chosen = ChosenSteps.parse(args.profile) if args.profile else None
    until = None if args.until is None else _step(args.until)
    job, folder, speaks = asked.job, _folder(args), _speaks(os.environ)
    if args.quiet or args.json:
        output = msgspec.structs.replace(job.output, progress="none")
        job = msgspec.structs.replace(job, output=output)
    notes = []
    if args.fresh and speaks and holds_run(folder):
        notes.append(Note(f"moved the earlier run to {_moved_aside(folder)}"))
    try:
        outcome = train(job, folder, profile=chosen, until=until)
    except TrainingStopped as stop:
        if not speaks:
            raise
        report = write_report(folder, job, "stopped", facts({"stopped": stop}))
        print(f"note: wrote {report}", file=sys.stderr)
        raise
    if not speaks:
        raise SystemExit(0)  # without a word, in whatever form the first rank answers
    profiled = None if chosen is None else profile_folder(folder, job.layout.gpus)
    notes += [Note(text) for text in _remarks(outcome, until, profiled)]
    if outcome.resumed_at != outcome.steps:  # else the page of the last sitting has more to say
        title = f"{outcome.steps:,} of {outcome.all_steps:,} steps"
        notes.append(Note(f"wrote {write_report(folder, job, title, summary(outcome))}"))
    quiet = tuple(
        f"{value:.6g}" for value in (outcome.held_out_loss or outcome.loss,) if value is not None
    )
    data = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in {**outcome._asdict(), "folder": str(outcome.folder)}.items()
    }
    return Answer("train/1", data, (summary(outcome), *notes), quiet)


def _remarks(outcome: "Outcome", until: int | None, profiled: Path | None) -> Iterator[str]:
    if outcome.stopped_by is not None:
        yield f"stopped by {outcome.stopped_by} after step {outcome.steps:,}, which is saved"
    if outcome.resumed_at is not None and outcome.resumed_at >= outcome.all_steps:
        yield "the run was finished before; --fresh begins anew, more workload.tokens go on"
    elif until is not None and outcome.steps >= until:
        if outcome.resumed_at == outcome.steps:
            yield f"step {until:,} was done before, so nothing was trained"
        if outcome.steps < outcome.all_steps:
            yield "the same command without --until, or with a later step, goes on from here"
    elif outcome.steps < outcome.all_steps:
        yield "the same command goes on from here"
    if profiled is not None and profiled.exists():
        yield f"mw timeline show {profiled} looks into the profiled steps"


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
        "data wait": _or_none(outcome.data_wait_share, "{:.2%} of the time of steps"),
        "left out": f"{outcome.skipped:,} steps" if outcome.skipped else None,
        "device": outcome.device,
    }
    return facts(pairs)


def _or_none(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _step(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InputError([Problem("--until", f"{text!r} is no step", "give a number from 1 on")])


def _folder(args: argparse.Namespace) -> Path:
    if args.folder:
        return Path(args.folder)
    job = Path(args.job)
    # The configuration that a run keeps goes on with that run.
    is_kept = job.name == "config.toml" and (job.parent / "checkpoints").is_dir()
    return job.parent if is_kept else Path("runs") / job.stem


def _moved_aside(folder: Path) -> Path:
    """Rename a run's folder to the first free name beside it, unless somebody trains there."""
    from meshwright.run.train.run_folder import claimed

    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    with claimed(folder):
        return folder.rename(aside)


def changed(words: Sequence[str]) -> dict[str, Any]:
    """Turn `optimizer.lr=1e-4` into nested data; a value is TOML, or text where that fails."""
    data: dict[str, Any] = {}
    problems = []
    for word in words:
        path, equals, text = word.partition("=")
        names = [name.strip() for name in path.split(".")]
        inner = data
        for name in names[:-1]:
            below = inner.setdefault(name, {})
            inner = below if isinstance(below, dict) else {}
        if not equals or not all(names):
            problems.append(Problem(word, "changes nothing", "write it like optimizer.lr=1e-4"))
        elif isinstance(inner.get(names[-1]), dict):
            problems.append(Problem(word, "stands beside values inside it", "give one of them"))
        else:
            inner[names[-1]] = _value(text.strip())
    if problems:
        raise InputError(problems)
    return data


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explained(asked: "AskedJob") -> Answer:
    """Show every value of a job with its origin, for `--dry-run`."""
    job = asked.job
    about = facts(
        {
            "model": f"{job.model.name}, {format_count(count_parameters(job.model).total)} "
            "parameters",
            "steps": f"{job.workload.steps:,} of {job.workload.tokens_per_step:,} tokens each",
        }
    )
    rows = [(path, value, asked.origin(path)) for path, value in _values(job)]
    data = {"values": [{"field": f, "value": v, "source": s} for f, v, s in rows]}
    shown = [(field, _text(value), source) for field, value, source in rows]
    values = table("field, value, source", shown, wide="value, source")
    views: tuple[View, ...] = (about, values, *(Note(text) for text in job.remarks()))
    return Answer("train.job/1", data, views, tuple(f"{f}={v}" for f, v, _ in shown))


def _values(job: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Go through the values of a job; its model is told by its name."""
    for field in fields(type(job)):
        value = getattr(job, field.name)
        if field.name == "model":
            yield field.name, value.name
        elif isinstance(value, msgspec.Struct):
            for inner in fields(type(value)):
                yield f"{field.name}.{inner.name}", msgspec.to_builtins(getattr(value, inner.name))
        else:
            yield field.name, value


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(one) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


@contextmanager
def _needs_torch() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingPart(f"training needs {error.name}", hint) from None


@contextmanager
def _notes_for_people() -> Iterator[None]:
    """Print our own warnings as notes, without the line of code that they come from."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, *rest: Any
        ) -> None:
            if category is UserWarning and "meshwright" in Path(filename).parts:
                print(f"note: {message}", file=sys.stderr)
            else:
                before(message, category, filename, *rest)

        setattr(warnings, "showwarning", show)  # noqa: B010 - the stub names every argument
        yield
