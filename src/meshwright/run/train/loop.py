"""The loop: steps, evaluations and checkpoints, until the tokens are trained.

A run that is asked to stop (SIGINT, SIGTERM) finishes its step, saves, and can go on later as if
it had never stopped. Every run writes one folder: config.toml, metrics.jsonl, checkpoints/, and
timeline/ where steps were profiled.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from meshwright.errors import InputError
from meshwright.run.train.job import Job
from meshwright.run.train.outputs import open_outputs
from meshwright.run.train.profile import ChosenSteps, StepProfiler
from meshwright.run.train.sitting import Outcome, Sitting
from meshwright.run.train.stopping import asked_to_stop, quiet_collector
from meshwright.run.train.trainer import Trainer
from meshwright.spec.files import dump
from meshwright.spec.read import plain

COLLECT_EVERY = 200
"""Steps between collections of Python's garbage."""


def train(
    job: Job,
    folder: Path,
    *,
    profile: ChosenSteps | None = None,
    until: int | None = None,
) -> Outcome:
    """Train a job in its folder, from its newest checkpoint where there is one.

    `until` ends this sitting when so many steps of the run are done.
    """
    found = job.check()
    if found:
        raise InputError(found)
    trainer = Trainer(job, folder)
    try:
        resumed_at = trainer.step_number if trainer.resume() else None
        _write_config(job, folder)
        with open_outputs(
            job.output, folder, steps=trainer.steps, resumed_at=resumed_at, config=plain(job)
        ) as outputs:
            sitting = Sitting(trainer, outputs)
            profiler = StepProfiler(profile, folder / "timeline") if profile is not None else None
            with asked_to_stop() as asked, quiet_collector():
                _steps(sitting, profiler, min(trainer.steps, until or trainer.steps), asked)
            if trainer.step_number == trainer.steps:
                sitting.evaluate()
            trainer.save_once()
            return sitting.outcome(resumed_at)
    finally:
        trainer.close()


def _steps(
    sitting: Sitting, profiler: StepProfiler | None, last: int, asked: Callable[[], bool]
) -> None:
    """Run the steps up to `last`, or until asked to stop."""
    trainer = sitting.trainer
    with trainer.batches.iterate(trainer.step_number, until=last, device=trainer.device) as loader:
        for batch in loader:
            number = trainer.step_number + 1
            with profiler.step(number) if profiler is not None else nullcontext():
                sitting.step(batch, loader.wait_s)
            _between(sitting)
            if asked():
                break
    sitting.catch_up()
    if profiler is not None:
        profiler.close()


def _between(sitting: Sitting) -> None:
    """Evaluate and save where it is time to, with the figures of all steps read first."""
    trainer, number = sitting.trainer, sitting.trainer.step_number
    every = trainer.job.evaluation.every_steps
    if every and number % every == 0 and number < trainer.steps:
        sitting.catch_up()
        sitting.evaluate()
    if trainer.checkpoints.due(number):
        sitting.catch_up()
        trainer.save_once()
    if number % COLLECT_EVERY == 0:
        gc.collect()


def _write_config(job: Job, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / ".config.toml.new"
    new.write_text(dump(job), encoding="utf-8")
    new.replace(folder / "config.toml")
