"""What gradients need before an update: sums over the ranks that have parts of them, and one norm.

A parameter's gradient is a sum over tokens, so ranks that saw other tokens add theirs up (`dp-cp`,
for experts `expert_dp`); within a stage, ranks that did a share of the work do
(`ShardSpec.partial`); and stages that hold the same do (the two ends a tied embedding). A bucket
goes through these one after the other; each is begun, and waited for only when the next bucket has
begun or all are wanted.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.run.kernels.optimizer.grad_norm import GradNorm, compute_grad_norm
from meshwright.run.kernels.optimizer.multi_tensor import TensorList
from meshwright.run.kernels.triton_compat import should_use_triton
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.bucket_shard import ShardRange
from meshwright.run.parallel.zero.buckets import GradientBucket


class BucketReduction:
    """The way of one bucket's gradients from the parameters to complete ones."""

    def __init__(
        self,
        bucket: GradientBucket,
        sharded_model: ShardedModel,
        parameters: Mapping[str, nn.Parameter],
        *,
        shard_group: GroupCoordinator,
        replica_group: GroupCoordinator,
        dtype: torch.dtype,
        accumulates: bool,
    ) -> None:
        """Shard gradients of type `dtype` over `shard_group`; `replica_group` has the same shards.

        With `accumulates` several reductions of a step are added (ZeRO 2), and
        `start_replica_all_reduce` is called after the last.
        """
        self.bucket, self.shard_group, self.replica_group = bucket, shard_group, replica_group
        self.dtype, self.accumulates = dtype, accumulates
        self.mesh, self.shard_specs = sharded_model.mesh, sharded_model.shard_specs
        self.parameters = {each.name: parameters[each.name] for each in bucket.members}
        self.reduced_shard: Tensor | None = None
        """This rank's part of the complete gradients; all of them where nothing is cut."""
        # Not in `steps`: a group that forms within a backward pass would hold it up.
        self._twins = [
            (self.mesh.get_subgroup("tp", degree), places)
            for degree, places in _twins(bucket, sharded_model).items()
        ]

    @property
    def groups(self) -> list[GroupCoordinator]:
        """Everybody it exchanges with."""
        stages = (
            [self.mesh[self.bucket.shared_stage_group]] if self.bucket.shared_stage_group else []
        )
        inner = [self.mesh[each.group] for each in self.bucket.partial_sum_slices]
        return [
            *inner,
            *(group for group, _ in self._twins),
            *stages,
            self.shard_group,
            self.replica_group,
        ]

    @property
    def is_noop(self) -> bool:
        """Whether gradients are complete as backward leaves them."""
        partial = any(self.mesh[each.group].size > 1 for each in self.bucket.partial_sum_slices)
        alone = self.shard_group.size == 1 and self.replica_group.size == 1
        return alone and not (partial or self.bucket.shared_stage_group or self._twins)

    def reduce(self) -> Iterator[bool]:
        """Reduce; pauses while something is under way, with whether more than waiting follows."""
        flat = self._collected()
        inner = [
            self.mesh[group].start_all_reduce(flat[start:stop])
            for group, start, stop in self.bucket.partial_sum_slices
        ]
        shared = [_SharedRows(group, flat, places) for group, places in self._twins]
        if inner or shared:
            yield True
            for pending in inner:
                pending.wait()
            for rows in shared:
                rows.put_back()
        if self.bucket.shared_stage_group:
            joined = self.mesh[self.bucket.shared_stage_group].start_all_reduce(flat)
            yield True
            joined.wait()
        if self.shard_group.size > 1:
            scattered = self.shard_group.start_reduce_scatter(flat)
            del flat
            yield self.accumulates or self.replica_group.size > 1
            own = scattered.wait()
            self.reduced_shard = own if self.reduced_shard is None else self.reduced_shard.add_(own)
            if self.accumulates or self.replica_group.size == 1:
                return
            flat = self.reduced_shard
        reduced = self.replica_group.start_all_reduce(flat)
        yield False
        self.reduced_shard = reduced.wait()

    def start_replica_all_reduce(self) -> AsyncWork:
        """Begin to add up a step's sum over the ranks that have the same part."""
        assert self.reduced_shard is not None, "the bucket was reduced"
        return self.replica_group.start_all_reduce(self.reduced_shard)

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

    def __init__(
        self, group: GroupCoordinator, flat: Tensor, places: list[tuple[int, int]]
    ) -> None:
        self._slices = [flat[start:stop] for start, stop in places]
        self._pending = group.start_all_reduce(torch.cat(self._slices))

    def put_back(self) -> None:
        """Wait for the sum and write it to where the rows came from."""
        summed = self._pending.wait().split_with_sizes([len(each) for each in self._slices])
        for place, rows in zip(self._slices, summed, strict=True):
            place.copy_(rows)


def _twins(bucket: GradientBucket, sharded_model: ShardedModel) -> dict[int, list[tuple[int, int]]]:
    """Return the places of rows that neighbours hold too, by how many do."""
    found: dict[int, list[tuple[int, int]]] = {}
    for member in bucket.members:
        holding = sharded_model.shard_specs[member.name]
        run = _twin_run(holding)
        if run is not None:
            place = (member.start + run[0], member.start + run[1])
            found.setdefault(holding.kv_replicas, []).append(place)
    return found


def _twin_run(holding: ShardSpec) -> tuple[int, int] | None:
    """Return the run of a flattened parameter's elements that neighbours hold too."""
    if holding.kv_replica_rows is None or holding.kv_replicas == 1:
        return None
    row = 1
    for size in holding.shape[1:]:
        row *= size
    return holding.kv_replica_rows.start * row, holding.kv_replica_rows.stop * row


class LocalGradient(NamedTuple):
    """A gradient as this rank has it."""

    gradient: Tensor
    shard_range: ShardRange
    num_replicas: int
    """Ranks of other replicas and of other stages that have the same numbers."""


class GlobalGradNorm:
    """Measures the whole model's gradients, each number once, with one sum over all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lists: dict[int, TensorList] = {}
        """Tables of the last step's tensors, without these: mostly they lie there again."""

    def __call__(self, gradients: Iterable[LocalGradient]) -> GradNorm:
        """Return the norm, the same bits on every rank."""
        by_copies: dict[int, list[Tensor]] = {}
        for held in gradients:
            for part, copies in _counted(self._mesh, held):
                by_copies.setdefault(copies, []).append(part)
        total = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        for copies, parts in by_copies.items():
            found = compute_grad_norm(self._listed(copies, parts))
            total[0] += found.norm.double().square() / copies
            total[1] += found.nonfinite_count.double() / copies
        self._mesh.world.all_reduce(total)
        return GradNorm(total[0].sqrt().float(), total[1].round().long())

    def _listed(self, copies: int, parts: list[Tensor]) -> TensorList | list[Tensor]:
        if not should_use_triton("auto", parts[0]):
            return parts
        known = self._lists.get(copies)
        listed = TensorList.from_tensors(parts) if known is None else known.repoint(parts)
        self._lists[copies] = listed.release()
        return listed


def _counted(mesh: Mesh, held: LocalGradient) -> Iterator[tuple[Tensor, int]]:
    """Yield the parts of a gradient, and how many ranks have the same numbers in theirs."""
    layout, (holding, start, stop) = mesh.layout, held.shard_range
    if holding.is_expert:
        sliced = holding.shape[1:] != holding.global_shape[1:]
        yield held.gradient, held.num_replicas * (1 if sliced else layout.effective_expert_tp)
        return
    copies = held.num_replicas
    if holding.is_unsharded:
        copies *= layout.tp
    run = _twin_run(holding)
    if run is None:
        yield held.gradient, copies
        return
    flat = held.gradient.reshape(-1)
    low, high = (min(max(place, start), stop) - start for place in run)
    parts = ((flat[:low], 1), (flat[low:high], holding.kv_replicas), (flat[high:], 1))
    yield from ((part, copies * times) for part, times in parts if len(part))
