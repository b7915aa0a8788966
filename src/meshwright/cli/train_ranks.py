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

_VALUES = ("folder", "until", "profile", "recipe")
_SWITCHES = ("fresh", "json", "quiet")


def ranks_ended(args: argparse.Namespace) -> int:
    """Train by ranks of this machine, each a process, of which the first answers."""
    if not args.nproc.isdecimal() or not int(args.nproc):
        fix = "give a number from 1 on"
        raise InputError([Problem("--nproc", f"{args.nproc!r} is no number of ranks", fix)])
    port = _port(os.environ)
    if not names_recipe(args):  # what is wrong with one is for its ranks to say
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
    return words + [f"--{flag}" for flag in _SWITCHES if getattr(args, flag)]


def _refuse_early(args: argparse.Namespace) -> None:
    """Refuse here what every rank would refuse, after seconds in which it loads torch."""
    job = Path(args.job)
    path = job / "config.toml" if holds_run(job) else job
    outline = outline_of(path, args.files)
    problems: list[Problem] = []
    if outline.problems or outline.misfits() or outline.missing():
        # One of them may not be the only one, and the trainer knows all.
        problems += _problems_of(path, args.files)
    if outline.layout is not None and outline.layout.gpus != int(args.nproc):
        wanted = outline.layout.gpus
        what = f"{args.nproc} is not the number of ranks of the layout, which is {wanted}"
        degrees = f"tp × cp × pp × dp = {wanted}"
        problems.append(Problem("--nproc", what, f"use --nproc {wanted}, or change {degrees}"))
    try:
        with claimed(run_folder_of(args)):
            pass
    except InputError as refusal:
        problems += refusal.problems
    require(problems)


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
