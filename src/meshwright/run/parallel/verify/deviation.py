"""How far the tensors of a rank are from those of one device, and which operation is off first."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.parallel.context_parallel.context_parallel import make_token_partition
from meshwright.run.parallel.verify.activation_probe import list_backward_order, list_operations
from meshwright.run.parallel.verify.tolerances import (
    TENSOR_KINDS,
    TensorKind,
    ToleranceContext,
    compute_error_limit,
)
from meshwright.run.parallel.verify.verification_step import StepTensors
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import RankCoordinate, get_coordinate
from meshwright.spec.model import Model, MoESpec

LOSS, GRAD_NORM = "loss", "norm of all gradients"
MIN_TENSOR_SCALE = 1e-4
"""A tensor with smaller numbers than this share of the average is measured by that share: what is
nought but for rounding has no error of its own."""


class Deviation(NamedTuple):
    """How far one tensor is off on one rank."""

    kind: TensorKind
    name: str
    rank: int
    error: float
    """From one device in float32."""
    baseline_error: float
    """How far one device in the layout's format is off, in the whole tensor or in this part."""
    limit: float

    @property
    def exceeds_limit(self) -> bool:
        """Whether it is too far; what is not a number is."""
        return not self.error <= self.limit


class FirstDivergence(NamedTuple):
    """The first operation that disagrees."""

    kind: TensorKind
    name: str
    ranks: tuple[int, ...]
    worst: Deviation


class BaselineStep(NamedTuple):
    """The step on one device, whole: in float32, and in the format that is asked for."""

    reference: StepTensors
    same_precision: StepTensors


def compute_relative_rms(found: Tensor, expected: Tensor, scale: float) -> float:
    """Return the root mean square of a difference over that of the tensor it is a part of."""
    if not expected.numel():
        return 0.0
    off = float((found.double() - expected.double()).square().mean().sqrt())
    return off / scale if scale else (0.0 if off == 0 else float("inf"))


def list_deviations(
    model: Model, layout: Layout, rank: int, mine: StepTensors, base: BaselineStep
) -> list[Deviation]:
    """Compare everything a rank has with the same part of what one device has."""
    found = []
    place = get_coordinate(layout, rank)
    wanted, alone = base.reference, base.same_precision
    tokens = join_sequences(wanted.activations["embedding"]).shape[:2].numel()

    def add(kind: TensorKind, name: str, error: float, off: float) -> None:
        rows = count_expert_rows(model, kind, name, tokens)
        most = compute_error_limit(kind, layout, off, ToleranceContext(tokens, rows))
        found.append(Deviation(kind, name, rank, error, off, most))

    for name, by_row in mine.activations.items():
        whole, other = (
            join_sequences(wanted.activations[name]),
            join_sequences(alone.activations[name]),
        )
        scale = _mean(whole)
        expected, without = (_seen(each, by_row, layout, place) for each in (whole, other))
        off = max(
            compute_relative_rms(other, whole, scale),
            compute_relative_rms(without, expected, scale),
        )
        add("activation", name, compute_relative_rms(join_sequences(by_row), expected, scale), off)
    add("activation", LOSS, abs(mine.loss / wanted.loss - 1), abs(alone.loss / wanted.loss - 1))
    least = MIN_TENSOR_SCALE * _average(wanted.gradients)
    for name, part in mine.gradients.items():
        whole, other, lie = wanted.gradients[name], alone.gradients[name], mine.shard_ranges[name]
        scale = max(_mean(whole), least)
        expected, without = (
            lie.shard_spec.select_local(each).reshape(-1)[lie.start : lie.stop]
            for each in (whole, other)
        )
        off = max(
            compute_relative_rms(other, whole, scale),
            compute_relative_rms(without, expected, scale),
        )
        add("gradient", name, compute_relative_rms(part.reshape(-1), expected, scale), off)
    add(
        "gradient",
        GRAD_NORM,
        abs(mine.grad_norm / wanted.grad_norm - 1),
        abs(alone.grad_norm / wanted.grad_norm - 1),
    )
    least = MIN_TENSOR_SCALE * _average(wanted.updates)
    for name, part in mine.updates.items():
        whole, other = wanted.updates[name], alone.updates[name]
        scale = max(_mean(whole), least)
        expected, without = (mine.shard_specs[name].select_local(each) for each in (whole, other))
        off = max(
            compute_relative_rms(other, whole, scale),
            compute_relative_rms(without, expected, scale),
        )
        add("update", name, compute_relative_rms(part, expected, scale), off)
    return found


def count_expert_rows(model: Model, kind: TensorKind, name: str, tokens: int) -> float | None:
    """Return how many tokens an expert gets, for tensors that depend on where tokens are sent.

    All gradients do, and operations from the first routed layer on.
    """
    experts = model.moe
    if experts is None:
        return None
    blocks = model.layer_blocks()
    routed = [number for number, one in enumerate(blocks) if isinstance(one.mlp, MoESpec)]
    if kind == "activation" and routed:
        before = ["embedding"]
        for number in range(routed[0] + 1):
            before += [f"layers.{number}.mixer"]
            before += [] if number == routed[0] else [f"layers.{number}.mlp"]
        if name in before:
            return None
    return tokens * experts.top_k / experts.count


def join_sequences(by_row: Mapping[int, Tensor]) -> Tensor:
    """Return all sequences of an operation."""
    return torch.cat([by_row[row] for row in sorted(by_row)])


def _seen(
    whole: Tensor, by_row: Mapping[int, Tensor], layout: Layout, place: RankCoordinate
) -> Tensor:
    """Return a rank's sequences of an operation's result, and its tokens of these."""
    found = torch.cat([whole[row : row + len(by_row[row])] for row in sorted(by_row)])
    if layout.cp > 1:
        found = make_token_partition(layout, found.shape[1]).select_local_tokens(found, place.cp)
    return found.chunk(layout.tp, 1)[place.tp] if layout.sequence_parallel else found


def _mean(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _average(tensors: Mapping[str, Tensor]) -> float:
    squares = sum(float(each.double().square().sum()) for each in tensors.values())
    return float((squares / sum(each.numel() for each in tensors.values())) ** 0.5)


def get_execution_order(model: Model) -> dict[tuple[TensorKind, str], int]:
    """Number all tensors as a step meets them: forward, backward, update."""
    decoder = build_decoder(model)
    names = [name for name, _ in decoder.named_parameters()]
    order: list[tuple[TensorKind, str]] = [
        ("activation", name) for name in (*list_operations(decoder), LOSS)
    ]
    order += [("gradient", name) for name in (*list_backward_order(names), GRAD_NORM)]
    order += [("update", name) for name in names]
    return {each: number for number, each in enumerate(order)}


def find_first_divergence(
    found: list[Deviation], order: Mapping[tuple[TensorKind, str], int]
) -> FirstDivergence | None:
    """Return the first operation in execution order that is too far off, with the ranks it is."""
    wrong = [each for each in found if each.exceeds_limit]
    if not wrong:
        return None
    at = min(wrong, key=lambda each: order[each.kind, each.name])
    same = [each for each in wrong if (each.kind, each.name) == (at.kind, at.name)]
    worst = max(same, key=lambda each: (math.isnan(each.error), each.error))
    return FirstDivergence(at.kind, at.name, tuple(sorted({each.rank for each in same})), worst)


def find_worst_by_kind(found: list[Deviation]) -> Iterator[Deviation]:
    """Yield for each kind of tensor the one that is nearest to its limit or furthest beyond."""
    for kind in TENSOR_KINDS:
        some = [each for each in found if each.kind == kind]
        if some:
            yield max(some, key=lambda each: (math.isnan(each.error), each.error / each.limit))
