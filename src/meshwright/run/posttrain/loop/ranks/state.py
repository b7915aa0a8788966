"""`RankState`: what one rank has of all that is trained, and what it does of each order."""

from collections.abc import Sequence

import torch

from meshwright.run.nn.huggingface import load
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sync import make_sync
from meshwright.run.posttrain.loop.policy_step import Learned
from meshwright.run.posttrain.loop.ranks.critic import RankCritic
from meshwright.run.posttrain.loop.ranks.passes import RankModel
from meshwright.run.posttrain.loop.ranks.step import RankStep
from meshwright.run.posttrain.loop.ranks.warm_up import warm_up
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.tasks import Tasks
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.placed_state import State, placed_state
from meshwright.run.train.spread_step import groups_of_passes, make_spread
from meshwright.spec.model import Model


class RankState:
    """Weights, optimizer and step of one rank."""

    def __init__(self, settings: LoopSettings, tasks: Tasks, model: Model, mesh: Mesh) -> None:
        """Make this rank's part of the model with its first weights; all ranks do so together."""
        self.settings, self._tasks, self.mesh = settings, tasks, mesh
        self.model = self._made(model)
        spread = self.model.spread
        if settings.model:
            load(spread.decoder, settings.model, holdings=spread.holdings)
        self.sync = make_sync(spread)
        mesh.warm((*groups_of_passes(spread), *self.sync.groups()))
        self.optimizer = self._new_optimizer()
        self._critic: RankCritic | None = None
        self._step: RankStep | None = None

    def first_weights(self, *, goes_on: bool) -> list[float]:
        """Come to the weights before the first step; return the losses of a warm-up.

        A run that goes on needs them where KL is taken to them. Nothing is trained before `ready`.
        """
        pulled, losses = bool(self.settings.objective.kl), list[float]()
        if self.settings.warm_up.steps and (pulled or not goes_on):
            about = self.settings.warm_up
            losses = warm_up(self.model, self.sync, self._tasks.train, about)
            # Its float32 masters are of the weights before that.
            self.optimizer = self._new_optimizer()
        reference = self._copied(learns=False) if pulled else None
        if self.settings.objective.advantage == "gae":
            self._critic = RankCritic(self._copied(learns=True), self.settings)
        self._step = RankStep(
            self.model, self.sync, self.optimizer, self.settings,
            longest=self._tasks.max_tokens * self.settings.max_turns, reference=reference,
            critic=self._critic,
        )  # fmt: skip
        return losses

    def tensors(self) -> dict[str, State]:
        """Return what this rank has of all that a run needs to go on: the tensors themselves."""
        mine = placed_state(self.sync, self.optimizer)
        return mine if self._critic is None else mine | self._critic.tensors()

    def loaded(self) -> None:
        """Let all ranks have what was read from a checkpoint."""
        self.sync.finish()
        if self._critic is not None:
            self._critic.loaded()

    def step(self, step: int, groups: Sequence[Group]) -> Learned:
        """Train on groups, as all ranks do."""
        assert self._step is not None, "a run begins before it trains"
        learned = self._step(step, groups)
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return learned

    def _made(self, model: Model) -> RankModel:
        spread = make_spread(model, self.mesh, seed=self.settings.seed)
        spread.decoder.expect_varied_shapes()
        return RankModel(spread)

    @torch.no_grad()
    def _copied(self, *, learns: bool) -> RankModel:
        """Return a copy of the model as it is now; ZeRO 3 cuts one that stays so as well."""
        mine = self.model.spread
        made = self._made(mine.decoder.model)
        made.spread.decoder.requires_grad_(learns)
        with self.sync.gathered():
            weights = dict(mine.decoder.named_parameters())
            for name, value in made.spread.decoder.named_parameters():
                value.copy_(weights[name])
        if self.mesh.layout.zero == 3 and not learns:
            make_sync(made.spread)
        return made

    def _new_optimizer(self) -> Optimizer:
        settings = self.settings
        return make_optimizer(
            self.sync.named_parameters(),
            self.mesh.layout,
            settings.optimizer,
            total_steps=settings.updates,
            seed=settings.seed,
        )
