"""How far the tensors of a rank are from those of one device, and which operation is off first."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.build import build
from meshwright.run.nn.holding import Holding
from meshwright.run.parallel.context import order_of
from meshwright.run.parallel.verify.probe import backward_order, in_order
from meshwright.run.parallel.verify.step import Tensors
from meshwright.run.parallel.verify.tolerances import KINDS, Kind, limit
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import coordinate
from meshwright.spec.model import Model

LOSS, NORM = "loss", "norm of all gradients"
LEAST = 1e-4
"""A tensor with smaller numbers than this share of the average is measured by that share: what is
nought but for rounding has no error of its own."""


class Deviation(NamedTuple):
    """How far one tensor is off on one rank."""

    kind: Kind
    name: str
    rank: int
    error: float
    """From one device in float32."""
    alone: float
    """How far one device in the layout's format is off."""
    limit: float

    @property
    def exceeds(self) -> bool:
        """Whether it is too far; what is not a number is."""
        return not self.error <= self.limit


class First(NamedTuple):
    """The first operation that disagrees."""

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    worst: Deviation


class Baseline(NamedTuple):
    """The step on one device, whole: in float32, and in the format that is asked for."""

    wanted: Tensors
    alone: Tensors


def relative(found: Tensor, expected: Tensor, scale: float) -> float:
    """Return the root mean square of a difference over that of the tensor it is a part of."""
    if not expected.numel():
        return 0.0
    off = float((found.double() - expected.double()).square().mean().sqrt())
    return off / scale if scale else (0.0 if off == 0 else float("inf"))


def deviations(layout: Layout, rank: int, mine: Tensors, base: Baseline) -> list[Deviation]:
    """Compare everything a rank has with the same part of what one device has."""
    found = []
    place = coordinate(layout, rank)

    def add(kind: Kind, name: str, error: float, alone: float) -> None:
        found.append(Deviation(kind, name, rank, error, alone, limit(kind, layout, alone)))

    wanted, alone = base.wanted, base.alone
    for name, by_row in mine.activations.items():
        whole = joined(wanted.activations[name])
        scale = _mean(whole)
        off = relative(joined(alone.activations[name]), whole, scale)
        errors = [
            relative(part, _tokens(whole[row : row + len(part)], layout, place), scale)
            for row, part in by_row.items()
        ]
        add("activation", name, _largest(errors), off)
    add("activation", LOSS, abs(mine.loss / wanted.loss - 1), abs(alone.loss / wanted.loss - 1))
    least = LEAST * _average(wanted.gradients)
    for name, part in mine.gradients.items():
        whole, lie = wanted.gradients[name], mine.lies[name]
        scale = max(_mean(whole), least)
        expected = lie.holding.take(whole).reshape(-1)[lie.start : lie.stop]
        off = relative(alone.gradients[name], whole, scale)
        add("gradient", name, relative(part.reshape(-1), expected, scale), off)
    add("gradient", NORM, abs(mine.norm / wanted.norm - 1), abs(alone.norm / wanted.norm - 1))
    least = LEAST * _average(wanted.updates)
    for name, part in mine.updates.items():
        whole = wanted.updates[name]
        scale = max(_mean(whole), least)
        off = relative(alone.updates[name], whole, scale)
        add("update", name, relative(part, mine.holdings[name].take(whole), scale), off)
    return found


def joined(by_row: Mapping[int, Tensor]) -> Tensor:
    """Return all sequences of an operation."""
    return torch.cat([by_row[row] for row in sorted(by_row)])


def _tokens(whole: Tensor, layout: Layout, place: object) -> Tensor:
    """Return a rank's tokens of an operation's result."""
    tp, cp = getattr(place, "tp"), getattr(place, "cp")
    if layout.cp > 1:
        whole = order_of(layout, whole.shape[1]).take(whole, cp)
    return whole.chunk(layout.tp, 1)[tp] if layout.sequence_parallel else whole


def _mean(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _average(tensors: Mapping[str, Tensor]) -> float:
    squares = sum(float(each.double().square().sum()) for each in tensors.values())
    return float((squares / sum(each.numel() for each in tensors.values())) ** 0.5)


def _largest(errors: list[float]) -> float:
    return float("nan") if any(each != each for each in errors) else max(errors)


def in_execution_order(model: Model) -> dict[tuple[Kind, str], int]:
    """Number all tensors as a step meets them: forward, backward, update."""
    decoder = build(model)
    names = [name for name, _ in decoder.named_parameters()]
    order: list[tuple[Kind, str]] = [("activation", name) for name in (*in_order(decoder), LOSS)]
    order += [("gradient", name) for name in (*backward_order(names), NORM)]
    order += [("update", name) for name in names]
    return {each: number for number, each in enumerate(order)}


def first_off(found: list[Deviation], order: Mapping[tuple[Kind, str], int]) -> First | None:
    """Return the first operation in execution order that is too far off, with the ranks it is."""
    wrong = [each for each in found if each.exceeds]
    if not wrong:
        return None
    at = min(wrong, key=lambda each: order[each.kind, each.name])
    same = [each for each in wrong if (each.kind, each.name) == (at.kind, at.name)]
    worst = max(same, key=lambda each: (each.error != each.error, each.error))
    return First(at.kind, at.name, tuple(sorted({each.rank for each in same})), worst)


def worst_by_kind(found: list[Deviation]) -> Iterator[Deviation]:
    """Yield for each kind of tensor the one that is nearest to its limit or furthest beyond."""
    for kind in KINDS:
        some = [each for each in found if each.kind == kind]
        if some:
            yield max(some, key=lambda each: (each.error != each.error, each.error / each.limit))
