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

from meshwright.run.kernels.gradient_norm import GradientNorm
from meshwright.run.nn.fp8 import use_precision
from meshwright.run.nn.fp8_linear import RECIPES
from meshwright.run.nn.holding import Holding
from meshwright.run.parallel.context import cut_tokens
from meshwright.run.parallel.experts import sum_loads
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.runner import Runner
from meshwright.run.parallel.shards import Lie
from meshwright.run.parallel.spread import Spread, spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.parallel.sync import make_sync
from meshwright.run.parallel.verify.probe import Found, Probe, key_of
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

CLIP = 0.05
"""Length to which gradients are clipped: that of first gradients is near 1 or more."""
LEARNING_RATE = 0.1
BALANCE_RATE = 1e-3
"""By which a bias that balances experts moves (DeepSeek-V3)."""
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(RECIPES, torch.bfloat16),
}
"""Formats of the weights; fp8 products read them in bf16."""


def quiet_eps(parameters: int) -> float:
    """Return AdamW's `eps` for a model of so many parameters: a tenth of a clipped gradient."""
    return float(0.1 * CLIP / parameters**0.5)


class Scale(Protocol):
    """What losses are multiplied by before backward, in fp16."""

    @property
    def scale(self) -> Tensor:
        """The number itself."""


class Updates(Protocol):
    """The part of the trainer's optimizer that a step needs."""

    @property
    def loss_scale(self) -> Scale | None:
        """How losses are scaled; None where they are not."""

    def step(self, lr: float, *, norm: GradientNorm, gradients: Mapping[str, Tensor]) -> object:
        """Update all parameters."""


MakeUpdates = Callable[[Iterator[tuple[str, nn.Parameter]], Layout], Updates]
"""Makes the optimizer of a layout for some parameters, by name."""


@dataclass(frozen=True)
class Asked:
    """What is run, the same under all layouts."""

    model: Model
    sequences: int
    length: int
    seed: int
    make_updates: MakeUpdates

    def batch(self) -> Microbatch:
        """Return the sequences of the step."""
        made = torch.Generator().manual_seed(self.seed)
        shape = (self.sequences, self.length + 1)
        rows = torch.randint(0, self.model.vocab, shape, generator=made)
        return Microbatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


class Tensors(NamedTuple):
    """What a step leaves behind on one rank."""

    activations: Found
    gradients: dict[str, Tensor]
    """Complete ones, before clipping: the rank's part of each, flat where it lies flat."""
    lies: dict[str, Lie]
    """Which part of each gradient that is."""
    updates: dict[str, Tensor]
    """How far each parameter moved, as the rank holds it."""
    holdings: dict[str, Holding]
    """Which part of each parameter that is."""
    loss: float
    """Mean over the step's tokens of all ranks, in nats."""
    norm: float
    """Length of all gradients."""


Meddle = Callable[[Spread], None]
"""Changes what a rank has of the model; tests break things with it."""


def run_step(asked: Asked, layout: Layout, meddle: Meddle | None = None) -> Tensors:
    """Run the step on this rank of a layout, or on one device where it has one rank."""
    mesh = Mesh(layout)
    mine = spread(asked.model, mesh, dtype=DTYPES[layout.precision], seed=asked.seed)
    # A small model's products would all be left in bf16, as fp8 does not pay there.
    use_precision(mine.decoder, layout.precision, smallest=0.0)
    if meddle is not None:
        meddle(mine)
    sync = make_sync(mine)
    updates = asked.make_updates(sync.named_parameters(), layout)
    runner = Runner(mine)
    parts, rows = _mine(asked, mine)
    probe = Probe(mine.decoder, rows)
    _announce(mine, probe)
    with sync.gathered():
        before = _weights(mine.decoder)
    share = 1 / (asked.sequences * asked.length)
    scale = 1.0 if updates.loss_scale is None else float(updates.loss_scale.scale)
    sync.begin()
    sums = runner(parts, share * scale, sync.last)
    # Ranks of a tensor-parallel group have the same loss, those of earlier stages none.
    loss = mesh.world.all_reduce(sums.nats.reshape(1).double() * share) / layout.tp
    complete = sync.gradients()
    gradients = {name: each.float() / scale for name, each in complete.items()}
    norm = sync.norm()
    length = float(norm.norm) / scale
    updates.step(LEARNING_RATE, norm=norm, gradients=complete)
    sync.finish()
    sum_loads(mine.decoder, mesh)
    for part in mine.decoder.experts():
        part.update_balance(BALANCE_RATE)
    with sync.gathered():
        after = _weights(mine.decoder)
    moved = {name: after[name] - before[name] for name in before}
    lies = {name: sync.lies()[name] for name in gradients}
    return Tensors(probe.found, gradients, lies, moved, mine.holdings, float(loss), length)


def _mine(asked: Asked, mine: Spread) -> tuple[list[Microbatch], dict[bytes, int]]:
    """Return this rank's microbatches, and the first sequence of each by the tokens it sees."""
    layout, place = mine.mesh.layout, mine.mesh.place
    batch, parts, rows = asked.batch(), [], {}
    each = asked.sequences // layout.dp
    for first in range(place.dp * each, (place.dp + 1) * each, layout.microbatch):
        some = slice(first, first + layout.microbatch)
        part = Microbatch(batch.tokens_BT[some], batch.labels_BT[some])
        seen = part if layout.cp == 1 else cut_tokens(part, layout, place.cp)
        rows[key_of(seen.tokens_BT)] = first
        parts.append(part)
    return parts, rows


def _announce(mine: Spread, probe: Probe) -> None:
    """Tell a probe whose tokens run through which chunk."""
    stage, forward = mine.stage, mine.stage.forward

    def told(position: int, microbatch: Microbatch, x_BTD: Tensor | None) -> object:
        embeds = stage.chunks[position].has_embedding
        probe.begin(microbatch.tokens_BT, embeds=embeds)
        return forward(position, microbatch, x_BTD)

    stage.forward = told  # type: ignore[method-assign,assignment]


def _weights(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().float().clone() for name, each in decoder.named_parameters()}
