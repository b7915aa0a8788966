"""`run_rl`: a whole run of reinforcement learning, from its settings to its outcome."""

import gc
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout.controller import RolloutProgress
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.lora import DecoderAdapter
from meshwright.run.posttrain.prompt_task.reward_scorer import CombinedRewardProvider, RewardScorer
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.config.unused_fields import find_unused_fields
from meshwright.run.posttrain.rl.distributed.lead_rank import open_lead_rank_trainer
from meshwright.run.posttrain.rl.distributed.worker_rank import run_worker_rank
from meshwright.run.posttrain.rl.driver import RLDriver, RLTrainerLike
from meshwright.run.posttrain.rl.generation.held_out_evaluation import HeldOutEvaluation
from meshwright.run.posttrain.rl.generation.rollout_backend import (
    RolloutBackend,
    VerifierFailureMonitor,
)
from meshwright.run.posttrain.rl.generation.rollout_engine import (
    InlineRolloutEngine,
    ReplayRolloutEngine,
    RolloutEngine,
)
from meshwright.run.posttrain.rl.generation.threaded_rollout_engine import ThreadedRolloutEngine
from meshwright.run.posttrain.rl.rendezvous import (
    is_distributed,
    read_process_world,
    rendezvous,
    report_failure_to_all,
)
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rl.task_loader import TaskEnvironments, load_task
from meshwright.run.posttrain.rl.trainer.rl_trainer import RLTrainer, load_policy_model
from meshwright.run.posttrain.rollout.replay import ReplaySource
from meshwright.run.posttrain.rollout.rollout_log import RolloutOrigin, describe_origin
from meshwright.run.posttrain.rollout.verifiers.verifier_pool import VerifierPool, describe_failures
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.spec.model import Model

_DRAWN = ("seed", "group_size", "max_tokens", "max_turns", "stop_token_ids")
"""What of a drawing follows from settings and the task."""


class RLResult(NamedTuple):
    """How a run ended."""

    trained_steps: int
    """Trained in all sessions."""
    step_metrics: tuple[dict[str, float], ...]
    """Figures of each step of this session."""
    held_out_metrics: dict[int, dict[str, float]]
    """What was found on held-out prompts, by steps trained."""
    notes: tuple[str, ...]
    duration_by_activity_s: dict[str, float]
    """What trainer and engines spent their time on, and waited for."""
    wall_s: float
    cpu_s: float
    """Of this process, and of the verifiers' that ended with it."""
    decoder: Decoder
    """With the weights it came to; over several ranks this one's part of them."""
    adapter: DecoderAdapter | None = None
    """What was trained beside the decoder's weights, where these are frozen."""


def run_rl(
    settings: RLConfig, *, say: Callable[[str], object] = lambda _: None, show: bool = False
) -> RLResult:
    """Run to the end, or go on with what the folder holds; `say` hears what is worth a line.

    With `show` steps are told on stderr, now and then. Where the layout has several ranks, each
    process calls this: the first leads, and others return with nothing to tell when it ends.
    """
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    leads = read_process_world().rank == 0
    with limit_torch_threads(settings.threads), ExitStack() as stack:
        with report_failure_to_all(settings):
            tasks = load_task(settings)
            # Both are read before anything is written or trained: either may not be there, or not
            # do.
            replayed = _replayed(settings, tasks) if settings.replay and leads else None
            model = load_policy_model(settings, tasks)
            keeping = RLRunState(settings, say, asks=tasks.train.name) if leads else None
        if keeping is None:
            mesh = stack.enter_context(rendezvous(settings))
            decoder = run_worker_rank(settings, tasks, model, mesh)
            wall_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
            return RLResult(settings.steps, (), {}, (), {}, wall_s, cpu_s, decoder)
        stack.callback(keeping.close)
        trainer = stack.enter_context(_training(settings, tasks, model, keeping))
        progress = trainer.resume_or_initialize()
        for line in () if progress.trained_steps else (*find_unused_fields(settings), *tasks.notes):
            keeping.write_note(line)
        if show:
            keeping.set_report_start(progress.trained_steps)
        if replayed is not None:
            _say_model(settings, replayed, trainer)
            watching = VerifierFailureMonitor(settings.max_pending_rewards, keeping.write_note)
            nothing = HeldOutEvaluation(
                settings.evaluate, None, keeping, None, max_pending_rewards=0
            )
            engines = ReplayRolloutEngine(replayed)
            RLDriver(
                trainer, engines, progress, watching=watching, evaluation=nothing, pool=None
            ).run()
            held_out = nothing.metrics
        else:
            held_out = _with_engine(trainer, tasks, progress, stack)
        if not settings.rollout_only:
            trainer.save_final()
        keeping.timeline.set_idle_reasons(())
    return RLResult(
        trained_steps=progress.trained_steps if settings.rollout_only else settings.steps,
        step_metrics=tuple(keeping.step_metrics),
        held_out_metrics=held_out,
        notes=tuple(keeping.notes),
        duration_by_activity_s={
            f"{who}: {name}": s for (who, name), s in keeping.timeline.durations_s.items()
        },
        wall_s=time.perf_counter() - began_s,
        cpu_s=_cpu_s() - began_cpu_s,
        decoder=trainer.decoder,
        adapter=trainer.adapter,
    )


@contextmanager
def _training(
    settings: RLConfig, tasks: TaskEnvironments, model: Model, keeping: RLRunState
) -> Iterator[RLTrainerLike]:
    """Have the trainer: of one device, or of all ranks that were started."""
    if not is_distributed(settings):
        yield RLTrainer(settings, tasks, keeping)
        return
    with (
        rendezvous(settings) as mesh,
        open_lead_rank_trainer(settings, tasks, model, keeping, mesh) as trainer,
    ):
        yield trainer


def _cpu_s() -> float:
    """Return the processor seconds of this process, and of its children that ended."""
    mine, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


def _with_engine(
    trainer: RLTrainerLike, tasks: TaskEnvironments, progress: RolloutProgress, stack: ExitStack
) -> dict[int, dict[str, float]]:
    settings, keeping = trainer.config, trainer.run_state
    verifiers = list(dict.fromkeys((*tasks.train.verifiers, *tasks.held_out.verifiers)))
    pool = stack.enter_context(
        VerifierPool(
            verifiers, workers=settings.verifier_workers, limits=tasks.get_verifier_limits(settings)
        )
    )
    keeping.write_note(f"verifiers are isolated by {pool.sandbox_status}")
    scorers = [RewardScorer(each, trainer.device) for each in settings.task.reward_models]
    for each in scorers:
        keeping.write_note(f"{each.verifier} has the checksum {each.fingerprint}")
    judges = CombinedRewardProvider(pool, scorers)
    room = trainer.offload if settings.rollout_policy.colocated else lambda: None
    sampling = RolloutBackend(
        trainer.decoder, settings, tasks, judges, keeping.write_note,
        adapter=trainer.adapter, sender=trainer.weight_source, room=room,
    )  # fmt: skip
    stack.callback(sampling.close)
    if settings.rollout_policy.colocated:
        sampling.sleep()  # it began with all its memory, of which the first weights need some
    sampling.prepare_weights(progress.trained_steps)
    # As settings are kept: a run goes on from any folder, and from its own file.
    model = make_absolute_path(settings.model) or trainer.decoder.model.name
    progress = keeping.open_log(describe_origin(sampling.generator, model), progress)
    watching = VerifierFailureMonitor(settings.max_pending_rewards, keeping.write_note)
    words = getattr(tasks.train, "words", None)
    # As large a share of held-out answers may fail as of a step's.
    share = max(
        1.0, settings.evaluate.num_prompts / (settings.prompts_per_step * settings.group_size)
    )
    most = math.ceil(settings.max_pending_rewards * share)
    evaluation = HeldOutEvaluation(
        settings.evaluate, sampling, keeping, words,
        max_pending_rewards=most, shares=settings.task.is_fractional_reward,
    )  # fmt: skip
    if progress.trained_steps == 0:
        evaluation.run_full(0)
    with _frozen():
        engines: RolloutEngine
        if settings.overlaps:
            engines = ThreadedRolloutEngine(sampling, keeping.timeline, settings.stall_timeout_s)
        else:
            engines = InlineRolloutEngine(sampling, keeping.timeline)
        RLDriver(
            trainer, engines, progress, watching=watching, evaluation=evaluation, pool=pool
        ).run()
    if not settings.rollout_only:
        sampling.prepare_weights(settings.steps)
        evaluation.run_full(settings.steps)
    for line in describe_failures(pool.outcome_counts):
        keeping.write_note(line, settings.steps)
    return evaluation.metrics


def _replayed(settings: RLConfig, tasks: TaskEnvironments) -> ReplaySource:
    from meshwright.run.posttrain.rollout.parquet_log import read_rollouts  # needs Arrow

    recorded = read_rollouts(settings.replay)
    others = tuple(_other_draws(recorded.origin, tasks, settings))
    if others:
        what = f"holds rollouts of another run: {', '.join(others)}"
        fix = "use the settings of the run that recorded it"
        raise InputError([Problem(settings.replay, what, fix)])
    replay, steps = ReplaySource(recorded), settings.steps
    known = len(replay.prompts_by_step)
    found = [
        (step, prompt) for step, prompts in replay.prompts_by_step.items() for prompt in prompts
    ]
    # Behind them are those that took the place of groups without a signal.
    wanted = [
        (place // settings.prompts_per_step, place)
        for place in range(steps * settings.prompts_per_step)
    ]
    if found[: len(wanted)] != wanted:
        what = (
            f"holds {known} steps, of other prompts than {settings.prompts_per_step} for each "
            f"of {steps}"
        )
        fix = "use the settings of the run that recorded it"
        if found == wanted[: len(found)]:
            what, fix = f"holds {known} steps, and {steps} are asked for", f"use steps={known}"
        raise InputError([Problem(settings.replay, what, fix)])
    return replay


def _other_draws(
    origin: RolloutOrigin, tasks: TaskEnvironments, settings: RLConfig
) -> Iterator[str]:
    """Say what was asked otherwise when rollouts were recorded than this run would."""
    if origin.environment != tasks.train.name:
        yield f"the task is {origin.environment!r} there and {tasks.train.name!r} here"
    there, here = origin.rollout_config, tasks.build_rollout_config(settings)
    for name in _DRAWN:
        then, now = getattr(there, name), getattr(here, name)
        if then != now:
            yield f"{name} is {then} there and {now} here"


def _say_model(settings: RLConfig, replay: ReplaySource, trainer: RLTrainerLike) -> None:
    """Say where another model drew what is trained on: folders move, so it may be the same."""
    here = settings.model or trainer.decoder.model.name
    if replay.model and Path(replay.model).absolute() != Path(here).absolute():
        what = f"these rollouts were drawn by {replay.model}, and ratios are to what that said"
        trainer.run_state.write_note(what)


@contextmanager
def limit_torch_threads(count: int | None) -> Iterator[None]:
    """Let torch have so many threads inside; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep what is there from being looked through by every collection of the loop."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
