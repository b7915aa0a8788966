"""`mw train JOB`: train a model as one TOML file says, and go on where an earlier sitting ended."""

import argparse
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from meshwright.cli.answer import Answer, Facts, Note, View, facts
from meshwright.cli.overrides import changed
from meshwright.cli.parser import add_common
from meshwright.cli.train_loop import loop_ranks, names_loop, train_loop
from meshwright.cli.train_page import write_report
from meshwright.cli.train_ranks import ranks_ended, run_folder_of
from meshwright.cli.train_recipe import FAMILY, RECIPES, figures_of, names_recipe, unit_of
from meshwright.cli.train_recipe import ask as ask_recipe
from meshwright.cli.train_recipe import remarks as recipe_remarks
from meshwright.cli.train_values import told_values
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.train.run_folder import holds_run
from meshwright.run.train.stopping import nothing_begun
from meshwright.spec.model import count_parameters
from meshwright.spec.names import unknown_name
from meshwright.spec.units import format_bytes, format_count, format_some

if TYPE_CHECKING:
    from meshwright.cli.train_recipe import Asked
    from meshwright.run.train.job_file import AskedJob
    from meshwright.run.train.outcome import Outcome

EXAMPLES = (
    "mw train examples/train-tiny.toml",
    "mw train examples/train-tiny.toml optimizer.lr=1e-3 layout.microbatch=4 --folder runs/slow",
    "mw train examples/train-tiny.toml --profile 10-12",
    "mw train examples/train-tiny.toml --dry-run",
    "mw train --recipe lora path/of/model data.sources=chats.jsonl data.validation=0.05",
    "mw train --recipe grpo sorting-digits steps=20 --folder runs/digits",
)

_NEEDED = {"torch", "safetensors", "tokenizers"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw train JOB [KEY=VALUE ...] [flags]"
    parser.add_argument(
        "job",
        metavar="JOB",
        help="TOML file: model, layout, workload, data, …; or a run to go on with; with --recipe "
        "also a model to begin with",
    )
    # Of this name, the words after a flag are added to it too.
    parser.add_argument(
        "files", nargs="*", default=[], metavar="KEY=VALUE", help="values in place of the file's"
    )
    parser.add_argument(
        "--recipe", metavar="NAME",
        help=f"post-train: {', '.join(RECIPES)} (also PPO, RLOO, DAPO and others, by settings)",
    )  # fmt: skip
    parser.add_argument("--folder", metavar="RUN", help="the run's folder (default: runs/JOB)")
    parser.add_argument(
        "--fresh", action="store_true",
        help="begin anew; an earlier run in the folder is moved aside, not deleted (not of grpo)",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", metavar="N", help="start so many ranks on this machine and train over them"
    )
    parser.add_argument(
        "--rollout-only", action="store_true", help="of grpo: draw and judge, and train nothing"
    )
    parser.add_argument(
        "--replay", metavar="FILE", help="of grpo: train on recorded rollouts, without an engine"
    )
    parser.add_argument(
        "--until", metavar="STEP", help="end this sitting after a step (not of grpo)"
    )
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
    # What is shown is the same for all ranks.
    if args.nproc is not None and not args.dry_run:
        raise SystemExit(ranks_ended(args, loop_ranks(args) if names_loop(args) else None))
    with _notes_for_people(), _needs_torch():
        with nothing_begun():
            from meshwright.run.train import loop  # noqa: F401 - what takes long to load, at once
            from meshwright.run.train.job_file import ask_job

        _require_recipe(args.recipe)
        if holds_run(Path(args.job)):
            args.folder = args.folder or args.job
            args.job = str(Path(args.job) / "config.toml")
        if names_loop(args):
            return train_loop(args)
        _require_no_rollouts(args)
        recipe: Asked | None = None
        try:
            if names_recipe(args):
                recipe = ask_recipe(args)
                asked = recipe.asked
            else:
                asked = ask_job(args.job, changed(args.files))
        except InputError as refusal:
            _refuse(refusal)
        return _explained(asked, recipe) if args.dry_run else _trained(args, asked, recipe)


def _require_recipe(name: str | None) -> None:
    if name is None or name in RECIPES:
        return
    if name.lower() in FAMILY:
        what = f"{name} is a setting of grpo: {FAMILY[name.lower()]}"
        raise InputError([Problem("--recipe", what, "use --recipe grpo with it")])
    raise InputError([unknown_name("recipe", name, list(RECIPES), "--recipe")])


def _require_no_rollouts(args: argparse.Namespace) -> None:
    """Refuse flags of reinforcement learning where nothing is drawn."""
    given = [name for name in ("rollout_only", "replay") if getattr(args, name)]
    if given:
        what, fix = "only reinforcement learning has rollouts", "leave it out, or use --recipe grpo"
        raise InputError([Problem(f"--{name.replace('_', '-')}", what, fix) for name in given])


def _set_up(environment: "os._Environ[str]") -> None:
    """Choose what torch reads from the environment once, when it is loaded."""
    # Long blocks of many sizes come and go in training.
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch's profiler logs its own starting and stopping otherwise.
    environment.setdefault("KINETO_LOG_LEVEL", "6")


def _refuse(refusal: InputError) -> NoReturn:
    """Refuse a job that cannot be read; where there are several ranks, on all of them."""
    from meshwright.run.train.joining import refuse_together

    refuse_together(refusal, os.environ)


def _speaks(environment: Mapping[str, str]) -> bool:
    """Say whether this process answers: of several ranks the first does."""
    from meshwright.run.parallel.launch.environment import world_of

    return world_of(environment).rank == 0


def _trained(args: argparse.Namespace, asked: "AskedJob", recipe: "Asked | None") -> Answer:
    from meshwright.run.train.guards import TrainingStopped
    from meshwright.run.train.loop import train
    from meshwright.run.train.profile import ChosenSteps
    from meshwright.run.train.recording import profile_folder

    chosen = ChosenSteps.parse(args.profile) if args.profile else None
    until = None if args.until is None else _step(args.until)
    job, folder, speaks = asked.job, run_folder_of(args), _speaks(os.environ)
    if args.quiet or args.json:
        output = msgspec.structs.replace(job.output, progress="none")
        job = msgspec.structs.replace(job, output=output)
    try:
        task = None if recipe is None else recipe.task
        outcome = train(job, folder, profile=chosen, until=until, fresh=args.fresh, task=task)
    except TrainingStopped as stop:
        if not speaks:
            raise
        report = write_report(folder, job, "stopped", facts({"stopped": stop}))
        print(f"note: wrote {report}", file=sys.stderr)
        raise
    if not speaks:
        raise SystemExit(0)  # without a word, in whatever form the first rank answers
    profiled = None if chosen is None else profile_folder(folder, job.layout.gpus)
    notes = [Note(text) for text in _remarks(outcome, until, profiled)]
    if recipe is not None and outcome.steps >= outcome.all_steps:
        notes += [Note(text) for text in recipe_remarks(asked, folder)]
    about = summary(outcome, "nats per token" if recipe is None else unit_of(asked))
    if outcome.resumed_at != outcome.steps:  # else the page of the last sitting has more to say
        title = f"{outcome.steps:,} of {outcome.all_steps:,} steps"
        notes.append(Note(f"wrote {write_report(folder, job, title, about)}"))
    quiet = tuple(
        f"{value:.6g}" for value in (outcome.held_out_loss or outcome.loss,) if value is not None
    )
    data = _finite({**outcome._asdict(), "folder": str(outcome.folder)})
    shown: tuple[View, ...] = (about, *notes)
    shown = shown if recipe is None else (recipe.data, *shown)
    return Answer("train/1", data, shown, quiet)


def _finite(data: Any) -> Any:
    """Put None in place of what is no number."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    return None if isinstance(data, float) and not math.isfinite(data) else data


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


def summary(outcome: "Outcome", unit: str = "nats per token") -> Facts:
    """Return how a sitting ended, for people."""
    done = f"{outcome.steps:,} of {outcome.all_steps:,}"
    pairs: dict[str, object] = {
        "run": outcome.folder,
        "steps": done if outcome.resumed_at is None else f"{done}, from {outcome.resumed_at:,} on",
        "tokens": format_count(outcome.tokens),
        "loss": _or_none(outcome.loss, f"{{:.4f}} {unit}, mean of the last steps"),
        "held-out loss": _or_none(outcome.held_out_loss, f"{{:.4f}} {unit}"),
        **figures_of(outcome.held_out_figures),
        "speed": _or_none(outcome.tokens_per_s, "{:,.0f} tokens/s"),
        "MFU": _or_none(outcome.mfu, "{:.1%} of the device's peak in this precision"),
        "memory": None if outcome.memory_bytes is None else format_bytes(outcome.memory_bytes),
        "data wait": _or_none(outcome.data_wait_share, "{:.2%} of the time of steps"),
        "left out": format_some(outcome.skipped, "step") if outcome.skipped else None,
        "device": outcome.device,
    }
    return facts(pairs)


def _or_none(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _step(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InputError([Problem("--until", f"{text!r} is no step", "give a number from 1 on")])


def _explained(asked: "AskedJob", recipe: "Asked | None") -> Answer:
    """Show every value of a job with its origin, for `--dry-run`."""
    job = asked.job
    about = facts(
        {
            "model": f"{job.model.name}, {format_count(count_parameters(job.model).total)} "
            "parameters",
            "steps": f"{job.workload.steps:,} of {job.workload.tokens_per_step:,} tokens each",
        }
    )
    values = told_values(job, asked.origins)
    views: tuple[View, ...] = (about, values.table, *(Note(text) for text in job.remarks()))
    if recipe is not None:
        views = (recipe.data, *views)
    return Answer("train.job/1", values.data, views, values.quiet)


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
