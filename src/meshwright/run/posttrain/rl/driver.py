"""`RLDriver`: carries out what `policy.rollout.RolloutController` decides, in real time.

The controller says what is drawn with which weights, when the trainer takes it and when weights
move, and drives the simulation of such a run as well; nothing of that is decided here. Who draws
is one of `RolloutEngine`: with a staleness of 0 all of them come to the same bits.
"""

import time
from collections.abc import Sequence

from meshwright.errors import MeshwrightError
from meshwright.policy.rollout import (
    DropAction,
    GenerateAction,
    GroupEnd,
    MemoryPhaseAction,
    RolloutController,
    RolloutProgress,
    SyncAction,
    TrainAction,
)
from meshwright.run.posttrain.rl.distributed.lead_rank import LeadRankTrainer
from meshwright.run.posttrain.rl.generation.held_out_evaluation import HeldOutEvaluation
from meshwright.run.posttrain.rl.generation.resumed_rollouts import ResumedRollouts
from meshwright.run.posttrain.rl.generation.rollout_backend import VerifierFailureMonitor
from meshwright.run.posttrain.rl.generation.rollout_engine import (
    EngineFailedEvent,
    RolloutEngine,
    WeightsUpdatedEvent,
)
from meshwright.run.posttrain.rl.run_state import build_group_keys
from meshwright.run.posttrain.rl.trainer.rl_trainer import RLTrainer
from meshwright.run.posttrain.rollout.generator import RolloutGroup
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey, average_reward_components
from meshwright.run.posttrain.rollout.verifiers.verifier_pool import VerifierPool

RLTrainerLike = RLTrainer | LeadRankTrainer
"""The trainer of one device, or of several ranks."""


class RLStallError(MeshwrightError):
    """Nothing happened for too long; it says who waits for whom."""


class RLDriver:
    """One run session."""

    def __init__(
        self,
        trainer: RLTrainerLike,
        engines: RolloutEngine,
        progress: RolloutProgress,
        *,
        watching: VerifierFailureMonitor,
        evaluation: HeldOutEvaluation,
        pool: VerifierPool | None,
    ) -> None:
        """Go on from where a checkpoint stood; without an engine there are no verifiers."""
        self._trainer, self._settings, self._engines = trainer, trainer.config, engines
        self._keeping, self._watching = trainer.run_state, watching
        self._earlier = ResumedRollouts(
            self._keeping.rollout_log, self._keeping.write_note, self._keeping.reported_step
        )
        self._evaluation, self._pool = evaluation, pool
        self._controller = RolloutController(trainer.config.rollout_policy, progress)
        self._asked: dict[int, GenerateAction] = {}
        self._drawn: dict[int, dict[RolloutKey, Rollout]] = {}
        self._groups: dict[int, RolloutGroup] = {}
        """Those that wait for their step."""
        self._renewed: int | None = None
        self._row: dict[str, float] | None = None
        """Figures of a step that is trained; the engine takes its weights meanwhile."""
        self._tokens = 0
        self._began_s, self._generated_s = time.perf_counter(), 0.0
        for group, _ in progress.ready_groups:
            assert self._keeping.rollout_log is not None, "who goes on has a file of rollouts"
            found = [
                self._keeping.rollout_log.read(key)
                for key in build_group_keys(self._settings, group)
            ]
            self._groups[group] = tuple(found)

    def run(self) -> None:
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
        actions = self._controller.start_actions()
        for each in actions:
            if isinstance(each, DropAction):
                assert each.no_signal, "steps wait for old groups"
                del self._groups[each.group]
        doing = next(
            (
                each
                for each in actions
                if isinstance(each, TrainAction | SyncAction | MemoryPhaseAction)
            ),
            None,
        )
        if not isinstance(doing, SyncAction | MemoryPhaseAction):
            self._end_row()
        self._generate([each for each in actions if isinstance(each, GenerateAction)])
        self._keeping.timeline.set_idle_reasons(self._controller.idle_reasons)
        match doing:
            case TrainAction():
                self._train(doing)
            case SyncAction():
                self._sync(doing)
            case MemoryPhaseAction():
                self._phase(doing)
            case None if self._asked:
                self._take(wait=True)
            case None if not actions:
                raise RLStallError(self._who_waits())
        self._take(wait=False)

    def _generate(self, asked: Sequence[GenerateAction]) -> None:
        """Ask for groups; what a killed run left of them is not drawn again."""
        if not asked:
            return
        # Who only draws has the first weights throughout.
        version = 0 if self._settings.rollout_only else asked[0].version
        keys: list[RolloutKey] = []
        for each in asked:
            self._asked[each.group], self._drawn[each.group] = each, {}
            keys += build_group_keys(self._settings, each.group)
        standing, again = self._earlier.match(keys, version)
        there = {each.key for each in standing}
        self._engines.submit([key for key in keys if key not in there], version, again)
        for rollout in standing:
            self._watching.count_resumed(rollout)
            self._ended(rollout)

    def _train(self, doing: TrainAction) -> None:
        groups = [self._groups.pop(group) for group in doing.groups]
        self._watching.start_step()
        if self._settings.rollout_only:
            answers = [answer for group in groups for answer in group]
            mean = sum(answer.reward for answer in answers) / len(answers)
            self._row = {"reward_mean": mean, **average_reward_components(answers)}
        else:
            self._row = self._trainer.step(doing.step, groups)
        if self._settings.extra_prompts:
            self._row["replaced_groups"] = float(doing.replaced_groups)
        self._controller.complete_action(doing)

    def _phase(self, doing: MemoryPhaseAction) -> None:
        with self._keeping.timeline.record("trainer", doing.phase):
            match doing.phase:
                case "load":
                    self._trainer.reload()
                case "offload":
                    self._trainer.offload()
                case _:
                    self._engines.enter_memory_phase(doing.phase)
        self._controller.complete_action(doing)

    def _sync(self, doing: SyncAction) -> None:
        if not self._settings.rollout_only:
            began_ns = time.time_ns()
            self._trainer.publish_weights(doing.version)
            self._engines.update_weights(doing.version)
            while self._renewed != doing.version:
                self._take(wait=True)
            ended_ns = time.time_ns()
            self._keeping.timeline.add("trainer", "sync", began_ns, ended_ns)
            if self._row is not None:
                self._row["sync_s"] = (ended_ns - began_ns) / 1e9
        self._controller.complete_action(doing)

    def _end_row(self) -> None:
        """Write down what a step came to, once engines have its weights, and a checkpoint."""
        if self._row is None:
            return
        figures, self._row = self._row, None
        trained = self._controller.trained_steps
        figures["step_s"] = time.perf_counter() - self._began_s
        self._keeping.timeline.step(trained, figures["step_s"])
        generated_s = self._engines.generating_s
        if seconds := generated_s - self._generated_s:
            figures["generate_s"] = seconds
            figures["sampler_tokens_per_s"] = self._tokens / seconds
            # Tokens wait for the seconds they took, which a thread tells when it rests.
            self._generated_s, self._tokens = generated_s, 0
        if not self._settings.rollout_only:
            figures |= self._evaluation.run_if_due(trained)
        self._keeping.write_metrics(trained, figures)
        self._take(wait=False)
        if not self._settings.rollout_only:
            self._trainer.save(self._controller.progress())
        self._began_s = time.perf_counter()

    def _take(self, *, wait: bool) -> None:
        """Take what there is to hear; wait for something, or for nothing."""
        engines, stall_s = self._engines, self._settings.stall_timeout_s
        turns, until_s = engines.step_count, time.monotonic() + stall_s
        while (heard := engines.next_event(min(1.0, stall_s) if wait else 0.0)) is None:
            if not wait:
                return
            if turns != engines.step_count:
                turns, until_s = engines.step_count, time.monotonic() + stall_s
            if time.monotonic() > until_s:
                raise RLStallError(self._who_waits())
        while heard is not None:
            if isinstance(heard, EngineFailedEvent):
                raise heard.error
            if isinstance(heard, WeightsUpdatedEvent):
                self._renewed = heard.version
            else:
                if not self._earlier.replace_if_rejudged(heard):
                    self._keeping.log_rollout(heard)
                    self._tokens += heard.sampled_token_count
                self._watching.observe(heard)
                self._ended(heard)
            heard = engines.next_event(0.0)

    def _ended(self, rollout: Rollout) -> None:
        group = rollout.key.prompt
        drawn = self._drawn[group]
        drawn[rollout.key] = rollout
        if len(drawn) == self._settings.group_size:
            whole = tuple(drawn[key] for key in build_group_keys(self._settings, group))
            self._groups[group] = whole
            del self._drawn[group]
            ending: GroupEnd = "kept" if _tells(whole) else "useless"
            self._controller.complete_action(self._asked.pop(group), ending)

    def _who_waits(self) -> str:
        said = [f"nothing happened for {self._settings.stall_timeout_s:g} s"]
        said += [str(each) for each in self._controller.idle_reasons]
        said += [
            f"verifier {each.verifier} (process {each.pid}) judges {each.job_name} since "
            f"{time.monotonic() - each.started_s:.0f} s, its deadline is {each.deadline_s:g} s"
            for each in (() if self._pool is None else self._pool.running_checks())
        ]
        return "; ".join(said)


def _tells(group: RolloutGroup) -> bool:
    """Return whether answers that were judged differ in their rewards."""
    return len({each.reward for each in group if each.has_reward and each.sampled_token_count}) > 1
