"""The loop: steps, evaluations and checkpoints, until the tokens are trained.

A run that is asked to stop (SIGINT, SIGTERM) finishes its step, saves, and can go on later as if
it had never stopped. `run_folder` tells what a run writes.
"""

import gc
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.environment import world_of
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.job import Job
from meshwright.run.train.joining import joined
from meshwright.run.train.outcome import Outcome, outcome_of
from meshwright.run.train.outputs import open_outputs
from meshwright.run.train.outputs.settings import NO_OUTPUT
from meshwright.run.train.profile import ChosenSteps, StepProfiler
from meshwright.run.train.recording import make_room, profile_folder, recorded
from meshwright.run.train.run_folder import (
    claimed,
    holds_run,
    last_layout,
    note_sitting,
    set_rows_aside,
    set_run_aside,
    write_config,
)
from meshwright.run.train.run_state import layout_change
from meshwright.run.train.sitting import Sitting
from meshwright.run.train.stopping import Asked, asked_to_stop, quiet_collector
from meshwright.run.train.task import Task, TextTask
from meshwright.run.train.trainer import Trainer
from meshwright.spec.read import plain

COLLECT_EVERY = 200
"""Steps between collections of Python's garbage."""


def train(
    job: Job,
    folder: Path,
    *,
    profile: ChosenSteps | None = None,
    until: int | None = None,
    fresh: bool = False,
    environment: Mapping[str, str] = os.environ,
    task: Task | None = None,
) -> Outcome:
    """Train a job in its folder, from its newest checkpoint where there is one.

    `until` ends this sitting when so many steps of the run are done. `fresh` begins anew: an
    earlier run is moved aside, once nothing is left that could keep this one from running. `task`
    says what is trained on what; None trains all weights on text.
    """
    task = TextTask() if task is None else task
    problems = [*job.check(), *_problems(job, profile, until), *task.problems(job)]
    speaks = world_of(environment).rank == 0
    with ExitStack() as held:
        if speaks:  # before ranks meet: those that have met wait for whoever ends
            try:
                held.enter_context(claimed(folder))
            except InputError as refusal:
                problems += refusal.problems
        mesh = held.enter_context(joined(job, folder, environment, problems, fresh=fresh))
        if fresh and speaks and holds_run(folder):
            aside = set_run_aside(folder)
            held.enter_context(claimed(folder))
            warnings.warn(f"moved the earlier run to {aside}", stacklevel=2)
        if fresh and mesh is not None:
            _wait_for_all(mesh)
        trainer = Trainer(job, folder, mesh, task=task)
        try:
            return _sit(trainer, profile, until)
        finally:
            trainer.close()


def _wait_for_all(mesh: Mesh) -> None:
    """Let no rank look into the folder while the first moves it."""
    mesh.world.broadcast(torch.zeros(1, device=mesh.device))


def _problems(job: Job, profile: ChosenSteps | None, until: int | None) -> list[Problem]:
    found = []
    if until is not None and until < 1:
        found.append(Problem("until", f"there is no step {until}", "use 1 or more"))
    if profile is not None and profile.first > job.workload.steps:
        what = f"the run has {job.workload.steps:,} steps, and none from {profile.first:,} on"
        found.append(Problem("profile", what, "choose earlier ones"))
    return found


def _sit(trainer: Trainer, profile: ChosenSteps | None, until: int | None) -> Outcome:
    """Go on with a run until it ends, or this sitting does."""
    job, folder = trainer.job, trainer.folder
    resumed_at = trainer.step_number if trainer.resume() else None
    aside = set_rows_aside(folder) if resumed_at is None and trainer.first else None
    if aside is not None:
        what = "an earlier try here ended before its first checkpoint; this one begins anew"
        warnings.warn(f"{what}, and the figures of that one are in {aside}", stacklevel=3)
    if trainer.first:
        if resumed_at is not None:
            _say_layout(job, folder)
        write_config(job, folder)
        note_sitting(folder, resumed_at or 0, trainer.device)
    outputs = open_outputs(
        job.output if trainer.first else NO_OUTPUT,
        folder,
        steps=trainer.steps,
        # From 0 on also after a try without a checkpoint: curves are to forget its steps.
        resumed_at=0 if aside is not None else resumed_at,
        config=plain(job),
    )
    with outputs, recorded(job, folder, trainer.mesh):
        sitting = Sitting(trainer, outputs)
        profiler = None if profile is None else _profiler(trainer, profile)
        if trainer.device.type == "cuda":
            trainer.checkpoints.prepare(trainer.tensors())
        with asked_to_stop() as asked, quiet_collector():
            _steps(sitting, profiler, min(trainer.steps, until or trainer.steps), asked)
            _end(sitting)
        if profiler is not None and trainer.first and not profiler.written:
            warnings.warn(f"this sitting had none of the steps {profiler.chosen}", stacklevel=3)
        return outcome_of(sitting, resumed_at, asked())


def _say_layout(job: Job, folder: Path) -> None:
    """Say where a run goes on under another layout than it had."""
    before = last_layout(folder)
    change = "" if before is None else layout_change(before, job.layout)
    if change:
        warnings.warn(f"the run goes on under another layout: {change}", stacklevel=4)


def _profiler(trainer: Trainer, chosen: ChosenSteps) -> StepProfiler:
    """Return what records the chosen steps of this rank."""
    mesh = trainer.mesh
    folder = profile_folder(trainer.folder, trainer.job.layout.gpus)
    if mesh is None:
        make_room(folder, {})
        return StepProfiler(chosen, folder)
    return StepProfiler(chosen, folder, rank=mesh.rank, recorder=mesh.recorder)


def _steps(sitting: Sitting, profiler: StepProfiler | None, last: int, asked: Asked) -> None:
    """Run the steps up to `last`, or until asked to stop."""
    trainer = sitting.trainer
    try:
        with trainer.batches.iterate(
            trainer.step_number, until=last, device=trainer.device
        ) as loader:
            sitting.mark()
            for batch in loader:
                number = trainer.step_number + 1
                with profiler.step(number) if profiler is not None else nullcontext():
                    sitting.step(batch, loader.wait_s)
                _between(sitting)
                if sitting.shall_stop(asked() is not None):
                    break
        sitting.catch_up()
    finally:
        if profiler is not None:
            profiler.close()


def _between(sitting: Sitting) -> None:
    """Evaluate and save where it is time to, with the figures of all steps read first."""
    trainer, number = sitting.trainer, sitting.trainer.step_number
    every = trainer.job.evaluation.every_steps
    if trainer.finished:  # the end has its own evaluation and checkpoint
        return
    if every and number % every == 0:
        sitting.catch_up()
        _evaluate(sitting)
        sitting.mark()
    if trainer.checkpoints.due(number):
        sitting.catch_up()
        # While steps are left out, the weights may be what is wrong: good checkpoints shall stay.
        if not trainer.guard.state.skipped_in_row:
            _save(sitting)
    if number % COLLECT_EVERY == 0:
        gc.collect()


def _evaluate(sitting: Sitting) -> None:
    figures = sitting.evaluate()
    if figures:
        sitting.outputs.write(sitting.trainer.step_number, figures)


def _save(sitting: Sitting) -> None:
    began_s = time.perf_counter()
    staged = sitting.trainer.save()
    held_up_s = time.perf_counter() - began_s
    sitting.outputs.write(staged.step, {"save_s": held_up_s})
    sitting.mark()


def _end(sitting: Sitting) -> None:
    """Evaluate a run that is at its end, and save what is not saved yet."""
    trainer = sitting.trainer
    if trainer.finished and trainer.saved:
        sitting.evaluate()  # it was finished before: the figure is written down already
        return
    if trainer.finished:
        _evaluate(sitting)
    if not trainer.saved:
        _save(sitting)
    if trainer.finished:
        trainer.learner.ended(trainer.folder, speaks=trainer.first)
