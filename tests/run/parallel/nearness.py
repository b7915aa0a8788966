"""How far what ranks have is from what one device has, tensor by tensor, and how far it may be.

An error is the root mean square of the difference over a rank's part, relative to that of the whole
tensor on one device: of a gradient, or of how far a parameter moved in all steps. What is smaller
than `LEAST` of the average over all tensors is measured by that share of it: it is nought but for
rounding. Moves have no finer steps than the weights themselves: one of these, 2⁻²³ of a weight, is
taken off the difference (norms begin at 1 and move little). Losses and norms are compared as
numbers. Ranks measure; whoever started them judges.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.run.parallel.zero.bucket_shard import ShardRange

Kind = Literal["loss", "norm", "gradient", "update"]
LEAST = 1e-3
TOLERANCES: dict[Kind, float] = {"loss": 5e-7, "norm": 1e-5, "gradient": 1e-5, "update": 1e-5}
"""Of each number and each tensor. Sums in another order gave 1.2e-7 for losses, 3e-6 for norms (of
OLMo 2; others 1.2e-7), 2.6e-6 for gradients (of its query norms; others 5.1e-7), 2.2e-6 for moves.
"""


class Error(NamedTuple):
    """How far one number or one rank's part of a tensor is off."""

    kind: Kind
    name: str
    error: float


@dataclass(frozen=True)
class Measured:
    """What one rank found."""

    errors: list[Error]
    held: dict[Kind, dict[str, bytes]] = field(default_factory=dict)
    """Which elements of each whole gradient and parameter it compared, as packed bits."""


class Compared(NamedTuple):
    """A rank's part of a tensor."""

    found: Tensor | None
    """None where it has none and should."""
    lie: ShardRange


def differences(
    kind: Kind,
    parts: Mapping[str, Compared],
    wanted: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> Iterator[Error]:
    """Yield how far each part is off; of moves, with the weights that moved."""
    least = LEAST * _average(wanted.values())
    for name, (found, (holding, start, stop)) in parts.items():
        whole = wanted[name]
        expected = holding.select_local(whole).reshape(-1)[start:stop].double()
        if found is None:
            yield Error(kind, name, float("inf"))
        elif expected.numel():
            off = _size(found.detach().cpu().reshape(-1).double() - expected)
            step = 0.0 if weights is None else 2**-23 * _size(weights[name])
            beyond = 0.0 if off <= step else off - step  # what is no number stays so
            yield Error(kind, name, beyond / max(_size(whole), least))


def held(parts: Mapping[str, Compared]) -> dict[str, bytes]:
    """Return which elements of the whole tensors these are."""
    found = {}
    for name, (there, (holding, start, stop)) in parts.items():
        size = torch.Size(holding.global_shape)
        numbers = holding.select_local(torch.arange(size.numel()).view(size)).reshape(-1)[
            start:stop
        ]
        bits = np.zeros(size.numel(), dtype=np.bool_)
        bits[numbers.numpy()] = there is not None
        found[name] = np.packbits(bits).tobytes()
    return found


def faults(
    ranks: Sequence[Measured],
    wanted: Mapping[Kind, Mapping[str, Tensor]],
    tolerances: Mapping[Kind, float],
) -> Iterator[str]:
    """Say what is too far off, and what no rank has compared."""
    for rank, found in enumerate(ranks):
        for kind, name, error in found.errors:
            if not error <= tolerances[kind]:  # also what is no number
                yield f"rank {rank}: {kind} of {name} is off by {error:.2e}"
    for kind, tensors in wanted.items():
        for name, whole in tensors.items():
            seen = np.zeros(-(-whole.numel() // 8), dtype=np.uint8)
            for found in ranks:
                seen |= np.frombuffer(found.held[kind].get(name, bytes(len(seen))), dtype=np.uint8)
            missing = whole.numel() - int(np.unpackbits(seen).sum())
            if missing:
                yield f"{kind} of {name}: no rank has {missing} of {whole.numel()} elements"


def _size(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _average(tensors: Iterable[Tensor]) -> float:
    every = [each.double() for each in tensors]
    squares = sum(float(each.square().sum()) for each in every)
    return float((squares / max(1, sum(each.numel() for each in every))) ** 0.5)
