"""One step of a small model, on one device or on this rank of a layout, with all its tensors.

The step is the trainer's: passes, reduction of gradients, norm, clipping, AdamW, weights back to
every rank. First weights depend on names and places alone, and sequences on a seed.

AdamW's first update is nearly the gradient's sign, which rounding flips wherever a gradient is
nearly nought. Here its `eps` is a tenth of what gradients are on average, so that updates show how
far gradients are off; the learning rate is large, so that 16-bit weights can show the update.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.run.kernels.optimizer.grad_norm import GradNorm
from meshwright.run.nn.linear.fp8_conversion import apply_precision
from meshwright.run.nn.linear.fp8_linear import RECIPES
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.context_parallel.context_parallel import split_tokens
from meshwright.run.parallel.expert_parallel.token_dispatcher import all_reduce_expert_load
from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel, shard_model
from meshwright.run.parallel.verify.activation_probe import (
    ActivationProbe,
    Activations,
    make_microbatch_key,
)
from meshwright.run.parallel.zero.bucket_shard import ShardRange
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

CLIP_GRAD = 0.05
"""Length to which gradients are clipped: that of first gradients is near 1 or more."""
LEARNING_RATE = 0.1
EXPERT_BIAS_UPDATE_RATE = 1e-3
"""By which a bias that balances experts moves (DeepSeek-V3)."""
TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(RECIPES, torch.bfloat16),
}
"""Formats of the weights; fp8 products read them in bf16."""


def compute_verify_eps(parameters: int) -> float:
    """Return AdamW's `eps` for a model of so many parameters: a tenth of a clipped gradient."""
    return float(0.1 * CLIP_GRAD / parameters**0.5)


class LossScaler(Protocol):
    """What losses are multiplied by before backward, in fp16."""

    @property
    def scale(self) -> Tensor:
        """The number itself."""


class OptimizerStep(Protocol):
    """The part of the trainer's optimizer that a step needs."""

    @property
    def grad_scaler(self) -> LossScaler | None:
        """How losses are scaled; None where they are not."""

    def step(self, lr: float, *, norm: GradNorm, gradients: Mapping[str, Tensor]) -> object:
        """Update all parameters."""


OptimizerStepFactory = Callable[[Iterator[tuple[str, nn.Parameter]], Layout], OptimizerStep]
"""Makes the optimizer of a layout for some parameters, by name."""


@dataclass(frozen=True)
class VerifyCase:
    """What is run, the same under all layouts."""

    model: Model
    global_batch: int
    sequence_length: int
    seed: int
    make_optimizer_step: OptimizerStepFactory

    def make_batch(self) -> Microbatch:
        """Return the sequences of the step."""
        made = torch.Generator().manual_seed(self.seed)
        shape = (self.global_batch, self.sequence_length + 1)
        rows = torch.randint(0, self.model.vocab, shape, generator=made)
        return Microbatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


class StepTensors(NamedTuple):
    """What a step leaves behind on one rank."""

    activations: Activations
    gradients: dict[str, Tensor]
    """Complete ones, before clipping: the rank's part of each, flat where it lies flat."""
    shard_ranges: dict[str, ShardRange]
    """Which part of each gradient that is."""
    updates: dict[str, Tensor]
    """How far each parameter moved, as the rank holds it."""
    shard_specs: dict[str, ShardSpec]
    """Which part of each parameter that is."""
    loss: float
    """Mean over the step's tokens of all ranks, in nats."""
    grad_norm: float
    """Length of all gradients."""


FaultInjector = Callable[[ShardedModel], None]
"""Changes what a rank has of the model; tests break things with it."""


def run_verify_step(
    asked: VerifyCase, layout: Layout, inject_fault: FaultInjector | None = None
) -> StepTensors:
    """Run the step on this rank of a layout, or on one device where it has one rank."""
    mesh = Mesh(layout)
    mine = shard_model(asked.model, mesh, dtype=TORCH_DTYPES[layout.precision], seed=asked.seed)
    # A small model's products would all be left in bf16, as fp8 does not pay there.
    apply_precision(mine.decoder, layout.precision, smallest=0.0)
    if inject_fault is not None:
        inject_fault(mine)
    sync = make_gradient_sync(mine)
    updates = asked.make_optimizer_step(sync.named_parameters(), layout)
    runner = ForwardBackwardRunner(mine)
    parts, rows = _mine(asked, mine)
    probe = ActivationProbe(mine.decoder, rows)
    _announce(mine, probe)
    with sync.unsharded_parameters():
        before = _weights(mine.decoder)
    share = 1 / (asked.global_batch * asked.sequence_length)
    scale = 1.0 if updates.grad_scaler is None else float(updates.grad_scaler.scale)
    sync.begin_step()
    sums = runner(parts, share * scale, sync.mark_last_backward)
    # Ranks of a tensor-parallel group have the same loss, those of earlier stages none.
    loss = mesh.world.all_reduce(sums.loss_sum.reshape(1).double() * share) / layout.tp
    complete = sync.reduced_gradients()
    gradients = {name: each.float() / scale for name, each in complete.items()}
    norm = sync.grad_norm()
    length = float(norm.norm) / scale
    updates.step(LEARNING_RATE, norm=norm, gradients=complete)
    sync.zero_grads_and_unshard()
    all_reduce_expert_load(mine.decoder, mesh)
    for part in mine.decoder.iter_moe_layers():
        part.update_expert_bias(EXPERT_BIAS_UPDATE_RATE)
    with sync.unsharded_parameters():
        after = _weights(mine.decoder)
    moved = {name: after[name] - before[name] for name in before}
    lies = {name: sync.shard_ranges()[name] for name in gradients}
    return StepTensors(
        probe.activations, gradients, lies, moved, mine.shard_specs, float(loss), length
    )


def _mine(asked: VerifyCase, mine: ShardedModel) -> tuple[list[Microbatch], dict[bytes, int]]:
    """Return this rank's microbatches, and the first sequence of each by the tokens it sees."""
    layout, place = mine.mesh.layout, mine.mesh.coordinate
    batch, parts, rows = asked.make_batch(), [], {}
    each = asked.global_batch // layout.dp
    for first in range(place.dp * each, (place.dp + 1) * each, layout.microbatch):
        some = slice(first, first + layout.microbatch)
        part = Microbatch(batch.tokens_BT[some], batch.labels_BT[some])
        seen = part if layout.cp == 1 else split_tokens(part, layout, place.cp)
        rows[make_microbatch_key(seen.tokens_BT)] = first
        parts.append(part)
    return parts, rows


def _announce(mine: ShardedModel, probe: ActivationProbe) -> None:
    """Tell a probe whose tokens run through which chunk."""
    stage, forward = mine.pipeline_stage, mine.pipeline_stage.forward_one_chunk

    def told(position: int, microbatch: Microbatch, x_BTD: Tensor | None) -> object:
        embeds = stage.chunks[position].has_embedding
        probe.start(microbatch.tokens_BT, embeds=embeds)
        return forward(position, microbatch, x_BTD)

    stage.forward_one_chunk = told  # type: ignore[method-assign,assignment]


def _weights(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().float().clone() for name, each in decoder.named_parameters()}
