"""The loop in which engine and trainer work at the same time, as far as staleness allows.

Who generates what, when the trainer takes it and when weights move is decided by
`policy.rollout.Controller`, which also drives the simulation of such a run; here its decisions
take as long as they take. With a staleness of 0 this is the synchronous loop, bit by bit.
"""

import sys
import time
from collections.abc import Sequence

from meshwright.errors import MeshwrightError
from meshwright.policy.rollout import Arrangement, Controller, Drop, Generate, Progress, Sync, Train
from meshwright.policy.rollout.arrangement import Placement, arranged
from meshwright.run.posttrain.loop.engine_thread import EngineFailed, EngineThread, Renewed
from meshwright.run.posttrain.loop.keeping import keys_of
from meshwright.run.posttrain.loop.sampling import Sampling, Watching
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.trainer import LoopTrainer
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.run.posttrain.rollouts.record import Key, Rollout

_SWITCH_S = 0.0005
"""How long a thread keeps the interpreter while another wants it. Python's 5 ms are several steps
of an engine, for which it would wait whenever the trainer's thread prepares kernels."""


class Stalled(MeshwrightError):
    """Nothing happened for too long; it says who waits for whom."""


def arrangement_of(settings: LoopSettings) -> Arrangement:
    """Return what the controller goes by."""
    named = settings.placement
    placement: Placement = "one-step-off" if named == "one-step-off" else "asynchronous"
    return arranged(
        placement,
        groups=settings.prompts,
        steps=settings.steps,
        max_staleness=settings.staleness,
    )


def asynchronous(
    trainer: LoopTrainer, sampling: Sampling, progress: Progress, watching: Watching
) -> None:
    """Go through the steps that are left."""
    driver, before_s = _Driver(trainer, sampling, progress, watching), sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        driver.go()
    finally:
        sys.setswitchinterval(before_s)
        driver.engine.close()


class _Driver:
    """Carries out what the controller decides."""

    def __init__(
        self, trainer: LoopTrainer, sampling: Sampling, progress: Progress, watching: Watching
    ) -> None:
        self._trainer, self._settings = trainer, trainer.settings
        self._keeping, self._watching = trainer.keeping, watching
        self._pool = sampling.pool
        self._controller = Controller(arrangement_of(trainer.settings), progress)
        self.engine = EngineThread(sampling, trainer.keeping.spans)
        self._asked: dict[int, Generate] = {}
        self._drawn: dict[int, dict[Key, Rollout]] = {}
        self._groups: dict[int, Group] = {}
        """Those that wait for their step."""
        self._renewed: int | None = None
        self._stepped_s = time.perf_counter()
        self._tokens = 0
        for group, _ in progress.ready:
            assert self._keeping.log is not None, "who goes on has a file of rollouts"
            found = [self._keeping.log.read(key) for key in keys_of(self._settings, group)]
            self._groups[group] = tuple(found)

    def go(self) -> None:
        """Let everything happen."""
        controller = self._controller
        while not controller.is_done:
            actions = controller.begin()
            assert not any(isinstance(each, Drop) for each in actions), "steps wait for old groups"
            self._generate([each for each in actions if isinstance(each, Generate)])
            self._keeping.spans.waits(controller.waits)
            doing = next((each for each in actions if isinstance(each, Train | Sync)), None)
            if isinstance(doing, Train):
                self._train(doing)
            elif isinstance(doing, Sync):
                self._sync(doing)
            else:
                self._take(wait=True)
            self._take(wait=False)

    def _generate(self, asked: Sequence[Generate]) -> None:
        if not asked:
            return
        keys: list[Key] = []
        for each in asked:
            self._asked[each.group], self._drawn[each.group] = each, {}
            keys += keys_of(self._settings, each.group)
        self.engine.begin(keys, asked[0].version)

    def _train(self, doing: Train) -> None:
        groups = [self._groups.pop(group) for group in doing.groups]
        self._watching.begin()
        figures = self._trainer.step(doing.step, groups)
        self._controller.end(doing)
        now_s = time.perf_counter()
        figures["step_s"] = now_s - self._stepped_s
        figures["sampler_tokens_per_s"] = self._tokens / figures["step_s"]
        self._stepped_s, self._tokens = now_s, 0
        self._keeping.row(doing.step + 1, figures)
        self._take(wait=False)
        self._trainer.save(self._controller.progress())

    def _sync(self, doing: Sync) -> None:
        began_ns = time.time_ns()
        self.engine.renew(doing.version)
        while not self._has(doing.version):
            self._take(wait=True)
        self._controller.end(doing)
        self._keeping.spans.add("trainer", "sync", began_ns, time.time_ns())

    def _has(self, version: int) -> bool:
        return self._renewed == version

    def _take(self, *, wait: bool) -> None:
        """Take what the engine says; wait for something, or for nothing."""
        turns, until_s = self.engine.turns, time.monotonic() + self._settings.stall_s
        while (
            heard := self.engine.next(min(1.0, self._settings.stall_s) if wait else 0.0)
        ) is None:
            if not wait:
                return
            if turns != self.engine.turns:
                turns, until_s = self.engine.turns, time.monotonic() + self._settings.stall_s
            if time.monotonic() > until_s:
                raise Stalled(self._who_waits())
        while heard is not None:
            if isinstance(heard, EngineFailed):
                raise heard.error
            if isinstance(heard, Renewed):
                self._renewed = heard.version
            else:
                self._ended(heard)
            heard = self.engine.next(0.0)

    def _ended(self, rollout: Rollout) -> None:
        self._keeping.record(rollout)
        self._watching.hear(rollout)
        self._tokens += rollout.drawn
        group = rollout.key.prompt
        drawn = self._drawn[group]
        drawn[rollout.key] = rollout
        if len(drawn) == self._settings.samples:
            keys = keys_of(self._settings, group)
            self._groups[group] = tuple(drawn[key] for key in keys)
            del self._drawn[group]
            self._controller.end(self._asked.pop(group))

    def _who_waits(self) -> str:
        said = [f"nothing happened for {self._settings.stall_s:g} s"]
        said += [str(each) for each in self._controller.waits]
        said += [
            f"verifier {each.verifier} (process {each.pid}) judges {each.check} since "
            f"{time.monotonic() - each.since_s:.0f} s, its deadline is {each.deadline_s:g} s"
            for each in self._pool.under_way()
        ]
        return "; ".join(said)
