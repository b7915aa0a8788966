"""What gradients need before an update: sums over the ranks that have parts of them, and one norm.

A parameter's gradient is a sum over tokens, so ranks that saw other tokens add theirs up (`dp-cp`,
for experts `expert_dp`); within a stage, ranks that did a share of the work do (`Holding.partial`);
and stages that hold the same do (the two ends a tied embedding). A bucket goes through these one
after the other; each is begun, and waited for only when the next bucket has begun or all are
wanted.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.run.kernels.gradient_norm import GradientNorm, gradient_norm
from meshwright.run.kernels.language import on_triton
from meshwright.run.kernels.tensor_list import TensorList
from meshwright.run.nn.holding import Holding
from meshwright.run.parallel.buckets import Bucket
from meshwright.run.parallel.group import Group, Pending
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.shards import Lie
from meshwright.run.parallel.spread import Spread


class Reduction:
    """The way of one bucket's gradients from the parameters to complete ones."""

    def __init__(
        self,
        bucket: Bucket,
        spread: Spread,
        parameters: Mapping[str, nn.Parameter],
        *,
        shards: Group,
        copies: Group,
        dtype: torch.dtype,
        adds_up: bool,
    ) -> None:
        """Gradients are cut over `shards` and the same over `copies`; `dtype` is theirs.

        With `adds_up` several reductions of a step are added (ZeRO 2), and `add_copies` is called
        after the last.
        """
        self.bucket, self.shards, self.copies = bucket, shards, copies
        self.dtype, self.adds_up = dtype, adds_up
        self.mesh, self.holdings = spread.mesh, spread.holdings
        self.parameters = {each.name: parameters[each.name] for each in bucket.members}
        self.own: Tensor | None = None
        """This rank's part of the complete gradients; all of them where nothing is cut."""
        # Not in `steps`: a group that forms within a backward pass would hold it up.
        self._twins = [
            (self.mesh.neighbours("tp", degree), places)
            for degree, places in _twins(bucket, spread).items()
        ]

    @property
    def groups(self) -> list[Group]:
        """Everybody it exchanges with."""
        stages = [self.mesh[self.bucket.stages]] if self.bucket.stages else []
        inner = [self.mesh[each.group] for each in self.bucket.partials]
        return [*inner, *(group for group, _ in self._twins), *stages, self.shards, self.copies]

    @property
    def idle(self) -> bool:
        """Whether gradients are complete as backward leaves them."""
        partial = any(self.mesh[each.group].size > 1 for each in self.bucket.partials)
        alone = self.shards.size == 1 and self.copies.size == 1
        return alone and not (partial or self.bucket.stages or self._twins)

    def steps(self) -> Iterator[bool]:
        """Reduce; pauses while something is under way, with whether more than waiting follows."""
        flat = self._collected()
        inner = [
            self.mesh[group].start_all_reduce(flat[start:stop])
            for group, start, stop in self.bucket.partials
        ]
        shared = [_SharedRows(group, flat, places) for group, places in self._twins]
        if inner or shared:
            yield True
            for pending in inner:
                pending.wait()
            for rows in shared:
                rows.put_back()
        if self.bucket.stages:
            joined = self.mesh[self.bucket.stages].start_all_reduce(flat)
            yield True
            joined.wait()
        if self.shards.size > 1:
            scattered = self.shards.start_reduce_scatter(flat)
            del flat
            yield self.adds_up or self.copies.size > 1
            own = scattered.wait()
            self.own = own if self.own is None else self.own.add_(own)
            if self.adds_up or self.copies.size == 1:
                return
            flat = self.own
        reduced = self.copies.start_all_reduce(flat)
        yield False
        self.own = reduced.wait()

    def start_adding_copies(self) -> Pending:
        """Begin to add up a step's sum over the ranks that have the same part."""
        assert self.own is not None, "the bucket was reduced"
        return self.copies.start_all_reduce(self.own)

    def _collected(self) -> Tensor:
        """Take the gradients from the parameters, side by side; noughts for what has none."""
        device = self.mesh.device
        flat = torch.zeros(self.bucket.elements, dtype=self.dtype, device=device)
        places, given = [], []
        for member in self.bucket.members:
            parameter = self.parameters[member.name]
            if parameter.grad is not None:
                places.append(flat[member.start : member.stop])
                given.append(parameter.grad.reshape(-1))
                parameter.grad = None
        if given:
            torch._foreach_copy_(places, given)
        return flat


class _SharedRows:
    """Rows of several parameters of a bucket that neighbours hold too, on their way to a sum."""

    def __init__(self, group: Group, flat: Tensor, places: list[tuple[int, int]]) -> None:
        self._slices = [flat[start:stop] for start, stop in places]
        self._pending = group.start_all_reduce(torch.cat(self._slices))

    def put_back(self) -> None:
        """Wait for the sum and write it to where the rows came from."""
        summed = self._pending.wait().split_with_sizes([len(each) for each in self._slices])
        for place, rows in zip(self._slices, summed, strict=True):
            place.copy_(rows)


def _twins(bucket: Bucket, spread: Spread) -> dict[int, list[tuple[int, int]]]:
    """Return the places of rows that neighbours hold too, by how many do."""
    found: dict[int, list[tuple[int, int]]] = {}
    for member in bucket.members:
        holding = spread.holdings[member.name]
        run = _twin_run(holding)
        if run is not None:
            place = (member.start + run[0], member.start + run[1])
            found.setdefault(holding.twins, []).append(place)
    return found


def _twin_run(holding: Holding) -> tuple[int, int] | None:
    """Return the run of a flattened parameter's elements that neighbours hold too."""
    if holding.twin_rows is None or holding.twins == 1:
        return None
    row = 1
    for size in holding.shape[1:]:
        row *= size
    return holding.twin_rows.start * row, holding.twin_rows.stop * row


class Held(NamedTuple):
    """A gradient as this rank has it."""

    gradient: Tensor
    lie: Lie
    copies: int
    """Ranks of other replicas and of other stages that have the same numbers."""


class GlobalNorm:
    """Measures the whole model's gradients, each number once, with one sum over all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lists: dict[int, TensorList] = {}
        """Tables of the last step's tensors, without these: mostly they lie there again."""

    def __call__(self, gradients: Iterable[Held]) -> GradientNorm:
        """Return the norm, the same bits on every rank."""
        by_copies: dict[int, list[Tensor]] = {}
        for held in gradients:
            for part, copies in _counted(self._mesh, held):
                by_copies.setdefault(copies, []).append(part)
        total = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        for copies, parts in by_copies.items():
            found = gradient_norm(self._listed(copies, parts))
            total[0] += found.norm.double().square() / copies
            total[1] += found.nonfinite.double() / copies
        self._mesh.world.all_reduce(total)
        return GradientNorm(total[0].sqrt().float(), total[1].round().long())

    def _listed(self, copies: int, parts: list[Tensor]) -> TensorList | list[Tensor]:
        if not on_triton("auto", parts[0]):
            return parts
        known = self._lists.get(copies)
        listed = TensorList.of(parts) if known is None else known.pointing_at(parts)
        self._lists[copies] = listed.letting_go()
        return listed


def _counted(mesh: Mesh, held: Held) -> Iterator[tuple[Tensor, int]]:
    """Yield the parts of a gradient, and how many ranks have the same numbers in theirs."""
    layout, (holding, start, stop) = mesh.layout, held.lie
    if holding.expert:
        sliced = holding.shape[1:] != holding.whole[1:]
        yield held.gradient, held.copies * (1 if sliced else layout.experts_tp)
        return
    copies = held.copies
    if holding.is_whole:
        copies *= layout.tp
    run = _twin_run(holding)
    if run is None:
        yield held.gradient, copies
        return
    flat = held.gradient.reshape(-1)
    low, high = (min(max(place, start), stop) - start for place in run)
    parts = ((flat[:low], 1), (flat[low:high], holding.twins), (flat[high:], 1))
    yield from ((part, copies * times) for part, times in parts if len(part))
