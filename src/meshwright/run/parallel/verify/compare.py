"""How far the tensors of a rank are from those of one device, and which operation is off first."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.build import build
from meshwright.run.parallel.context import order_of
from meshwright.run.parallel.verify.probe import backward_order, in_order
from meshwright.run.parallel.verify.step import Tensors
from meshwright.run.parallel.verify.tolerances import KINDS, Circumstances, Kind, limit
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import Coordinate, coordinate
from meshwright.spec.model import Experts, Model

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
    """How far one device in the layout's format is off, in the whole tensor or in this part."""
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


def deviations(
    model: Model, layout: Layout, rank: int, mine: Tensors, base: Baseline
) -> list[Deviation]:
    """Compare everything a rank has with the same part of what one device has."""
    found = []
    place = coordinate(layout, rank)
    wanted, alone = base.wanted, base.alone
    tokens = joined(wanted.activations["embedding"]).shape[:2].numel()

    def add(kind: Kind, name: str, error: float, off: float) -> None:
        rows = rows_of(model, kind, name, tokens)
        most = limit(kind, layout, off, Circumstances(tokens, rows))
        found.append(Deviation(kind, name, rank, error, off, most))

    for name, by_row in mine.activations.items():
        whole, other = joined(wanted.activations[name]), joined(alone.activations[name])
        scale = _mean(whole)
        expected, without = (_seen(each, by_row, layout, place) for each in (whole, other))
        off = max(relative(other, whole, scale), relative(without, expected, scale))
        add("activation", name, relative(joined(by_row), expected, scale), off)
    add("activation", LOSS, abs(mine.loss / wanted.loss - 1), abs(alone.loss / wanted.loss - 1))
    least = LEAST * _average(wanted.gradients)
    for name, part in mine.gradients.items():
        whole, other, lie = wanted.gradients[name], alone.gradients[name], mine.lies[name]
        scale = max(_mean(whole), least)
        expected, without = (
            lie.holding.take(each).reshape(-1)[lie.start : lie.stop] for each in (whole, other)
        )
        off = max(relative(other, whole, scale), relative(without, expected, scale))
        add("gradient", name, relative(part.reshape(-1), expected, scale), off)
    add("gradient", NORM, abs(mine.norm / wanted.norm - 1), abs(alone.norm / wanted.norm - 1))
    least = LEAST * _average(wanted.updates)
    for name, part in mine.updates.items():
        whole, other = wanted.updates[name], alone.updates[name]
        scale = max(_mean(whole), least)
        expected, without = (mine.holdings[name].take(each) for each in (whole, other))
        off = max(relative(other, whole, scale), relative(without, expected, scale))
        add("update", name, relative(part, expected, scale), off)
    return found


def rows_of(model: Model, kind: Kind, name: str, tokens: int) -> float | None:
    """Return how many tokens an expert gets, for tensors that depend on where tokens are sent.

    All gradients do, and operations from the first routed layer on.
    """
    experts = model.experts
    if experts is None:
        return None
    blocks = model.layer_blocks()
    routed = [number for number, one in enumerate(blocks) if isinstance(one.mlp, Experts)]
    if kind == "activation" and routed:
        before = ["embedding"]
        for number in range(routed[0] + 1):
            before += [f"layers.{number}.mixer"]
            before += [] if number == routed[0] else [f"layers.{number}.mlp"]
        if name in before:
            return None
    return tokens * experts.top_k / experts.count


def joined(by_row: Mapping[int, Tensor]) -> Tensor:
    """Return all sequences of an operation."""
    return torch.cat([by_row[row] for row in sorted(by_row)])


def _seen(whole: Tensor, by_row: Mapping[int, Tensor], layout: Layout, place: Coordinate) -> Tensor:
    """Return a rank's sequences of an operation's result, and its tokens of these."""
    found = torch.cat([whole[row : row + len(by_row[row])] for row in sorted(by_row)])
    if layout.cp > 1:
        found = order_of(layout, found.shape[1]).take(found, place.cp)
    return found.chunk(layout.tp, 1)[place.tp] if layout.sequence_parallel else found


def _mean(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _average(tensors: Mapping[str, Tensor]) -> float:
    squares = sum(float(each.double().square().sum()) for each in tensors.values())
    return float((squares / sum(each.numel() for each in tensors.values())) ** 0.5)


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
    worst = max(same, key=lambda each: (math.isnan(each.error), each.error))
    return First(at.kind, at.name, tuple(sorted({each.rank for each in same})), worst)


def worst_by_kind(found: list[Deviation]) -> Iterator[Deviation]:
    """Yield for each kind of tensor the one that is nearest to its limit or furthest beyond."""
    for kind in KINDS:
        some = [each for each in found if each.kind == kind]
        if some:
            yield max(some, key=lambda each: (math.isnan(each.error), each.error / each.limit))
