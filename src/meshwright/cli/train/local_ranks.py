"""`mw train --nproc-per-node N`: checks before ranks start, and the report when they end."""

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.cli.flags.job_outline import read_outline
from meshwright.cli.flags.overrides import parse_overrides
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.train.recipe import is_recipe
from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch import local
from meshwright.run.parallel.launch.exit_summary import JobExit
from meshwright.run.parallel.launch.launcher_env import EnvironmentReader
from meshwright.run.train.run_folder.run_folder import (
    find_last_logged_step,
    has_run,
    lock_run_folder,
)
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.file_formats import FORMATS

_VALUES = ("output_dir", "stop_at_step", "profile_steps", "recipe", "replay")
_SWITCHES = ("no_resume", "rollout_only", "json", "quiet")


def run_local_ranks(args: argparse.Namespace, loop: int | None = None) -> int:
    """Train by ranks of this machine, each a process, of which the first answers.

    `loop` is how many ranks the layout of a run of reinforcement learning has, None of others.
    """
    if not args.nproc_per_node.isdecimal() or not int(args.nproc_per_node):
        fix = "give a number from 1 on"
        raise InputError(
            [Problem("--nproc-per-node", f"{args.nproc_per_node!r} is no number of ranks", fix)]
        )
    port = _port(os.environ)
    if loop is not None:
        raise_problems([*_wrong_count(args, loop), *_taken(args)])
    elif not is_recipe(args):  # what is wrong with one is for its ranks to say
        _refuse_early(args)
    ending = local.launch_local(_words(args), int(args.nproc_per_node), port=port)
    if ending.cause:
        what, *more = _closing(args, ending, find_run_folder(args))
        if args.json:
            text = "; ".join((what, *more))
            error = {"exit_code": ending.exit_code, "error": text, "problems": []}
            print_to_stderr(json.dumps({"schema": "meshwright.error/1", **error}))
        else:
            print_to_stderr("\n  ".join((f"error: {what}", *more)))
    return ending.exit_code


def find_run_folder(args: argparse.Namespace) -> Path:
    """Return where a job's run is kept."""
    if args.output_dir:
        return Path(args.output_dir)
    job = Path(args.job)
    if has_run(job):
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
    given = EnvironmentReader(environment)
    port = given.read_number("MASTER_PORT")
    raise_problems(
        given.problems, [] if port is None else check_integer("MASTER_PORT", port, 1, 65535)
    )
    return port


def _words(args: argparse.Namespace) -> list[str]:
    words = [args.job, *args.files]
    for flag in _VALUES:
        value = getattr(args, flag)
        words += [] if value is None else [_flag(flag), value]
    return words + [_flag(flag) for flag in _SWITCHES if getattr(args, flag)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_early(args: argparse.Namespace) -> None:
    """Refuse here what every rank would refuse, after seconds in which it loads torch."""
    job = Path(args.job)
    path = job / "config.toml" if has_run(job) else job
    outline = read_outline(path, args.files)
    problems: list[Problem] = []
    if outline.problems or outline.find_layout_problems() or outline.find_missing_paths():
        # One of them may not be the only one, and the trainer knows all.
        problems += _problems_of(path, args.files)
    if outline.layout is not None:
        problems += _wrong_count(args, outline.layout.gpus)
    raise_problems([*problems, *_taken(args)])


def _wrong_count(args: argparse.Namespace, wanted: int) -> list[Problem]:
    if wanted == int(args.nproc_per_node):
        return []
    what = f"{args.nproc_per_node} is not the number of ranks of the layout, which is {wanted}"
    degrees = f"tp × cp × pp × dp = {wanted}"
    return [
        Problem("--nproc-per-node", what, f"use --nproc-per-node {wanted}, or change {degrees}")
    ]


def _taken(args: argparse.Namespace) -> Sequence[Problem]:
    """Return what is wrong where another process has the run's folder."""
    try:
        with lock_run_folder(find_run_folder(args)):
            return ()
    except InputError as refusal:
        return refusal.problems


def _problems_of(path: Path, words: Sequence[str]) -> Sequence[Problem]:
    from meshwright.run.train.data.corpus_loader import find_source_problems
    from meshwright.run.train.job.job_file import read_job_with_origins

    try:
        return find_source_problems(read_job_with_origins(path, parse_overrides(words)).job.data)
    except InputError as refusal:
        return refusal.problems


def _closing(args: argparse.Namespace, ending: JobExit, folder: Path) -> list[str]:
    """Say whose fault it was, how far the run came, and what goes on from there."""
    step = find_last_logged_step(folder)
    reached = f"step {step:,} was the last to end" if step else "no step had ended"
    lines = [f"{ending.cause}; {reached}"]
    if ending.peer_report:
        lines.append(f"seen: {ending.peer_report}")
    if ending.reporter_rank is not None:
        lines.append(
            f"more: {folder}/watchdog-rank-{ending.reporter_rank:05d}.txt has what every rank did "
            f"then"
        )
    again = argparse.Namespace(**{**vars(args), "no_resume": False})
    line = shlex.join(["mw", "train", *_words(again), "--nproc-per-node", args.nproc_per_node])
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
