"""`ShardedCritic`: the critic of PPO, where ranks hold it together as they hold the policy.

It lies as the policy does, with a row of values on the ranks that have the model's end.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.posttrain.objectives import loss_weights
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.distributed.sharded_model import ShardedPolicyModel
from meshwright.run.posttrain.rl.trainer.critic import UNUSED_PARAMETERS
from meshwright.run.posttrain.rl.trainer.microbatch_loss import compute_value_loss
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch
from meshwright.run.posttrain.rl.trainer.step_preparation import TrainingMicrobatch
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.run_folder.state_tensors import StateTensor, make_sharded_state

_ROW, _SHIFT = "value.weight", "value.bias"


class ShardedCritic:
    """This rank's part of a model that says what answers will come to."""

    def __init__(self, model: ShardedPolicyModel, settings: RLConfig) -> None:
        """Begin with a copy of the policy; all values are 0 at first."""
        self._model, self._settings, spread = model, settings, model.spread
        decoder, layout, device = spread.decoder, spread.mesh.layout, spread.mesh.device
        self._row = nn.Parameter(torch.zeros(decoder.model.hidden, device=device))
        self._shift = nn.Parameter(torch.zeros(1, device=device))
        learning: dict[str, nn.Parameter] = {}
        for name, each in decoder.named_parameters():
            # What says words gets no gradient.
            each.requires_grad_(not name.startswith(UNUSED_PARAMETERS))
            if each.requires_grad:
                learning[name] = each
        held, used_with = {}, {}
        if hasattr(decoder, "head"):
            mirrored = "mirror" if layout.schedule == "dualpipe" else ""
            for name, one in ((_ROW, self._row), (_SHIFT, self._shift)):
                # Every rank reads the vectors of all tokens, so that its gradient is whole.
                held[name] = replace(
                    ShardSpec.unsharded(tuple(one.shape)), shared_stage_group=mirrored
                )
                learning[name], used_with[name] = one, "head.weight"
        self._sync = make_gradient_sync(spread.with_trainable(learning, held, used_with))
        self._optimizer = make_optimizer(
            self._sync.named_parameters(),
            layout,
            settings.critic_optimizer,
            total_steps=settings.total_updates,
            seed=settings.seed,
        )

    def compute_values(
        self, every: Sequence[RolloutMicrobatch], owners: Sequence[int]
    ) -> list[Tensor]:
        """Return the values before each token of all microbatches."""
        return self._model.map_outputs(every, owners, lambda x_BTD, _: self._read(x_BTD))

    def train_step(
        self, update: int, parts: Sequence[TrainingMicrobatch], of: loss_weights.StepTotals
    ) -> float:
        """Learn from the microbatches of this replica; return the loss that this rank tells of."""
        clip, seen = self._settings.critic.clip, 0.0

        def judges(x_BTD: Tensor, part: TrainingMicrobatch) -> Tensor:
            nonlocal seen
            loss = compute_value_loss(part, self._read(x_BTD), of=of, clip=clip)
            if self._model.reports_metrics:
                seen += float(loss.detach())
            return loss

        self._sync.begin_step()
        self._model.forward_backward(parts, judges, self._sync.mark_last_backward)
        gradients = self._sync.reduced_gradients()
        lr = self._optimizer.learning_rate(update)
        self._optimizer.step(lr, norm=self._sync.grad_norm(), gradients=gradients)
        self._sync.zero_grads_and_unshard()
        return seen

    def tensors(self) -> dict[str, StateTensor]:
        """Return what this rank has of all that a run needs to go on."""
        found = make_sharded_state(self._sync, self._optimizer)
        return {f"critic.{name}": each for name, each in found.items()}

    def broadcast_loaded(self) -> None:
        """Let all ranks have what was read from a checkpoint."""
        self._sync.zero_grads_and_unshard()

    def _read(self, x_BTD: Tensor) -> Tensor:
        decoder = self._model.spread.decoder
        # The head's part of a step begins and ends here, as where words are said.
        return decoder.with_head_weight(lambda: x_BTD.float() @ self._row + self._shift)
