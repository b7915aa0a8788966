"""`run`: a whole run of reinforcement learning, from its settings to its outcome."""

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
from meshwright.policy.rollout.controller import Progress
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.adapters import DecoderAdapter
from meshwright.run.posttrain.loop.driving import AnyTrainer, Driver
from meshwright.run.posttrain.loop.engine_thread import EngineThread
from meshwright.run.posttrain.loop.engines import EngineHere, Engines, Replayed
from meshwright.run.posttrain.loop.evaluation import Evaluation
from meshwright.run.posttrain.loop.idle_settings import idle_settings
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.ranks.following import follow
from meshwright.run.posttrain.loop.ranks.leading import leading
from meshwright.run.posttrain.loop.ranks.meeting import is_shared, met, place, told_to_all
from meshwright.run.posttrain.loop.sampling import Sampling, Watching
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.tasks import Tasks, tasks_of
from meshwright.run.posttrain.loop.trainer import LoopTrainer, model_of
from meshwright.run.posttrain.questions.judges import Judges
from meshwright.run.posttrain.questions.scoring import RewardScorer
from meshwright.run.posttrain.rollouts.log import Origin, origin_of
from meshwright.run.posttrain.rollouts.replay import Replay
from meshwright.run.posttrain.rollouts.verifiers.pool import VerifierPool, told
from meshwright.run.train.paths import whole_path
from meshwright.spec.model import Model

_DRAWN = ("seed", "samples", "max_tokens", "max_turns", "stop_tokens")
"""What of a drawing follows from settings and the task."""


class Outcome(NamedTuple):
    """How a run ended."""

    steps: int
    """Trained in all sittings."""
    rows: tuple[dict[str, float], ...]
    """Figures of each step of this sitting."""
    held_out: dict[int, dict[str, float]]
    """What was found on held-out prompts, by steps trained."""
    notes: tuple[str, ...]
    seconds: dict[str, float]
    """What trainer and engines spent their time on, and waited for."""
    wall_s: float
    cpu_s: float
    """Of this process, and of the verifiers' that ended with it."""
    decoder: Decoder
    """With the weights it came to; over several ranks this one's part of them."""
    adapter: DecoderAdapter | None = None
    """What was trained beside the decoder's weights, where these are frozen."""


def run(
    settings: LoopSettings, *, say: Callable[[str], object] = lambda _: None, show: bool = False
) -> Outcome:
    """Run to the end, or go on with what the folder holds; `say` hears what is worth a line.

    With `show` steps are told on stderr, now and then. Where the layout has several ranks, each
    process calls this: the first leads, and others return with nothing to tell when it ends.
    """
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    leads = place().rank == 0
    with threads(settings.threads), ExitStack() as stack:
        with told_to_all(settings):
            tasks = tasks_of(settings)
            # Both are read before anything is written or trained: either may not be there, or not
            # do.
            replayed = _replayed(settings, tasks) if settings.replay and leads else None
            model = model_of(settings, tasks)
            keeping = Keeping(settings, say, asks=tasks.train.name) if leads else None
        if keeping is None:
            mesh = stack.enter_context(met(settings))
            decoder = follow(settings, tasks, model, mesh)
            wall_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
            return Outcome(settings.steps, (), {}, (), {}, wall_s, cpu_s, decoder)
        stack.callback(keeping.close)
        trainer = stack.enter_context(_training(settings, tasks, model, keeping))
        progress = trainer.begin()
        for line in () if progress.trained else (*idle_settings(settings), *tasks.notes):
            keeping.note(line)
        if show:
            keeping.show(progress.trained)
        if replayed is not None:
            _say_model(settings, replayed, trainer)
            watching = Watching(settings.most_unjudged, keeping.note)
            nothing = Evaluation(settings.evaluate, None, keeping, None, most_unjudged=0)
            engines = Replayed(replayed)
            Driver(
                trainer, engines, progress, watching=watching, evaluation=nothing, pool=None
            ).go()
            held_out = nothing.figures
        else:
            held_out = _with_engine(trainer, tasks, progress, stack)
        if not settings.rollout_only:
            trainer.ended()
        keeping.spans.waits(())
    return Outcome(
        steps=progress.trained if settings.rollout_only else settings.steps,
        rows=tuple(keeping.rows),
        held_out=held_out,
        notes=tuple(keeping.notes),
        seconds={f"{who}: {name}": s for (who, name), s in keeping.spans.seconds.items()},
        wall_s=time.perf_counter() - began_s,
        cpu_s=_cpu_s() - began_cpu_s,
        decoder=trainer.decoder,
        adapter=trainer.adapter,
    )


@contextmanager
def _training(
    settings: LoopSettings, tasks: Tasks, model: Model, keeping: Keeping
) -> Iterator[AnyTrainer]:
    """Have the trainer: of one device, or of all ranks that were started."""
    if not is_shared(settings):
        yield LoopTrainer(settings, tasks, keeping)
        return
    with met(settings) as mesh, leading(settings, tasks, model, keeping, mesh) as trainer:
        yield trainer


def _cpu_s() -> float:
    """Return the processor seconds of this process, and of its children that ended."""
    mine, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


def _with_engine(
    trainer: AnyTrainer, tasks: Tasks, progress: Progress, stack: ExitStack
) -> dict[int, dict[str, float]]:
    settings, keeping = trainer.settings, trainer.keeping
    verifiers = list(dict.fromkeys((*tasks.train.verifiers, *tasks.held_out.verifiers)))
    pool = stack.enter_context(
        VerifierPool(verifiers, workers=settings.verifier_workers, limits=tasks.limits(settings))
    )
    scorers = [RewardScorer(each, trainer.device) for each in settings.task.models]
    for each in scorers:
        keeping.note(f"{each.verifier} has the checksum {each.fingerprint}")
    judges = Judges(pool, scorers)
    room = trainer.offload if settings.arrangement.shared else lambda: None
    sampling = Sampling(
        trainer.decoder, settings, tasks, judges, keeping.note,
        adapter=trainer.adapter, offered=trainer.offered, room=room,
    )  # fmt: skip
    stack.callback(sampling.close)
    if settings.arrangement.shared:
        sampling.sleep()  # it began with all its memory, of which the first weights need some
    sampling.ready(progress.trained)
    # As settings are kept: a run goes on from any folder, and from its own file.
    model = whole_path(settings.model) or trainer.decoder.model.name
    progress = keeping.open_log(origin_of(sampling.generator, model), progress)
    watching = Watching(settings.most_unjudged, keeping.note)
    words = getattr(tasks.train, "words", None)
    # As large a share of held-out answers may fail as of a step's.
    share = max(1.0, settings.evaluate.prompts / (settings.prompts * settings.samples))
    most = math.ceil(settings.most_unjudged * share)
    evaluation = Evaluation(
        settings.evaluate, sampling, keeping, words,
        most_unjudged=most, shares=settings.task.shares,
    )  # fmt: skip
    if progress.trained == 0:
        evaluation.whole(0)
    with _frozen():
        engines: Engines
        if settings.overlaps:
            engines = EngineThread(sampling, keeping.spans, settings.stall_s)
        else:
            engines = EngineHere(sampling, keeping.spans)
        Driver(trainer, engines, progress, watching=watching, evaluation=evaluation, pool=pool).go()
    if not settings.rollout_only:
        sampling.ready(settings.steps)
        evaluation.whole(settings.steps)
    for line in told(pool.counts):
        keeping.note(line, settings.steps)
    return evaluation.figures


def _replayed(settings: LoopSettings, tasks: Tasks) -> Replay:
    from meshwright.run.posttrain.rollouts.table import read_rollouts  # needs Arrow

    recorded = read_rollouts(settings.replay)
    others = tuple(_other_draws(recorded.origin, tasks, settings))
    if others:
        what = f"holds rollouts of another run: {', '.join(others)}"
        fix = "use the settings of the run that recorded it"
        raise InputError([Problem(settings.replay, what, fix)])
    replay, steps = Replay(recorded), settings.steps
    known = len(replay.steps)
    found = [(step, prompt) for step, prompts in replay.steps.items() for prompt in prompts]
    # Behind them are those that took the place of groups without a signal.
    wanted = [(place // settings.prompts, place) for place in range(steps * settings.prompts)]
    if found[: len(wanted)] != wanted:
        what = f"holds {known} steps, of other prompts than {settings.prompts} for each of {steps}"
        fix = "use the settings of the run that recorded it"
        if found == wanted[: len(found)]:
            what, fix = f"holds {known} steps, and {steps} are asked for", f"use steps={known}"
        raise InputError([Problem(settings.replay, what, fix)])
    return replay


def _other_draws(origin: Origin, tasks: Tasks, settings: LoopSettings) -> Iterator[str]:
    """Say what was asked otherwise when rollouts were recorded than this run would."""
    if origin.environment != tasks.train.name:
        yield f"the task is {origin.environment!r} there and {tasks.train.name!r} here"
    there, here = origin.drawing, tasks.drawing(settings)
    for name in _DRAWN:
        then, now = getattr(there, name), getattr(here, name)
        if then != now:
            yield f"{name} is {then} there and {now} here"


def _say_model(settings: LoopSettings, replay: Replay, trainer: AnyTrainer) -> None:
    """Say where another model drew what is trained on: folders move, so it may be the same."""
    here = settings.model or trainer.decoder.model.name
    if replay.model and Path(replay.model).absolute() != Path(here).absolute():
        what = f"these rollouts were drawn by {replay.model}, and ratios are to what that said"
        trainer.keeping.note(what)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
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
