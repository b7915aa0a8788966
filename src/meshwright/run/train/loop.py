"""The loop: steps, evaluations and checkpoints, until the tokens are trained.

A run that is asked to stop (SIGINT, SIGTERM) finishes its step, saves, and can go on later as if
it had never stopped. `run_folder` tells what a run writes.
"""

import gc
import os
import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.world import read_world
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.distributed_init import init_mesh
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.logging import open_loggers
from meshwright.run.train.logging.logging_config import NO_LOGGING
from meshwright.run.train.profiling.step_profiler import ProfiledSteps, StepProfiler
from meshwright.run.train.run_folder.run_folder import (
    append_session,
    archive_metrics,
    archive_run,
    has_run,
    lock_run_folder,
    read_last_layout,
    write_config,
)
from meshwright.run.train.run_folder.run_state import describe_layout_change
from meshwright.run.train.run_folder.run_timeline import (
    archive_other_layouts,
    get_profile_folder,
    record_timeline,
)
from meshwright.run.train.signals import StopRequest, catch_stop_signals, disable_gc
from meshwright.run.train.train_result import TrainResult, make_train_result
from meshwright.run.train.train_session import TrainSession
from meshwright.run.train.train_task import TextTask, TrainTask
from meshwright.run.train.trainer import Trainer
from meshwright.spec.serialization import encode

GC_INTERVAL_STEPS = 200
"""Steps between collections of Python's garbage."""


def train(
    job: TrainJob,
    folder: Path,
    *,
    profile_steps: ProfiledSteps | None = None,
    stop_at_step: int | None = None,
    restart: bool = False,
    environment: Mapping[str, str] = os.environ,
    task: TrainTask | None = None,
) -> TrainResult:
    """Train a job in its folder, from its newest checkpoint where there is one.

    `stop_at_step` ends this session when so many steps of the run are done. `restart` starts from
    step 0: an earlier run is moved aside, once nothing is left that could keep this one from
    running. `task` says what is trained on what; None trains all weights on text.
    """
    task = TextTask() if task is None else task
    problems = [*job.check(), *_problems(job, profile_steps, stop_at_step), *task.problems(job)]
    speaks = read_world(environment).rank == 0
    with ExitStack() as held:
        if speaks:  # before ranks meet: those that have met wait for whoever ends
            try:
                held.enter_context(lock_run_folder(folder))
            except InputError as refusal:
                problems += refusal.problems
        mesh = held.enter_context(init_mesh(job, folder, environment, problems, restart=restart))
        if restart and speaks and has_run(folder):
            aside = archive_run(folder)
            held.enter_context(lock_run_folder(folder))
            warnings.warn(f"moved the earlier run to {aside}", stacklevel=2)
        if restart and mesh is not None:
            _wait_for_all(mesh)
        trainer = Trainer(job, folder, mesh, task=task)
        try:
            return _run_session(trainer, profile_steps, stop_at_step)
        finally:
            trainer.close()


def _wait_for_all(mesh: Mesh) -> None:
    """Let no rank look into the folder while the first moves it."""
    mesh.world.broadcast(torch.zeros(1, device=mesh.device))


def _problems(
    job: TrainJob, profile_steps: ProfiledSteps | None, stop_at_step: int | None
) -> list[Problem]:
    found = []
    if stop_at_step is not None and stop_at_step < 1:
        found.append(Problem("stop_at_step", f"there is no step {stop_at_step}", "use 1 or more"))
    if profile_steps is not None and profile_steps.first_step > job.workload.num_steps:
        num_steps, first = job.workload.num_steps, profile_steps.first_step
        what = f"the run has {num_steps:,} steps, and none from {first:,} on"
        found.append(Problem("profile_steps", what, "choose earlier ones"))
    return found


def _run_session(
    trainer: Trainer, profile_steps: ProfiledSteps | None, stop_at_step: int | None
) -> TrainResult:
    """Go on with a run until it ends, or this session does."""
    job, folder = trainer.job, trainer.folder
    resumed_at = trainer.step_number if trainer.resume() else None
    aside = archive_metrics(folder) if resumed_at is None and trainer.is_rank_zero else None
    if aside is not None:
        what = "an earlier try here ended before its first checkpoint; this one started from step 0"
        warnings.warn(f"{what}, and the figures of that one are in {aside}", stacklevel=3)
    if trainer.is_rank_zero:
        if resumed_at is not None:
            _say_layout(job, folder)
        write_config(job, folder)
        append_session(folder, resumed_at or 0, trainer.device)
    outputs = open_loggers(
        job.logging if trainer.is_rank_zero else NO_LOGGING,
        folder,
        steps=trainer.total_steps,
        # From 0 on also after a try without a checkpoint: curves are to forget its steps.
        resumed_at=0 if aside is not None else resumed_at,
        config=encode(job),
    )
    with outputs, record_timeline(job, folder, trainer.mesh):
        session = TrainSession(trainer, outputs)
        profiler = None if profile_steps is None else _profiler(trainer, profile_steps)
        if trainer.device.type == "cuda":
            trainer.checkpoints.allocate_staging(trainer.tensors())
        with catch_stop_signals() as asked, disable_gc():
            _run_steps(
                session,
                profiler,
                min(trainer.total_steps, stop_at_step or trainer.total_steps),
                asked,
            )
            _finish(session)
        if profiler is not None and trainer.is_rank_zero and not profiler.written:
            warnings.warn(
                f"this session had none of the steps {profiler.profiled_steps}", stacklevel=3
            )
        # Several ranks end together, also where only another one was asked.
        by_others = signal.SIGTERM.name if session.is_stop_agreed else None
        return make_train_result(session, resumed_at, asked() or by_others)


def _say_layout(job: TrainJob, folder: Path) -> None:
    """Say where a run resumes with a different layout."""
    before = read_last_layout(folder)
    change = "" if before is None else describe_layout_change(before, job.layout)
    if change:
        warnings.warn(f"resuming with a different layout: {change}", stacklevel=4)


def _profiler(trainer: Trainer, chosen: ProfiledSteps) -> StepProfiler:
    """Return what records the chosen steps of this rank."""
    mesh = trainer.mesh
    folder = get_profile_folder(trainer.folder, trainer.job.layout.gpus)
    if mesh is None:
        archive_other_layouts(folder, {})
        return StepProfiler(chosen, folder)
    return StepProfiler(chosen, folder, rank=mesh.rank, recorder=mesh.recorder)


def _run_steps(
    session: TrainSession, profiler: StepProfiler | None, last: int, asked: StopRequest
) -> None:
    """Run the steps up to `last`, or until asked to stop."""
    trainer = session.trainer
    try:
        with trainer.train_dataset.iterate(
            trainer.step_number, until=last, device=trainer.device
        ) as loader:
            session.reset_timer()
            for batch in loader:
                number = trainer.step_number + 1
                with profiler.step(number) if profiler is not None else nullcontext():
                    session.step(batch, loader.wait_s)
                _after_step(session)
                if session.should_stop(asked() is not None):
                    break
        session.flush_metrics()
    finally:
        if profiler is not None:
            profiler.close()


def _after_step(session: TrainSession) -> None:
    """Evaluate and save where it is time to, with the figures of all steps read first."""
    trainer, number = session.trainer, session.trainer.step_number
    every = trainer.job.eval.every_steps
    if trainer.is_finished:  # the end has its own evaluation and checkpoint
        return
    if every and number % every == 0:
        session.flush_metrics()
        _evaluate(session)
        session.reset_timer()
    if trainer.checkpoints.should_save(number):
        session.flush_metrics()
        # While steps are left out, the weights may be what is wrong: good checkpoints shall stay.
        if not trainer.loss_guard.state.skipped_in_row:
            _save(session)
    if number % GC_INTERVAL_STEPS == 0:
        gc.collect()


def _evaluate(session: TrainSession) -> None:
    figures = session.evaluate()
    if figures:
        session.loggers.write(session.trainer.step_number, figures)


def _save(session: TrainSession) -> None:
    began_s = time.perf_counter()
    staged = session.trainer.save()
    held_up_s = time.perf_counter() - began_s
    session.loggers.write(staged.step, {"checkpoint_s": held_up_s})
    session.reset_timer()


def _finish(session: TrainSession) -> None:
    """Evaluate a run that is at its end, and save what is not saved yet."""
    trainer = session.trainer
    if trainer.is_finished and trainer.is_saved:
        session.evaluate()  # it was finished before: the figure is written down already
        return
    if trainer.is_finished:
        _evaluate(session)
    if not trainer.is_saved:
        _save(session)
    if trainer.is_finished:
        trainer.objective.save_final(trainer.folder, speaks=trainer.is_rank_zero)
