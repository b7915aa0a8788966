"""The synchronous loop: draw the groups of a step, train on them, give the engine the weights."""

import time
from collections.abc import Iterable

from meshwright.policy.rollout.controller import Progress
from meshwright.run.posttrain.loop.evaluation import Evaluation
from meshwright.run.posttrain.loop.sampling import Sampling, Watching
from meshwright.run.posttrain.loop.trainer import LoopTrainer
from meshwright.run.posttrain.rollouts.generate import Group, grouped
from meshwright.run.posttrain.rollouts.record import Rollout
from meshwright.run.posttrain.rollouts.replay import Draws, Recording


class _Drawn:
    """Draws without a file."""

    def __init__(self, sampling: Sampling, watching: Watching) -> None:
        self._generator, self._watching = sampling.generator, watching

    def groups(self, step: int, prompts: Iterable[int], version: int, /) -> list[Group]:
        keys, found = self._generator.keys(step, prompts), list[Rollout]()
        for rollout in self._generator.rollouts(keys, version):
            self._watching.hear(rollout)
            found.append(rollout)
        return grouped(keys, found, self._generator.drawing.samples)


def draws_of(sampling: Sampling, trainer: LoopTrainer, watching: Watching) -> Draws:
    """Return what draws, and writes down where there is a folder."""
    log = trainer.keeping.log
    if log is None:
        return _Drawn(sampling, watching)
    return Recording(sampling.generator, log, watching.hear)


def synchronous(
    trainer: LoopTrainer,
    draws: Draws,
    progress: Progress,
    *,
    sampling: Sampling | None,
    watching: Watching,
    evaluation: Evaluation,
) -> None:
    """Go through the steps that are left; without an engine they are replayed."""
    settings, keeping = trainer.settings, trainer.keeping
    spans, only = keeping.spans, settings.rollout_only
    for step in range(progress.trained, settings.steps):
        prompts = range(step * settings.prompts, (step + 1) * settings.prompts)
        began_s = time.perf_counter()
        watching.begin()
        with spans.doing("engines", "generate"), spans.waiting("trainer", "groups"):
            groups = draws.groups(step, prompts, 0 if only else step)
        generate_s = time.perf_counter() - began_s
        drawn = sum(answer.drawn for group in groups for answer in group)
        figures = {"generate_s": generate_s, "sampler_tokens_per_s": drawn / generate_s}
        if only:
            rewards = [answer.reward for group in groups for answer in group]
            keeping.row(step + 1, figures | {"reward_mean": sum(rewards) / len(rewards)})
            continue
        shared = sampling is not None and settings.placement == "colocated"
        if sampling is not None and shared:
            with spans.doing("trainer", "sleep"):
                sampling.sleep()
        with spans.waiting("engines", "memory" if shared else "staleness"):
            figures |= trainer.step(step, groups)
        if sampling is not None and shared:
            with spans.doing("trainer", "wake weights"):
                sampling.wake()
        if sampling is not None:
            synced_s = time.perf_counter()
            with spans.doing("trainer", "sync"), spans.waiting("engines", "weights"):
                sampling.take(step + 1)
            figures["sync_s"] = time.perf_counter() - synced_s
            figures |= evaluation.due(step + 1)
        figures["step_s"] = time.perf_counter() - began_s
        keeping.row(step + 1, figures)
        unasked = (step + 1) * settings.prompts
        trainer.save(Progress(trained=step + 1, unasked=unasked))
