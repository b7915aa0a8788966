"""`LeadRankTrainer`: the trainer as a driver on the first rank sees it, done by all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from meshwright.policy.rollout.controller import RolloutProgress
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.distributed.commands import (
    BeginCommand,
    CommandChannel,
    EndCommand,
    SaveCommand,
    TrainCommand,
)
from meshwright.run.posttrain.rl.distributed.rank_state import RankState
from meshwright.run.posttrain.rl.distributed.weight_sender import DistributedWeightSender
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rl.task_loader import TaskEnvironments
from meshwright.run.posttrain.rollout.generator import RolloutGroup
from meshwright.spec.model import Model


class LeadRankTrainer:
    """Everything of a run that is trained: orders to all ranks, and the first rank's part."""

    adapter: None = None
    """Ranks train every weight."""

    def __init__(
        self, config: RLConfig, state: RankState, run_state: RLRunState, orders: CommandChannel
    ) -> None:
        """Lead ranks that have all made their `state`, and wait for orders."""
        self.config, self.run_state, self._orders, self._state = config, run_state, orders, state
        self.decoder, self.device = state.model.spread.decoder, orders.mesh.device
        self._offered: DistributedWeightSender | None = None

    @property
    def weight_source(self) -> DistributedWeightSender:
        """What all ranks have for engines."""
        if self._offered is None:
            self._offered = DistributedWeightSender(self._state.sync, self._orders)
        return self._offered

    def resume_or_initialize(self) -> RolloutProgress:
        """Go on from the last checkpoint, or warm up and write the first one."""
        keeping, state = self.run_state, self._state
        goes_on = keeping.has_checkpoint
        with self._orders.issue(BeginCommand(goes_on)):
            warms = bool(self.config.warm_up.steps)
            with keeping.timeline.record("trainer", "warm up") if warms else nullcontext():
                losses = state.initialize_weights(goes_on=goes_on)
            found = keeping.resume(state.tensors())
            if found is not None:
                state.broadcast_loaded()
        if found is None:
            found = RolloutProgress(trained_steps=0, next_group=0)
            keeping.note_warmup(losses)
            self.save(found)
        return found

    def step(self, step: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Train on groups; say where they carry no signal."""
        with (
            self.run_state.timeline.record("trainer", "train"),
            self._orders.issue(TrainCommand(step, list(groups))),
        ):
            learned = self._state.step(step, groups)
        self.run_state.note_without_signal(step, learned.metrics, learned.signal_warning)
        return learned.metrics

    def publish_weights(self, version: int) -> None:
        """Let all ranks lay the weights after so many steps out for engines."""
        if self._offered is not None:
            self._offered.publish_if_new(version + 1)

    def offload(self) -> None:
        """Keep everything: engines that share devices with several ranks are refused."""

    def reload(self) -> None:
        """Have everything."""

    def save(self, progress: RolloutProgress) -> None:
        """Write a checkpoint where one is due."""
        keeping = self.run_state
        if keeping.is_checkpoint_due(progress.trained_steps) and keeping.needs_first_checkpoint(
            progress.trained_steps
        ):
            with self._orders.issue(SaveCommand(progress.trained_steps)):
                keeping.save(self._state.tensors(), progress)

    def save_final(self) -> None:
        """Write nothing: checkpoints have all weights."""

    def close(self) -> None:
        """Give the memory of versions back."""
        if self._offered is not None:
            self._offered.close()


@contextmanager
def open_lead_rank_trainer(
    settings: RLConfig, tasks: TaskEnvironments, model: Model, keeping: RLRunState, mesh: Mesh
) -> Iterator[LeadRankTrainer]:
    """Have a trainer of all ranks; these leave when it ends well, and by the alarm otherwise."""
    orders = CommandChannel(mesh)
    keeping.attach_mesh(mesh)
    with ExitStack() as stack:
        stack.callback(keeping.detach_mesh)
        state = RankState(settings, tasks, model, mesh)
        trainer = LeadRankTrainer(settings, state, keeping, orders)
        stack.callback(trainer.close)
        yield trainer
        with orders.issue(EndCommand()):
            pass
