"""`Critic`: a model of the policy's shape that learns what answers will come to, for PPO.

It begins as a copy of the policy with one row in place of the words, and is trained beside it by an
optimizer of its own: nothing of it reaches the policy but the values.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder import Decoder
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.run.train.run_folder.state_tensors import StateTensor, make_unsharded_state
from meshwright.spec.layout import Layout

UNUSED_PARAMETERS = ("head.", "multi_token.")
"""Parts of a decoder that say words, and no values."""


class Critic:
    """Says of every token what the answer will come to, as far as it is written before it."""

    def __init__(
        self,
        decoder: Decoder,
        layout: Layout,
        settings: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
    ) -> None:
        """Begin with a copy of a policy; all values are 0 at first."""
        self._decoder = copy.deepcopy(decoder)
        weight = decoder.embedding.weight
        self._row = nn.Parameter(torch.zeros(decoder.model.hidden, device=weight.device))
        self._shift = nn.Parameter(torch.zeros(1, device=weight.device))
        self.optimizer: Optimizer = make_optimizer(
            self.named_parameters(), layout, settings, total_steps=total_steps, seed=seed
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through what is trained."""
        for name, parameter in self._decoder.named_parameters():
            if not name.startswith(UNUSED_PARAMETERS):
                yield name, parameter
        yield "value.weight", self._row
        yield "value.bias", self._shift

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Return the value of the state before each token that follows, float32 [B, T]."""
        return self._decoder.compute_hidden_states(tokens_BT).float() @ self._row + self._shift

    def iter_state_tensors(self) -> Iterator[Tensor]:
        """Yield all of it that training needs, and nothing else does."""
        yield from self._decoder.parameters()
        yield from (self._row, self._shift)
        yield from self.optimizer.iter_state_tensors()

    def step(self, update: int) -> Tensor:
        """Learn from the gradients that backward left, and return their norm."""
        norm = self.optimizer.step(self.optimizer.learning_rate(update)).grad_norm
        self.optimizer.zero_grad()
        return norm

    def tensors(self) -> dict[str, StateTensor]:
        """Return what a run needs to go on: the tensors themselves."""
        learnt = {f"model.{name}": each.detach() for name, each in self.named_parameters()}
        found = make_unsharded_state(learnt, self.optimizer)
        return {f"critic.{name}": each for name, each in found.items()}
