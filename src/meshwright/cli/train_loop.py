"""`mw train --recipe grpo`: reinforcement learning, from a task's name, a file or a model."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.loop_described import PRESETS, load_loop, read_settings
from meshwright.cli.overrides import changed
from meshwright.cli.train_loop_page import write_report
from meshwright.cli.train_ranks import run_folder_of
from meshwright.cli.train_recipe import adapter_remarks
from meshwright.cli.train_values import told_values
from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.environment import world_of
from meshwright.run.train.run_folder import holds_run, recipe_in
from meshwright.spec.files import FORMATS, load_data
from meshwright.spec.read import plain
from meshwright.spec.resolve import Source, resolve
from meshwright.spec.units import format_seconds

if TYPE_CHECKING:
    from meshwright.run.posttrain.loop import LoopSettings, Outcome

_REFUSED = ("until", "profile", "fresh")


def names_loop(args: argparse.Namespace) -> bool:
    """Tell whether a command line, or the file it names, asks for reinforcement learning."""
    if args.recipe is not None:
        return bool(args.recipe == "grpo")
    path = _file(args.job)
    try:
        data = load_data(path) if path.suffix in FORMATS and path.is_file() else {}
    except InputError:
        return False  # for whoever reads it as a job to say
    return recipe_in(data) == "grpo"


def loop_ranks(args: argparse.Namespace) -> int:
    """Return how many ranks a loop's layout has; one that cannot be read is refused."""
    _require_known(args)
    return settings_of(argparse.Namespace(**{**vars(args), "job": str(_file(args.job))})).ranks


def _file(job: str) -> Path:
    """Return the file that names a loop: of a run's folder, its configuration."""
    path = Path(job)
    return path / "config.toml" if holds_run(path) else path


def _require_known(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _REFUSED if getattr(args, name)]
    if given:
        what = "is nothing that reinforcement learning knows yet"
        fixes = {"--fresh": "begin anew in another folder: --folder RUN"}
        raise InputError([Problem(name, what, fixes.get(name, "leave it out")) for name in given])


def train_loop(args: argparse.Namespace) -> Answer:
    """Run the loop, and answer with what was learnt; of several ranks the first does."""
    try:
        _require_known(args)
        settings, origins = settings_of(args)
    except InputError as refusal:
        from meshwright.run.train.joining import refuse_together

        refuse_together(refusal, os.environ)
    if args.dry_run:
        told = told_values(settings, origins)
        return Answer("train.job/1", told.data, (told.table,), told.quiet)
    from meshwright.run.posttrain.loop import run

    def say(line: str) -> None:
        if not (args.quiet or args.json):
            print(f"note: {line}", file=sys.stderr)

    outcome = run(settings, say=say, show=not (args.quiet or args.json))
    if world_of(os.environ).rank:
        raise SystemExit(0)  # without a word, in whatever form the first rank answers
    answer = _answer(settings, outcome)
    if not settings.folder:
        return answer
    said = [f"wrote {write_report(Path(settings.folder))}"]
    if settings.model and not settings.rollout_only:
        said = [*_remarks(settings), *said]
    return answer._replace(views=(*answer.views, *map(Note, said)))


def _remarks(settings: "LoopSettings") -> Iterator[str]:
    """Say what a finished run that began with a model can be used for."""
    if settings.adapter is None:
        words = ["mw", "export", settings.folder, "FOLDER"]
        yield f"{shlex.join(words)} writes the model"
        return
    yield from adapter_remarks(Path(settings.folder), settings.model, settings.adapter.rank)


class _Asked(NamedTuple):
    """A loop with who set each of its values."""

    settings: "LoopSettings"
    origins: dict[str, str]

    @property
    def ranks(self) -> int:
        """How many processes train it."""
        return self.settings.layout.gpus


def settings_of(args: argparse.Namespace) -> _Asked:
    """Return what the file, the flags and the words after it say."""
    from meshwright.run.posttrain.adapters.settings import with_listed_targets
    from meshwright.run.posttrain.loop import sorting_digits
    from meshwright.run.posttrain.loop.settings import optimizer_of
    from meshwright.run.posttrain.loop.tasks import require_folder
    from meshwright.run.train.job_file import located

    path, words = Path(args.job), changed(args.files)
    file: dict[str, Any]
    if args.job in PRESETS:
        file = plain(sorting_digits())
    elif (path / "config.json").is_file() or path.suffix == ".gguf":
        require_folder(args.job)
        file = {"model": str(path)}
        if "task" not in words:
            fix = "add task.name=questions task.train=FILE, or task.name=module:function"
            raise InputError([Problem("task.name", "nothing says what is asked of it", fix)])
    elif path.suffix in FORMATS:
        file = load_loop(path)
    else:
        fix = f"use {', '.join(PRESETS)}, a TOML file, or a model's folder"
        raise InputError([Problem(args.job, "is no task, file or model", fix)])
    file.pop("recipe", None)
    words = with_listed_targets(words)
    model = str({**file, **words}.get("model", ""))
    adapted = "adapter" in file or "adapter" in words
    sources = [
        # Each value by itself: who gives a rate keeps the schedule.
        Source("recipe grpo", {"optimizer": plain(optimizer_of(model, adapted=adapted))}),
        Source(args.job, file),
        Source("--folder" if args.folder else "default", {"folder": str(run_folder_of(args))}),
        Source("--rollout-only", {"rollout_only": True} if args.rollout_only else {}),
        Source("--replay", {} if args.replay is None else {"replay": args.replay}),
        Source("command line", words),
    ]
    merged = resolve(sources)
    try:
        return _Asked(read_settings(merged.data), merged.origins)
    except InputError as error:
        raise InputError(
            located(problem, merged.origins, args.job) for problem in error.problems
        ) from None


def _answer(settings: "LoopSettings", outcome: "Outcome") -> Answer:
    held = {number: dict(found) for number, found in sorted(outcome.held_out.items())}
    last = outcome.rows[-1] if outcome.rows else {}
    about: dict[str, object] = {
        "run": settings.folder,
        "steps": _steps(settings, outcome),
        "time": f"{format_seconds(outcome.wall_s)}, {format_seconds(outcome.cpu_s)} of processors",
    }
    about |= {f"last step, {name}": f"{value:.4g}" for name, value in _told(last).items()}
    views: list[View] = [facts(about)]
    if held:
        names = list(dict.fromkeys(name for found in held.values() for name in found))
        rows = [
            (number, *(f"{found[name]:.4g}" if name in found else "" for name in names))
            for number, found in held.items()
        ]
        titles = ", ".join(name.removeprefix("held_out_").replace("_", " ") for name in names)
        views.append(table(f"steps, {titles}", rows, "held out", right=f"steps, {titles}"))
    data = {
        "folder": settings.folder,
        "steps": outcome.steps,
        "held_out": {str(number): found for number, found in held.items()},
        "last": dict(last),
        "seconds": outcome.seconds,
        "wall_s": outcome.wall_s,
        "cpu_s": outcome.cpu_s,
    }
    quiet = tuple(f"{value:.6g}" for found in list(held.values())[-1:] for value in found.values())
    return Answer("train.loop/1", data, tuple(views), quiet)


def _steps(settings: "LoopSettings", outcome: "Outcome") -> str:
    """Say how many steps are trained, and how many of them before this sitting."""
    if settings.rollout_only:
        return f"{outcome.steps:,}"
    before = outcome.steps - len(outcome.rows)
    return f"{outcome.steps:,}" + (f", from {before:,} on" if before else "")


def _told(row: dict[str, float]) -> dict[str, float]:
    """Return the figures of a step that people look at first."""
    parts = (name for name in row if re.fullmatch(r"reward_\w+_mean", name))
    wanted = ("reward_mean", *parts, "reward_std", "silent_groups", "clip_share", "entropy")
    wanted += ("length_mean", "truncated_share")
    return {name: row[name] for name in (*wanted, "logp_gap_max") if name in row}
