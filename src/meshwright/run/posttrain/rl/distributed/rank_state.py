"""`RankState`: what one rank has of all that is trained, and what it does of each order."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.zero.gradient_sync import Sync, make_gradient_sync
from meshwright.run.posttrain.rl.config.rl_config import RLConfig, WarmupConfig
from meshwright.run.posttrain.rl.distributed.microbatch_assignment import get_sequence_divisor
from meshwright.run.posttrain.rl.distributed.sharded_critic import ShardedCritic
from meshwright.run.posttrain.rl.distributed.sharded_model import ShardedPolicyModel
from meshwright.run.posttrain.rl.distributed.sharded_policy_step import ShardedPolicyStep
from meshwright.run.posttrain.rl.task_loader import TaskEnvironments
from meshwright.run.posttrain.rl.trainer.policy_step import PolicyStepResult
from meshwright.run.posttrain.rl.trainer.warmup import (
    build_warmup_optimizer,
    build_warmup_pairs,
    pad_pairs,
    require_demonstrations,
)
from meshwright.run.posttrain.rollout.environment import Environment
from meshwright.run.posttrain.rollout.generator import RolloutGroup
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.run_folder.state_tensors import StateTensor, make_sharded_state
from meshwright.run.train.step_backend import list_communication_groups, make_sharded_model
from meshwright.spec.model import Model


def run_sharded_warmup(
    model: ShardedPolicyModel, sync: Sync, environment: Environment, settings: WarmupConfig
) -> list[float]:
    """Train on right answers; return the mean loss of each step, in nats for a token."""
    task, mesh = require_demonstrations(environment), model.mesh
    layout, device, rule = mesh.layout, mesh.device, build_warmup_optimizer(settings)
    named = sync.named_parameters()
    optimizer = make_optimizer(named, layout, rule, total_steps=settings.steps)
    losses = []
    for step in range(settings.steps):
        pairs = build_warmup_pairs(task, step, settings)
        # Every replica has some; where there are too few, one shows what counts nowhere.
        mine = pairs[mesh.coordinate.dp :: layout.dp]
        tokens, labels = pad_pairs(mine or pairs[:1], device)
        if not mine:
            labels = torch.full_like(labels, IGNORE_INDEX)
        more = -tokens.shape[1] % get_sequence_divisor(layout)
        tokens, labels = pad(tokens, (0, more)), pad(labels, (0, more), value=IGNORE_INDEX)
        count = sum(len(answer) for _, answer in pairs)
        sync.begin_step()
        sums = model.runner(
            [model.build_microbatch(tokens, labels)], 1 / count, sync.mark_last_backward
        )
        gradients = sync.reduced_gradients()
        optimizer.step(settings.lr, norm=sync.grad_norm(), gradients=gradients)
        sync.zero_grads_and_unshard()
        # Ranks that share the work on the same tokens have the same loss.
        total = (sums.loss_sum + sums.auxiliary_loss).double() / (layout.tp * count)
        losses.append(mesh.world.all_reduce(total))
    return torch.stack(losses).tolist() if losses else []


class RankState:
    """Weights, optimizer and step of one rank."""

    def __init__(self, config: RLConfig, tasks: TaskEnvironments, model: Model, mesh: Mesh) -> None:
        """Make this rank's part of the model with its first weights; all ranks do so together."""
        self.config, self._tasks, self.mesh = config, tasks, mesh
        self.model = self._made(model)
        spread = self.model.spread
        if config.model:
            load_hf_checkpoint(spread.decoder, config.model, shard_specs=spread.shard_specs)
        self.sync = make_gradient_sync(spread)
        mesh.connect_groups((*list_communication_groups(spread), *self.sync.list_groups()))
        self.optimizer = self._new_optimizer()
        self._critic: ShardedCritic | None = None
        self._step: ShardedPolicyStep | None = None

    def initialize_weights(self, *, goes_on: bool) -> list[float]:
        """Come to the weights before the first step; return the losses of a warm-up.

        A run that goes on needs them where KL is taken to them. Nothing is trained before that.
        """
        pulled, losses = bool(self.config.objective.kl_coef), list[float]()
        if self.config.warm_up.steps and (pulled or not goes_on):
            about = self.config.warm_up
            losses = run_sharded_warmup(self.model, self.sync, self._tasks.train, about)
            # Its float32 masters are of the weights before that.
            self.optimizer = self._new_optimizer()
        reference = self._copied(learns=False) if pulled else None
        if self.config.objective.adv_estimator == "gae":
            self._critic = ShardedCritic(self._copied(learns=True), self.config)
        self._step = ShardedPolicyStep(
            self.model, self.sync, self.optimizer, self.config,
            longest=self._tasks.max_tokens * self.config.max_turns, reference=reference,
            critic=self._critic,
        )  # fmt: skip
        return losses

    def tensors(self) -> dict[str, StateTensor]:
        """Return what this rank has of all that a run needs to go on: the tensors themselves."""
        mine = make_sharded_state(self.sync, self.optimizer)
        return mine if self._critic is None else mine | self._critic.tensors()

    def broadcast_loaded(self) -> None:
        """Let all ranks have what was read from a checkpoint."""
        self.sync.zero_grads_and_unshard()
        if self._critic is not None:
            self._critic.broadcast_loaded()

    def step(self, step: int, groups: Sequence[RolloutGroup]) -> PolicyStepResult:
        """Train on groups, as all ranks do."""
        assert self._step is not None, "a run begins before it trains"
        learned = self._step(step, groups)
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return learned

    def _made(self, model: Model) -> ShardedPolicyModel:
        spread = make_sharded_model(model, self.mesh, seed=self.config.seed)
        spread.decoder.set_dynamic_shapes()
        return ShardedPolicyModel(spread)

    @torch.no_grad()
    def _copied(self, *, learns: bool) -> ShardedPolicyModel:
        """Return a copy of the model as it is now; ZeRO 3 cuts one that stays so as well."""
        mine = self.model.spread
        made = self._made(mine.decoder.model)
        made.spread.decoder.requires_grad_(learns)
        with self.sync.unsharded_parameters():
            weights = dict(mine.decoder.named_parameters())
            for name, value in made.spread.decoder.named_parameters():
                value.copy_(weights[name])
        if self.mesh.layout.zero == 3 and not learns:
            make_gradient_sync(made.spread)
        return made

    def _new_optimizer(self) -> Optimizer:
        settings = self.config
        return make_optimizer(
            self.sync.named_parameters(),
            self.mesh.layout,
            settings.optimizer,
            total_steps=settings.total_updates,
            seed=settings.seed,
        )
