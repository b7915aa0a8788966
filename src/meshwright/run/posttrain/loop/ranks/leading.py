"""`LeadingTrainer`: the trainer as a driver on the first rank sees it, done by all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from meshwright.policy.rollout.controller import Progress
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.ranks.offering import OfferedByRanks
from meshwright.run.posttrain.loop.ranks.orders import Begin, End, Learn, Orders, Save
from meshwright.run.posttrain.loop.ranks.state import RankState
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.tasks import Tasks
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.spec.model import Model


class LeadingTrainer:
    """Everything of a run that is trained: orders to all ranks, and the first rank's part."""

    adapter: None = None
    """Ranks train every weight."""

    def __init__(
        self, settings: LoopSettings, state: RankState, keeping: Keeping, orders: Orders
    ) -> None:
        """Lead ranks that have all made their `state`, and wait for orders."""
        self.settings, self.keeping, self._orders, self._state = settings, keeping, orders, state
        self.decoder, self.device = state.model.spread.decoder, orders.mesh.device
        self._offered: OfferedByRanks | None = None

    @property
    def offered(self) -> OfferedByRanks:
        """What all ranks have for engines."""
        if self._offered is None:
            self._offered = OfferedByRanks(self._state.sync, self._orders)
        return self._offered

    def begin(self) -> Progress:
        """Go on from the last checkpoint, or warm up and write the first one."""
        keeping, state = self.keeping, self._state
        goes_on = keeping.goes_on
        with self._orders.giving(Begin(goes_on)):
            warms = bool(self.settings.warm_up.steps)
            with keeping.spans.doing("trainer", "warm up") if warms else nullcontext():
                losses = state.first_weights(goes_on=goes_on)
            found = keeping.resume(state.tensors())
            if found is not None:
                state.loaded()
        if found is None:
            found = Progress(trained=0, unasked=0)
            keeping.note_warm_up(losses)
            self.save(found)
        return found

    def step(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train on groups; say where they carry no signal."""
        with (
            self.keeping.spans.doing("trainer", "train"),
            self._orders.giving(Learn(step, list(groups))),
        ):
            learned = self._state.step(step, groups)
        self.keeping.note_silence(step, learned.figures, learned.sentence)
        return learned.figures

    def lay_out(self, version: int) -> None:
        """Let all ranks lay the weights after so many steps out for engines."""
        if self._offered is not None:
            self._offered.lay(version + 1)

    def offload(self) -> None:
        """Keep everything: engines that share devices with several ranks are refused."""

    def load(self) -> None:
        """Have everything."""

    def save(self, progress: Progress) -> None:
        """Write a checkpoint where one is due."""
        keeping = self.keeping
        if keeping.due(progress.trained) and keeping.lacks(progress.trained):
            with self._orders.giving(Save(progress.trained)):
                keeping.save(self._state.tensors(), progress)

    def ended(self) -> None:
        """Write nothing: checkpoints have all weights."""

    def close(self) -> None:
        """Give the memory of versions back."""
        if self._offered is not None:
            self._offered.close()


@contextmanager
def leading(
    settings: LoopSettings, tasks: Tasks, model: Model, keeping: Keeping, mesh: Mesh
) -> Iterator[LeadingTrainer]:
    """Have a trainer of all ranks; these leave when it ends well, and by the alarm otherwise."""
    orders = Orders(mesh)
    keeping.join(mesh)
    with ExitStack() as stack:
        stack.callback(keeping.part)
        state = RankState(settings, tasks, model, mesh)
        trainer = LeadingTrainer(settings, state, keeping, orders)
        stack.callback(trainer.close)
        yield trainer
        with orders.giving(End()):
            pass
