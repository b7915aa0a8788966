"""`Driver`: carries out what `policy.rollout.Controller` decides, and takes as long as it takes.

The controller says what is drawn with which weights, when the trainer takes it and when weights
move, and drives the simulation of such a run as well; nothing of that is decided here. Who draws
is one of `Engines`: with a staleness of 0 all of them come to the same bits.
"""

import time
from collections.abc import Sequence

from meshwright.errors import MeshwrightError
from meshwright.policy.rollout import (
    Controller,
    Drop,
    Ending,
    Generate,
    Phase,
    Progress,
    Sync,
    Train,
)
from meshwright.run.posttrain.loop.earlier import Earlier
from meshwright.run.posttrain.loop.engines import EngineFailed, Engines, Renewed
from meshwright.run.posttrain.loop.evaluation import Evaluation
from meshwright.run.posttrain.loop.keeping import keys_of
from meshwright.run.posttrain.loop.ranks.leading import LeadingTrainer
from meshwright.run.posttrain.loop.sampling import Watching
from meshwright.run.posttrain.loop.trainer import LoopTrainer
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.run.posttrain.rollouts.record import Key, Rollout, part_means
from meshwright.run.posttrain.rollouts.verifiers.pool import VerifierPool

AnyTrainer = LoopTrainer | LeadingTrainer
"""The trainer of one device, or of several ranks."""


class Stalled(MeshwrightError):
    """Nothing happened for too long; it says who waits for whom."""


class Driver:
    """One sitting of a run."""

    def __init__(
        self,
        trainer: AnyTrainer,
        engines: Engines,
        progress: Progress,
        *,
        watching: Watching,
        evaluation: Evaluation,
        pool: VerifierPool | None,
    ) -> None:
        """Go on from where a checkpoint stood; without an engine there are no verifiers."""
        self._trainer, self._settings, self._engines = trainer, trainer.settings, engines
        self._keeping, self._watching = trainer.keeping, watching
        self._earlier = Earlier(self._keeping.log, self._keeping.note, self._keeping.told)
        self._evaluation, self._pool = evaluation, pool
        self._controller = Controller(trainer.settings.arrangement, progress)
        self._asked: dict[int, Generate] = {}
        self._drawn: dict[int, dict[Key, Rollout]] = {}
        self._groups: dict[int, Group] = {}
        """Those that wait for their step."""
        self._renewed: int | None = None
        self._row: dict[str, float] | None = None
        """Figures of a step that is trained; the engine takes its weights meanwhile."""
        self._tokens = 0
        self._began_s, self._generated_s = time.perf_counter(), 0.0
        for group, _ in progress.ready:
            assert self._keeping.log is not None, "who goes on has a file of rollouts"
            found = [self._keeping.log.read(key) for key in keys_of(self._settings, group)]
            self._groups[group] = tuple(found)

    def go(self) -> None:
        """Let everything happen."""
        controller = self._controller
        try:
            while not controller.is_done:
                self._turn()
            self._end_row()
        finally:
            self._engines.close()

    def _turn(self) -> None:
        """Begin what begins now, and carry out what the trainer does or wait for others."""
        actions = self._controller.begin()
        for each in actions:
            if isinstance(each, Drop):
                assert each.useless, "steps wait for old groups"
                del self._groups[each.group]
        doing = next((each for each in actions if isinstance(each, Train | Sync | Phase)), None)
        if not isinstance(doing, Sync | Phase):
            self._end_row()
        self._generate([each for each in actions if isinstance(each, Generate)])
        self._keeping.spans.waits(self._controller.waits)
        match doing:
            case Train():
                self._train(doing)
            case Sync():
                self._sync(doing)
            case Phase():
                self._phase(doing)
            case None if self._asked:
                self._take(wait=True)
            case None if not actions:
                raise Stalled(self._who_waits())
        self._take(wait=False)

    def _generate(self, asked: Sequence[Generate]) -> None:
        """Ask for groups; what a killed run left of them is not drawn again."""
        if not asked:
            return
        # Who only draws has the first weights throughout.
        version = 0 if self._settings.rollout_only else asked[0].version
        keys: list[Key] = []
        for each in asked:
            self._asked[each.group], self._drawn[each.group] = each, {}
            keys += keys_of(self._settings, each.group)
        standing, again = self._earlier.left(keys, version)
        there = {each.key for each in standing}
        self._engines.begin([key for key in keys if key not in there], version, again)
        for rollout in standing:
            self._watching.recall(rollout)
            self._ended(rollout)

    def _train(self, doing: Train) -> None:
        groups = [self._groups.pop(group) for group in doing.groups]
        self._watching.begin()
        if self._settings.rollout_only:
            answers = [answer for group in groups for answer in group]
            mean = sum(answer.reward for answer in answers) / len(answers)
            self._row = {"reward_mean": mean, **part_means(answers)}
        else:
            self._row = self._trainer.step(doing.step, groups)
        if self._settings.spare_prompts:
            self._row["replaced_groups"] = float(doing.replaced)
        self._controller.end(doing)

    def _phase(self, doing: Phase) -> None:
        with self._keeping.spans.doing("trainer", doing.name):
            match doing.name:
                case "load":
                    self._trainer.load()
                case "offload":
                    self._trainer.offload()
                case _:
                    self._engines.phase(doing.name)
        self._controller.end(doing)

    def _sync(self, doing: Sync) -> None:
        if not self._settings.rollout_only:
            began_ns = time.time_ns()
            self._trainer.lay_out(doing.version)
            self._engines.renew(doing.version)
            while self._renewed != doing.version:
                self._take(wait=True)
            ended_ns = time.time_ns()
            self._keeping.spans.add("trainer", "sync", began_ns, ended_ns)
            if self._row is not None:
                self._row["sync_s"] = (ended_ns - began_ns) / 1e9
        self._controller.end(doing)

    def _end_row(self) -> None:
        """Write down what a step came to, once engines have its weights, and a checkpoint."""
        if self._row is None:
            return
        figures, self._row = self._row, None
        trained = self._controller.trained
        figures["step_s"] = time.perf_counter() - self._began_s
        self._keeping.spans.step(trained, figures["step_s"])
        generated_s = self._engines.generating_s
        if seconds := generated_s - self._generated_s:
            figures["generate_s"] = seconds
            figures["sampler_tokens_per_s"] = self._tokens / seconds
            # Tokens wait for the seconds they took, which a thread tells when it rests.
            self._generated_s, self._tokens = generated_s, 0
        if not self._settings.rollout_only:
            figures |= self._evaluation.due(trained)
        self._keeping.row(trained, figures)
        self._take(wait=False)
        if not self._settings.rollout_only:
            self._trainer.save(self._controller.progress())
        self._began_s = time.perf_counter()

    def _take(self, *, wait: bool) -> None:
        """Take what there is to hear; wait for something, or for nothing."""
        engines, stall_s = self._engines, self._settings.stall_s
        turns, until_s = engines.turns, time.monotonic() + stall_s
        while (heard := engines.next(min(1.0, stall_s) if wait else 0.0)) is None:
            if not wait:
                return
            if turns != engines.turns:
                turns, until_s = engines.turns, time.monotonic() + stall_s
            if time.monotonic() > until_s:
                raise Stalled(self._who_waits())
        while heard is not None:
            if isinstance(heard, EngineFailed):
                raise heard.error
            if isinstance(heard, Renewed):
                self._renewed = heard.version
            else:
                if not self._earlier.takes(heard):
                    self._keeping.record(heard)
                    self._tokens += heard.drawn
                self._watching.hear(heard)
                self._ended(heard)
            heard = engines.next(0.0)

    def _ended(self, rollout: Rollout) -> None:
        group = rollout.key.prompt
        drawn = self._drawn[group]
        drawn[rollout.key] = rollout
        if len(drawn) == self._settings.samples:
            whole = tuple(drawn[key] for key in keys_of(self._settings, group))
            self._groups[group] = whole
            del self._drawn[group]
            ending: Ending = "kept" if _tells(whole) else "useless"
            self._controller.end(self._asked.pop(group), ending)

    def _who_waits(self) -> str:
        said = [f"nothing happened for {self._settings.stall_s:g} s"]
        said += [str(each) for each in self._controller.waits]
        said += [
            f"verifier {each.verifier} (process {each.pid}) judges {each.check} since "
            f"{time.monotonic() - each.since_s:.0f} s, its deadline is {each.deadline_s:g} s"
            for each in (() if self._pool is None else self._pool.under_way())
        ]
        return "; ".join(said)


def _tells(group: Group) -> bool:
    """Return whether answers that were judged differ in their rewards."""
    return len({each.reward for each in group if each.is_judged and each.drawn}) > 1
