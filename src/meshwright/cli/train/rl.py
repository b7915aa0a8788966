"""`mw train --recipe grpo`: reinforcement learning, from a task's name, a file or a model."""

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.flags.overrides import parse_overrides
from meshwright.cli.flags.rl_run import PRESETS, load_rl_config, parse_rl_config
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.cli.train.config_values import list_config_values
from meshwright.cli.train.local_ranks import find_run_folder
from meshwright.cli.train.recipe import list_adapter_notes
from meshwright.cli.train.rl_page import write_report
from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.world import read_world
from meshwright.run.train.run_folder.run_folder import find_recipe, has_run
from meshwright.spec.config_sources import ConfigSource, merge_sources
from meshwright.spec.file_formats import FORMATS, load_data
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_seconds

if TYPE_CHECKING:
    from meshwright.run.posttrain.rl import RLConfig, RLResult

_REFUSED = ("stop_at_step", "profile_steps", "no_resume")


def is_rl_job(args: argparse.Namespace) -> bool:
    """Tell whether a command line, or the file it names, asks for reinforcement learning."""
    if args.recipe is not None:
        return bool(args.recipe == "grpo")
    path = _file(args.job)
    try:
        data = load_data(path) if path.suffix in FORMATS and path.is_file() else {}
    except InputError:
        return False  # for whoever reads it as a job to say
    return find_recipe(data) == "grpo"


def count_ranks(args: argparse.Namespace) -> int:
    """Return how many ranks a loop's layout has; one that cannot be read is refused."""
    _require_known(args)
    return read_rl_config(argparse.Namespace(**{**vars(args), "job": str(_file(args.job))})).ranks


def _file(job: str) -> Path:
    """Return the file that names a loop: of a run's folder, its configuration."""
    path = Path(job)
    return path / "config.toml" if has_run(path) else path


def _require_known(args: argparse.Namespace) -> None:
    given = [f"--{name.replace('_', '-')}" for name in _REFUSED if getattr(args, name)]
    if given:
        what = "is nothing that reinforcement learning knows yet"
        fixes = {"--no-resume": "start in another folder: --output-dir RUN"}
        raise InputError([Problem(name, what, fixes.get(name, "leave it out")) for name in given])


def run_rl_training(args: argparse.Namespace) -> CommandResult:
    """Run the loop, and answer with what was learnt; of several ranks the first does."""
    try:
        _require_known(args)
        settings, origins = read_rl_config(args)
    except InputError as refusal:
        from meshwright.run.train.distributed_init import reject_job_on_all_ranks

        reject_job_on_all_ranks(refusal, os.environ)
    if args.dry_run:
        told = list_config_values(settings, origins)
        return CommandResult("train.job/2", told.data, (told.table,), told.quiet_lines)
    from meshwright.run.posttrain.rl import run_rl

    def say(line: str) -> None:
        if not (args.quiet or args.json):
            print_to_stderr(f"note: {line}")

    outcome = run_rl(settings, say=say, show=not (args.quiet or args.json))
    if read_world(os.environ).rank:
        raise SystemExit(0)  # without a word, in whatever form the first rank answers
    answer = _answer(settings, outcome)
    if not settings.folder:
        return answer
    said = [f"wrote {write_report(Path(settings.folder))}"]
    if settings.model and not settings.rollout_only:
        said = [*_remarks(settings), *said]
    return answer._replace(views=(*answer.views, *map(NoteView, said)))


def _remarks(settings: "RLConfig") -> Iterator[str]:
    """Say what a finished run that began with a model can be used for."""
    if settings.adapter is None:
        words = ["mw", "convert", settings.folder, "FOLDER"]
        yield f"{shlex.join(words)} writes the model"
        return
    yield from list_adapter_notes(Path(settings.folder), settings.model, settings.adapter.rank)


class _Asked(NamedTuple):
    """A loop with who set each of its values."""

    settings: "RLConfig"
    origins: dict[str, str]

    @property
    def ranks(self) -> int:
        """How many processes train it."""
        return self.settings.layout.gpus


def read_rl_config(args: argparse.Namespace) -> _Asked:
    """Return what the file, the flags and the words after it say."""
    from meshwright.run.posttrain.lora.lora_config import rename_peft_fields, split_target_list
    from meshwright.run.posttrain.rl import get_sorting_digits_preset
    from meshwright.run.posttrain.rl.config.rl_config import get_default_optimizer
    from meshwright.run.posttrain.rl.task_loader import require_huggingface_folder
    from meshwright.run.train.job.job_file import add_problem_origin

    path, words = Path(args.job), parse_overrides(args.files)
    file: dict[str, Any]
    if args.job in PRESETS:
        file = encode(get_sorting_digits_preset())
    elif (path / "config.json").is_file() or path.suffix == ".gguf":
        require_huggingface_folder(args.job)
        file = {"model": str(path)}
        if "task" not in words:
            fix = "add task.name=questions task.train=FILE, or task.name=module:function"
            raise InputError([Problem("task.name", "nothing says what is asked of it", fix)])
    elif path.suffix in FORMATS:
        file = load_rl_config(path)
    else:
        fix = f"use {', '.join(PRESETS)}, a TOML file, or a model's folder"
        raise InputError([Problem(args.job, "is no task, file or model", fix)])
    file.pop("recipe", None)
    words = split_target_list(rename_peft_fields(words))
    model = str({**file, **words}.get("model", ""))
    adapted = "adapter" in file or "adapter" in words
    sources = [
        # Each value by itself: who gives a rate keeps the schedule.
        ConfigSource(
            "recipe grpo", {"optimizer": encode(get_default_optimizer(model, adapted=adapted))}
        ),
        ConfigSource(args.job, file),
        ConfigSource(
            "--output-dir" if args.output_dir else "default", {"folder": str(find_run_folder(args))}
        ),
        ConfigSource("--rollout-only", {"rollout_only": True} if args.rollout_only else {}),
        ConfigSource("--replay", {} if args.replay is None else {"replay": args.replay}),
        ConfigSource("command line", words),
    ]
    merged = merge_sources(sources)
    try:
        return _Asked(parse_rl_config(merged.data), merged.origins)
    except InputError as error:
        raise InputError(
            add_problem_origin(problem, merged.origins, args.job) for problem in error.problems
        ) from None


def _answer(settings: "RLConfig", outcome: "RLResult") -> CommandResult:
    held = {number: dict(found) for number, found in sorted(outcome.held_out_metrics.items())}
    last = outcome.step_metrics[-1] if outcome.step_metrics else {}
    about: dict[str, object] = {
        "run": settings.folder,
        "steps": _steps(settings, outcome),
        "time": f"{format_seconds(outcome.wall_s)}, {format_seconds(outcome.cpu_s)} of processors",
    }
    about |= {f"last step, {name}": f"{value:.4g}" for name, value in _told(last).items()}
    views: list[View] = [make_fields(about)]
    if held:
        names = list(dict.fromkeys(name for found in held.values() for name in found))
        rows = [
            (number, *(f"{found[name]:.4g}" if name in found else "" for name in names))
            for number, found in held.items()
        ]
        titles = ", ".join(name.removeprefix("eval_").replace("_", " ") for name in names)
        views.append(make_table(f"steps, {titles}", rows, "held out", right=f"steps, {titles}"))
    data = {
        "folder": settings.folder,
        "steps": outcome.trained_steps,
        "held_out": {str(number): found for number, found in held.items()},
        "last": dict(last),
        "seconds": outcome.duration_by_activity_s,
        "wall_s": outcome.wall_s,
        "cpu_s": outcome.cpu_s,
    }
    quiet = tuple(f"{value:.6g}" for found in list(held.values())[-1:] for value in found.values())
    return CommandResult("train.loop/2", data, tuple(views), quiet)


def _steps(settings: "RLConfig", outcome: "RLResult") -> str:
    """Say how many steps are trained, and how many of them before this session."""
    if settings.rollout_only:
        return f"{outcome.trained_steps:,}"
    before = outcome.trained_steps - len(outcome.step_metrics)
    return f"{outcome.trained_steps:,}" + (f", from {before:,} on" if before else "")


def _told(row: dict[str, float]) -> dict[str, float]:
    """Return the figures of a step that people look at first."""
    parts = (name for name in row if re.fullmatch(r"reward_\w+_mean", name))
    wanted = (
        "reward_mean",
        *parts,
        "reward_std",
        "groups_without_signal",
        "clip_fraction",
        "entropy",
    )
    wanted += ("length_mean", "truncated_fraction")
    return {name: row[name] for name in (*wanted, "logprob_gap_max") if name in row}
