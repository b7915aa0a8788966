"""`mw train JOB`: train a model as one TOML file says, and go on where an earlier session ended."""

import argparse
import math
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from meshwright.cli.flags.overrides import parse_overrides
from meshwright.cli.parser import add_common
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, FieldsView, NoteView, View, make_fields
from meshwright.cli.train.config_values import list_config_values
from meshwright.cli.train.local_ranks import find_run_folder, run_local_ranks
from meshwright.cli.train.page import write_report
from meshwright.cli.train.recipe import (
    RECIPE_OVERRIDES,
    RECIPES,
    find_loss_unit,
    format_evaluation,
    is_recipe,
    list_recipe_notes,
    read_recipe_job,
)
from meshwright.cli.train.rl import count_ranks, is_rl_job, run_rl_training
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.train.run_folder.run_folder import has_run
from meshwright.run.train.signals import use_default_sigint
from meshwright.spec.model import count_parameters
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_bytes, format_count, format_quantity

if TYPE_CHECKING:
    from meshwright.cli.train.recipe import ResolvedRecipe
    from meshwright.run.train.job.job_file import JobWithOrigins
    from meshwright.run.train.train_result import TrainResult

EXAMPLES = (
    "mw train examples/train-tiny.toml",
    "mw train examples/train-tiny.toml optimizer.lr=1e-3 layout.microbatch=4 --output-dir "
    "runs/slow",
    "mw train examples/train-tiny.toml --profile-steps 10-12",
    "mw train examples/train-tiny.toml --dry-run",
    "mw train --recipe lora path/of/model data.sources=chats.jsonl data.validation_fraction=0.05",
    "mw train --recipe grpo sorting-digits steps=20 --output-dir runs/digits",
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
    parser.add_argument("--output-dir", metavar="RUN", help="the run's folder (default: runs/JOB)")
    parser.add_argument(
        "--no-resume",
        action="store_true",
        help="start from step 0; an earlier run in the folder is moved aside, not deleted (not of "
        "grpo)",
    )
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        help="start so many ranks on this machine and train over them",
    )
    parser.add_argument(
        "--rollout-only", action="store_true", help="of grpo: draw and judge, and train nothing"
    )
    parser.add_argument(
        "--replay", metavar="FILE", help="of grpo: train on recorded rollouts, without an engine"
    )
    parser.add_argument(
        "--stop-at-step", metavar="STEP", help="end this session after a step (not of grpo)"
    )
    parser.add_argument(
        "--profile-steps", metavar="STEPS", help="record steps, such as 10-12, into RUN/timeline"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show every value and where it came from, and stop"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with how the session ended."""
    _set_up(os.environ)
    # What is shown is the same for all ranks.
    if args.nproc_per_node is not None and not args.dry_run:
        raise SystemExit(run_local_ranks(args, count_ranks(args) if is_rl_job(args) else None))
    with _notes_for_people(), _needs_torch():
        with use_default_sigint():
            from meshwright.run.train import loop  # noqa: F401 - what takes long to load, at once
            from meshwright.run.train.job.job_file import read_job_with_origins

        _require_recipe(args.recipe)
        if has_run(Path(args.job)):
            args.output_dir = args.output_dir or args.job
            args.job = str(Path(args.job) / "config.toml")
        if is_rl_job(args):
            return run_rl_training(args)
        _require_no_rollouts(args)
        recipe: ResolvedRecipe | None = None
        try:
            if is_recipe(args):
                recipe = read_recipe_job(args)
                asked = recipe.job
            else:
                asked = read_job_with_origins(args.job, parse_overrides(args.files))
        except InputError as refusal:
            _refuse(refusal)
        return _explained(asked, recipe) if args.dry_run else _trained(args, asked, recipe)


def _require_recipe(name: str | None) -> None:
    if name is None or name in RECIPES:
        return
    if name.lower() in RECIPE_OVERRIDES:
        what = f"{name} is a setting of grpo: {RECIPE_OVERRIDES[name.lower()]}"
        raise InputError([Problem("--recipe", what, "use --recipe grpo with it")])
    raise InputError([build_unknown_name_problem("recipe", name, list(RECIPES), "--recipe")])


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
    from meshwright.run.train.distributed_init import reject_job_on_all_ranks

    reject_job_on_all_ranks(refusal, os.environ)


def _speaks(environment: Mapping[str, str]) -> bool:
    """Say whether this process answers: of several ranks the first does."""
    from meshwright.run.parallel.launch.world import read_world

    return read_world(environment).rank == 0


def _trained(
    args: argparse.Namespace, asked: "JobWithOrigins", recipe: "ResolvedRecipe | None"
) -> CommandResult:
    from meshwright.run.train.loop import train
    from meshwright.run.train.loss_guard import TrainingStoppedError
    from meshwright.run.train.profiling.step_profiler import ProfiledSteps
    from meshwright.run.train.run_folder.run_timeline import get_profile_folder

    chosen = ProfiledSteps.parse(args.profile_steps) if args.profile_steps else None
    stop_at_step = None if args.stop_at_step is None else _step(args.stop_at_step)
    job, folder, speaks = asked.job, find_run_folder(args), _speaks(os.environ)
    if args.quiet or args.json:
        output = msgspec.structs.replace(job.logging, progress="none")
        job = msgspec.structs.replace(job, logging=output)
    try:
        task = None if recipe is None else recipe.task
        outcome = train(
            job,
            folder,
            profile_steps=chosen,
            stop_at_step=stop_at_step,
            restart=args.no_resume,
            task=task,
        )
    except TrainingStoppedError as stop:
        if not speaks:
            raise
        report = write_report(folder, job, "stopped", make_fields({"stopped": stop}))
        print_to_stderr(f"note: wrote {report}")
        raise
    if not speaks:
        # Without a word, in whatever form the first rank answers. It also has the exit code of a
        # signal: a launcher ends all ranks at the first bad one, and the first saves last.
        raise SystemExit(0)
    profiled = None if chosen is None else get_profile_folder(folder, job.layout.gpus)
    notes = [NoteView(text) for text in _remarks(outcome, stop_at_step, profiled)]
    if recipe is not None and outcome.steps >= outcome.total_steps:
        notes += [NoteView(text) for text in list_recipe_notes(asked, folder)]
    about = summarize_session(
        outcome, "nats per token" if recipe is None else find_loss_unit(asked)
    )
    if (
        outcome.resumed_at_step != outcome.steps
    ):  # else the page of the last session has more to say
        title = f"{outcome.steps:,} of {outcome.total_steps:,} steps"
        notes.append(NoteView(f"wrote {write_report(folder, job, title, about)}"))
    quiet = tuple(
        f"{value:.6g}" for value in (outcome.eval_loss or outcome.loss,) if value is not None
    )
    data = _finite({**outcome._asdict(), "folder": str(outcome.folder)})
    shown: tuple[View, ...] = (about, *notes)
    shown = shown if recipe is None else (recipe.data, *shown)
    return CommandResult("train/2", data, shown, quiet, outcome.exit_code)


def _finite(data: Any) -> Any:
    """Put None in place of what is no number."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _remarks(
    outcome: "TrainResult", stop_at_step: int | None, profiled: Path | None
) -> Iterator[str]:
    if outcome.stop_signal is not None:
        yield f"stopped by {outcome.stop_signal} after step {outcome.steps:,}, which is saved"
    if outcome.resumed_at_step is not None and outcome.resumed_at_step >= outcome.total_steps:
        yield (
            "the run was finished before; --no-resume starts from step 0, "
            "more workload.tokens go on"
        )
    elif stop_at_step is not None and outcome.steps >= stop_at_step:
        if outcome.resumed_at_step == outcome.steps:
            yield f"step {stop_at_step:,} was done before, so nothing was trained"
        if outcome.steps < outcome.total_steps:
            yield "the same command without --stop-at-step, or with a later step, goes on from here"
    elif outcome.steps < outcome.total_steps:
        yield "the same command goes on from here"
    if profiled is not None and profiled.exists():
        yield f"mw timeline show {shlex.quote(str(profiled))} looks into the profiled steps"


def summarize_session(outcome: "TrainResult", unit: str = "nats per token") -> FieldsView:
    """Return how a session ended, for people."""
    done = f"{outcome.steps:,} of {outcome.total_steps:,}"
    pairs: dict[str, object] = {
        "run": outcome.folder,
        "steps": done
        if outcome.resumed_at_step is None
        else f"{done}, from {outcome.resumed_at_step:,} on",
        "tokens": format_count(outcome.tokens),
        "loss": _or_none(outcome.loss, f"{{:.4f}} {unit}, mean of the last steps"),
        "held-out loss": _or_none(outcome.eval_loss, f"{{:.4f}} {unit}"),
        **format_evaluation(outcome.eval_metrics),
        "speed": _or_none(outcome.tokens_per_s, "{:,.0f} tokens/s"),
        "MFU": _or_none(outcome.mfu, "{:.1%} of the device's peak in this precision"),
        "memory": None
        if outcome.max_memory_allocated_bytes is None
        else format_bytes(outcome.max_memory_allocated_bytes),
        "data wait": _or_none(outcome.data_wait_fraction, "{:.2%} of the time of steps"),
        "left out": format_quantity(outcome.skipped_steps, "step")
        if outcome.skipped_steps
        else None,
        "device": outcome.device,
    }
    return make_fields(pairs)


def _or_none(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _step(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InputError([Problem("--stop-at-step", f"{text!r} is no step", "give a number from 1 on")])


def _explained(asked: "JobWithOrigins", recipe: "ResolvedRecipe | None") -> CommandResult:
    """Show every value of a job with its origin, for `--dry-run`."""
    job = asked.job
    about = make_fields(
        {
            "model": f"{job.model.name}, {format_count(count_parameters(job.model).total)} "
            "parameters",
            "steps": f"{job.workload.num_steps:,} of {job.workload.tokens_per_step:,} tokens each",
        }
    )
    values = list_config_values(job, asked.origins)
    views: tuple[View, ...] = (
        about,
        values.table,
        *(NoteView(text) for text in job.list_warnings()),
    )
    if recipe is not None:
        views = (recipe.data, *views)
    return CommandResult("train.job/2", values.data, views, values.quiet_lines)


@contextmanager
def _needs_torch() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingDependency(f"training needs {error.name}", hint) from None


@contextmanager
def _notes_for_people() -> Iterator[None]:
    """Print our own warnings as notes, without the line of code that they come from."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, *rest: Any
        ) -> None:
            if category is UserWarning and "meshwright" in Path(filename).parts:
                print_to_stderr(f"note: {message}")
            else:
                before(message, category, filename, *rest)

        setattr(warnings, "showwarning", show)  # noqa: B010 - the stub names every argument
        yield
