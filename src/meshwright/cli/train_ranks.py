"""`mw train --nproc N`: what is refused before any rank starts, and what is said at their end."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.cli.job_outline import outline_of
from meshwright.cli.overrides import changed
from meshwright.cli.train_recipe import names_recipe
from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch import local
from meshwright.run.parallel.launch.ending import Ending
from meshwright.run.parallel.launch.places import Variables
from meshwright.run.train.run_folder import claimed, holds_run, last_row
from meshwright.spec.bounds import require, whole
from meshwright.spec.files import FORMATS

_VALUES = ("folder", "until", "profile", "recipe", "replay")
_SWITCHES = ("fresh", "rollout_only", "json", "quiet")


def ranks_ended(args: argparse.Namespace, loop: int | None = None) -> int:
    """Train by ranks of this machine, each a process, of which the first answers.

    `loop` is how many ranks the layout of a run of reinforcement learning has, None of others.
    """
    if not args.nproc.isdecimal() or not int(args.nproc):
        fix = "give a number from 1 on"
        raise InputError([Problem("--nproc", f"{args.nproc!r} is no number of ranks", fix)])
    port = _port(os.environ)
    if loop is not None:
        require([*_wrong_count(args, loop), *_taken(args)])
    elif not names_recipe(args):  # what is wrong with one is for its ranks to say
        _refuse_early(args)
    ending = local.run(_words(args), int(args.nproc), port=port)
    if ending.what:
        what, *more = _closing(args, ending, run_folder_of(args))
        if args.json:
            text = "; ".join((what, *more))
            error = {"exit_code": ending.code, "error": text, "problems": []}
            print(json.dumps({"schema": "meshwright.error/1", **error}), file=sys.stderr)
        else:
            print("\n  ".join((f"error: {what}", *more)), file=sys.stderr)
    return ending.code


def run_folder_of(args: argparse.Namespace) -> Path:
    """Return where a job's run is kept."""
    if args.folder:
        return Path(args.folder)
    job = Path(args.job)
    if holds_run(job):
        return job
    # The configuration that a run keeps goes on with that run.
    is_kept = job.name == "config.toml" and (job.parent / "checkpoints").is_dir()
    if is_kept:
        return job.parent
    # A model that is begun with may be trained by several recipes.
    named = args.recipe is not None and job.suffix not in FORMATS
    return Path("runs") / (f"{job.stem}-{args.recipe}" if named else job.stem)


def _port(environment: Mapping[str, str]) -> int | None:
    """Return the port that a user sets for ranks to meet at; None lets a free one be found."""
    given = Variables(environment)
    port = given.number("MASTER_PORT")
    require(given.problems, [] if port is None else whole("MASTER_PORT", port, 1, 65535))
    return port


def _words(args: argparse.Namespace) -> list[str]:
    words = [args.job, *args.files]
    for flag in _VALUES:
        value = getattr(args, flag)
        words += [] if value is None else [f"--{flag}", value]
    given = [flag.replace("_", "-") for flag in _SWITCHES if getattr(args, flag)]
    return words + [f"--{flag}" for flag in given]


def _refuse_early(args: argparse.Namespace) -> None:
    """Refuse here what every rank would refuse, after seconds in which it loads torch."""
    job = Path(args.job)
    path = job / "config.toml" if holds_run(job) else job
    outline = outline_of(path, args.files)
    problems: list[Problem] = []
    if outline.problems or outline.misfits() or outline.missing():
        # One of them may not be the only one, and the trainer knows all.
        problems += _problems_of(path, args.files)
    if outline.layout is not None:
        problems += _wrong_count(args, outline.layout.gpus)
    require([*problems, *_taken(args)])


def _wrong_count(args: argparse.Namespace, wanted: int) -> list[Problem]:
    if wanted == int(args.nproc):
        return []
    what = f"{args.nproc} is not the number of ranks of the layout, which is {wanted}"
    degrees = f"tp × cp × pp × dp = {wanted}"
    return [Problem("--nproc", what, f"use --nproc {wanted}, or change {degrees}")]


def _taken(args: argparse.Namespace) -> Sequence[Problem]:
    """Return what is wrong where another process has the run's folder."""
    try:
        with claimed(run_folder_of(args)):
            return ()
    except InputError as refusal:
        return refusal.problems


def _problems_of(path: Path, words: Sequence[str]) -> Sequence[Problem]:
    from meshwright.run.train.data.sources import source_problems
    from meshwright.run.train.job_file import ask_job

    try:
        return source_problems(ask_job(path, changed(words)).job.data)
    except InputError as refusal:
        return refusal.problems


def _closing(args: argparse.Namespace, ending: Ending, folder: Path) -> list[str]:
    """Say whose fault it was, how far the run came, and what goes on from there."""
    step = last_row(folder)
    reached = f"step {step:,} was the last to end" if step else "no step had ended"
    lines = [f"{ending.what}; {reached}"]
    if ending.seen:
        lines.append(f"seen: {ending.seen}")
    if ending.teller is not None:
        lines.append(f"more: {folder}/alarm-{ending.teller:05d}.txt has what every rank did then")
    again = argparse.Namespace(**{**vars(args), "fresh": False})
    line = shlex.join(["mw", "train", *_words(again), "--nproc", args.nproc])
    saved = _saved(folder)
    lines.append(
        f"hint: step {saved:,} is saved, and this goes on from it: {line}"
        if saved
        else f"hint: nothing is saved yet; this begins again: {line}"
    )
    return lines


def _saved(folder: Path) -> int:
    """Return the step of the newest checkpoint by its name, such as `000002-step-40`."""
    names = [path.name.rpartition("-step-")[2] for path in folder.glob("checkpoints/0*-step-*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)
