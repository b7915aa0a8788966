"""What gradients need before an update: sums over the ranks that have parts of them, and one norm.

A parameter's gradient is a sum over tokens, so ranks that saw other tokens add theirs up (`dp-cp`,
for experts `expert_dp`); within a stage, ranks that did a share of the work do (`Holding.partial`);
and the two stages that share a tied embedding do.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwright.run.kernels.gradient_norm import GradientNorm, gradient_norm
from meshwright.run.nn.holding import Holding
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.spread import Spread

TIED = "embedding.weight"
"""What the first and the last stage both hold where the head is tied to it."""


def sum_parts(spread: Spread) -> None:
    """Add up what the ranks of one stage, and of the two ends, have parts of; fills in noughts."""
    mesh, decoder = spread.mesh, spread.decoder
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        holding, grad = spread.holdings[name], parameter.grad
        if holding.partial:
            mesh[holding.partial].all_reduce(grad)
        if holding.twin_rows is not None:
            rows = holding.twin_rows
            shared = grad[rows.start : rows.stop].contiguous()
            mesh.neighbours("tp", holding.twins).all_reduce(shared)
            grad[rows.start : rows.stop] = shared
        if name == TIED and decoder.model.tied:
            mesh["embedding"].all_reduce(grad)


def sum_replicas(spread: Spread) -> None:
    """Add up the gradients of ranks that saw other tokens, one parameter at a time."""
    for name, parameter in spread.decoder.named_parameters():
        if parameter.grad is not None:
            axes = "expert_dp" if spread.holdings[name].expert else "dp-cp"
            spread.mesh[axes].all_reduce(parameter.grad)


def global_norm(spread: Spread, gradients: Mapping[str, Tensor]) -> GradientNorm:
    """Return the norm of the whole model's gradients, each number counted once."""
    by_weight: dict[float, list[Tensor]] = {}
    for name, grad in gradients.items():
        for part, copies in _counted(spread.mesh, spread.holdings[name], name, grad):
            by_weight.setdefault(1 / copies, []).append(part)
    device = spread.mesh.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for weight, parts in by_weight.items():
        found = gradient_norm(parts)
        total[0] += found.norm.double().square() * weight
        total[1] += found.nonfinite.double()
    spread.mesh.world.all_reduce(total)
    return GradientNorm(total[0].sqrt().float(), total[1].long())


def _counted(mesh: Mesh, holding: Holding, name: str, grad: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the parts of a gradient, and how many ranks have the same numbers in theirs."""
    layout = mesh.layout
    if holding.expert:
        sliced = holding.shape[1:] != holding.whole[1:]
        yield grad, layout.expert_dp * (1 if sliced else layout.experts_tp)
        return
    copies = layout.dp * layout.cp
    if holding.is_whole:
        copies *= layout.tp
    if name == TIED:
        copies *= mesh["embedding"].size
    if holding.twin_rows is None:
        yield grad, copies
        return
    start, stop = holding.twin_rows
    yield grad[start:stop], copies * holding.twins
    yield from ((part, copies) for part in (grad[:start], grad[stop:]) if len(part))
