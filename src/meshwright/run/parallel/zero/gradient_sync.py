"""`Sync`: what happens to gradients between backward and update, and to weights after it.

    sync.begin_step()                   before the passes of a step
    runner(microbatches, scale, sync.mark_last_backward)   reduces while backward still runs
    gradients = sync.reduced_gradients()   complete, for the parameters the optimizer updates
    norm = sync.grad_norm()
    sync.zero_grads_and_unshard()       after the update: every rank has all weights that it needs

Without sharding (`zero` 0) the optimizer updates the decoder's own parameters on every rank. With
ZeRO 1 each rank updates its part of every bucket and has moments for no more; with ZeRO 2 it has
no more of the gradients either, as each microbatch's are reduced and dropped; with ZeRO 3 it has no
more of the weights but while a unit computes (`FSDPUnits`), under a pipeline from first use to
the step's end. With `layout.shard` parts are shared within `shard` groups and the same over
`replicate` groups. Experts are always cut over all of `expert_dp`.

What does not learn is cut by ZeRO 3 alone; it has no gradients. What is trained beside a model, an
adapter, is little and stays whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.run.kernels.optimizer.grad_norm import GradNorm
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.sharding.shard_spec import IndexRange
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.bucket_reduction import (
    BucketReduction,
    GlobalGradNorm,
    LocalGradient,
)
from meshwright.run.parallel.zero.bucket_shard import BucketShard, ShardRange, set_shard_info
from meshwright.run.parallel.zero.buckets import BUCKET_BYTES, GradientBucket, fill_buckets
from meshwright.run.parallel.zero.fsdp_units import FSDPUnits
from meshwright.run.parallel.zero.parameter_usage import get_fsdp_unit, list_bucket_requests
from meshwright.run.parallel.zero.reducer import GradientReducer

GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FlatSharding(NamedTuple):
    """How ranks share a flattened parameter."""

    group: GroupCoordinator
    flat_ranges: tuple[IndexRange, ...]
    """What each rank of the group has of it, one behind the other."""


class Sync(Protocol):
    """Keeps the replicas of a model equal."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, by the names of the whole model."""

    def shard_ranges(self) -> dict[str, ShardRange]:
        """Map each parameter to its shard range."""

    def flat_shardings(self) -> dict[str, FlatSharding]:
        """Return the parameters that are cut over ranks, also those this rank has nothing of."""

    def list_groups(self) -> list[GroupCoordinator]:
        """Return the groups that it communicates in."""

    def begin_step(self) -> None:
        """Get ready for the passes of a step."""

    def mark_last_backward(self, chunk: int) -> None:
        """Note that the backward pass that follows completes the gradients of a chunk."""

    def mark_gradient_ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was added to by hand, where autograd's hooks do not see it."""

    def reduced_gradients(self) -> dict[str, Tensor]:
        """Return the complete gradients of what the optimizer updates."""

    def grad_norm(self) -> GradNorm:
        """Return the norm of the whole model's gradients, the same on every rank."""

    def zero_grads_and_unshard(self) -> None:
        """Drop the gradients, and let every rank have the updated weights."""

    def unsharded_parameters(self) -> AbstractContextManager[None]:
        """Let the decoder's parameters be whole for a while; what is written to them counts."""


class GradientSync:
    """Reduces gradients bucket by bucket, and cuts what `zero` says over the replicas."""

    def __init__(self, sharded_model: ShardedModel, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Move the parameters to where they stay; every rank does so at the same point."""
        self.sharded_model, self._layout = sharded_model, sharded_model.mesh.layout
        decoder, layout = sharded_model.decoder, self._layout
        format_ = GRADIENT_DTYPES[layout.gradient_precision]
        learning = {
            name: each for name, each in sharded_model.named_parameters() if each.requires_grad
        }
        self._names = {id(each): name for name, each in learning.items()}
        for name, each in learning.items():
            each.grad_dtype = format_
            set_shard_info(each, sharded_model.shard_specs[name], 0)
        self._parameters = learning
        cut = {expert: self._groups(expert=expert) for expert in (False, True)}
        sizes = {"parts": cut[False][0].size, "expert_parts": cut[True][0].size}
        filled = {"element_bytes": format_.itemsize, "bucket_bytes": bucket_bytes}
        own = {
            name: each for name, each in learning.items() if name not in sharded_model.gathered_with
        }
        buckets = fill_buckets(
            list_bucket_requests(sharded_model, own), by_unit=layout.zero == 3, **sizes, **filled
        )
        more = {
            name: each for name, each in learning.items() if name in sharded_model.gathered_with
        }
        beside = fill_buckets(
            list_bucket_requests(sharded_model, more),
            by_unit=False,
            parts=1,
            expert_parts=1,
            **filled,
        )
        self._frozen = self._cut_frozen(cut, sizes) if layout.zero == 3 else {}
        self._shards: dict[GradientBucket, BucketShard] = {}
        self._reductions = []
        for bucket in (*buckets, *beside):
            shards, copies = cut[bucket.is_expert]
            if bucket in beside:
                shards, copies = self._alone, sharded_model.mesh["dp-cp"]
            if shards.size > 1:
                self._shards[bucket] = BucketShard(
                    bucket,
                    learning,
                    sharded_model.shard_specs,
                    shards,
                    reshard_after_forward=layout.zero == 3,
                )
            self._reductions.append(
                BucketReduction(
                    bucket,
                    sharded_model,
                    learning,
                    shard_group=shards,
                    replica_group=copies,
                    dtype=format_,
                    accumulates=layout.zero >= 2
                    and shards.size > 1
                    and not bucket.shared_stage_group,
                )
            )
        self._updated = {
            name: each
            for shard in self._shards.values()
            for name, each in shard.optimized_tensors.items()
        }
        self._of = {
            member.name: each for each in self._reductions for member in each.bucket.members
        }
        lets_go = layout.zero == 3 and layout.pp == 1
        self._reducer = GradientReducer(
            [each for each in self._reductions if not each.is_noop],
            overlaps=layout.overlap_gradients,
            on_leaving=self._free if lets_go else None,
        )
        if self._shards or self._frozen:
            FSDPUnits(
                decoder,
                group_shards_by_unit(decoder, self._shards),
                group_shards_by_unit(decoder, self._frozen),
                reshard_after_forward=lets_go,
                prefetch=layout.overlap_parameters,
            )
        self._lies = self._find_lies()
        self._norm = GlobalGradNorm(sharded_model.mesh)
        self._complete: dict[str, Tensor] = {}

    @property
    def _alone(self) -> GroupCoordinator:
        mesh = self.sharded_model.mesh
        return GroupCoordinator("alone", (mesh.rank,), mesh.rank, None, mesh.flight_recorder)

    def _groups(self, *, expert: bool) -> tuple[GroupCoordinator, GroupCoordinator]:
        """Return over whom a bucket is cut, and who has the same part."""
        mesh = self.sharded_model.mesh
        if self._layout.zero == 0:
            return self._alone, mesh["expert_dp" if expert else "dp-cp"]
        return (mesh["expert_dp"], self._alone) if expert else (mesh["shard"], mesh["replicate"])

    def _cut_frozen(
        self, cut: dict[bool, tuple[GroupCoordinator, GroupCoordinator]], sizes: dict[str, int]
    ) -> dict[GradientBucket, BucketShard]:
        """Cut what does not learn; nobody updates the parts."""
        decoder, shard_specs = self.sharded_model.decoder, self.sharded_model.shard_specs
        # Written between steps, when parts are let go of: each rank keeps all of these few numbers.
        moved = {id(part.balance) for part in decoder.iter_moe_layers()}
        named = {
            name: each
            for name, each in decoder.named_parameters()
            if not each.requires_grad and id(each) not in moved
        }
        found = {}
        for bucket in fill_buckets(
            list_bucket_requests(self.sharded_model, named), **sizes, element_bytes=1, by_unit=True
        ):
            group = cut[bucket.is_expert][0]
            if group.size > 1:
                found[bucket] = BucketShard(
                    bucket, named, shard_specs, group, reshard_after_forward=True
                )
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the rank's parts of cut parameters, flat, and other parameters themselves."""
        self._settle()
        cut = {member.name for bucket in self._shards for member in bucket.members}
        for name, parameter in self.sharded_model.named_parameters():
            if name not in cut:
                yield name, parameter
            elif name in self._updated:
                yield name, self._updated[name]

    def shard_ranges(self) -> dict[str, ShardRange]:
        """Map each parameter to its shard range."""
        return self._lies

    def flat_shardings(self) -> dict[str, FlatSharding]:
        """Return the parameters that are cut over ranks, also those this rank has nothing of."""
        found = {}
        for bucket, shard in self._shards.items():
            each = bucket.elements // shard.group.size
            ends = [(rank * each, (rank + 1) * each) for rank in range(shard.group.size)]
            for member in bucket.members:
                places = (
                    [min(max(end, member.start), member.stop) - member.start for end in pair]
                    for pair in ends
                )
                found[member.name] = FlatSharding(
                    shard.group, tuple(IndexRange(*pair) for pair in places)
                )
        return found

    def list_groups(self) -> list[GroupCoordinator]:
        """Return the groups that it communicates in."""
        found = [group for each in self._reductions for group in each.groups]
        return [*found, self.sharded_model.mesh.world]  # for the norm

    def _find_lies(self) -> dict[str, ShardRange]:
        shard_specs = self.sharded_model.shard_specs
        found = {
            name: ShardRange(shard_specs[name], 0, each.numel())
            for name, each in self.named_parameters()
        }
        for shard in self._shards.values():
            for each in shard.pieces:
                found[each.name] = ShardRange(shard_specs[each.name], each.start, each.stop)
        return found

    def begin_step(self) -> None:
        """Get ready for the passes of a step."""
        self._reducer.start_backward()

    def mark_last_backward(self, chunk: int) -> None:
        """Note that the backward pass that follows completes the gradients of a chunk."""
        self._reducer.mark_last_backward(chunk)

    def mark_gradient_ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was added to by hand, where autograd's hooks do not see it."""
        self._reducer.mark_ready(self._names[id(parameter)])

    @torch.no_grad()
    def reduced_gradients(self) -> dict[str, Tensor]:
        """Wait for the reductions, after starting those that have not begun."""
        self._reducer.flush()
        self._settle()
        sums = [
            each.start_replica_all_reduce()
            for each in self._reductions
            if each.accumulates and each.replica_group.size > 1
        ]
        for pending in sums:
            pending.wait()
        found: dict[str, Tensor] = {}
        for each in self._reductions:
            found |= self._of_bucket(each)
        if self._layout.pp > 1:
            for bucket in self._shards:
                self._free(bucket)
        for shard in self._frozen.values():  # what backward did not let go of
            shard.reshard()
        self._complete = {name: found[name] for name in self._lies if name in found}
        return self._complete

    def _of_bucket(self, reduction: BucketReduction) -> dict[str, Tensor]:
        """Return the complete gradients of a bucket."""
        bucket, found = reduction.bucket, {}
        if bucket in self._shards:
            assert reduction.reduced_shard is not None, "the bucket was reduced"
            return self._shards[bucket].split_by_parameter(reduction.reduced_shard)
        for member in bucket.members:
            parameter = self._parameters[member.name]
            if reduction.reduced_shard is not None:
                grad = reduction.reduced_shard[member.start : member.stop].view(parameter.shape)
                parameter.grad = grad
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=reduction.dtype)
            assert parameter.grad is not None
            found[member.name] = parameter.grad
        return found

    def grad_norm(self) -> GradNorm:
        """Return the norm of the whole model's gradients."""
        mesh, held = self.sharded_model.mesh, []
        for name, grad in self._complete.items():
            reduction = self._of[name]
            stages, copies = reduction.bucket.shared_stage_group, reduction.replica_group.size
            copies *= mesh[stages].size if stages else 1
            held.append(LocalGradient(grad, self._lies[name], copies))
        return self._norm(held)

    def zero_grads_and_unshard(self) -> None:
        """Drop the gradients, and start to gather the weights."""
        self._complete = {}
        for parameter in self._parameters.values():
            parameter.grad = None
        for each in self._reductions:
            each.reduced_shard = None
        # Buckets are in the order of backward; what is used first goes first.
        for shard in reversed(self._shards.values()):
            shard.invalidate()
            if not shard.reshard_after_forward:
                shard.unshard()
        if not self._layout.overlap_parameters:
            self._settle()

    def _settle(self) -> None:
        """Wait for weights that no pass has used: who updates a part must not meet its transfer."""
        for shard in self._shards.values():
            if not shard.reshard_after_forward:
                shard.wait_for_unshard()

    @contextmanager
    def unsharded_parameters(self) -> Iterator[None]:
        """Let the decoder's parameters be whole for a while; what is written to them counts."""
        every = [*self._frozen.values(), *self._shards.values()]
        for shard in reversed(every):
            shard.unshard()
        for shard in every:
            shard.wait_for_unshard()
        try:
            yield
        finally:
            with torch.no_grad():
                for shard in every:
                    shard.copy_from_unsharded()
                    shard.reshard()

    def _free(self, bucket: GradientBucket) -> None:
        if bucket in self._shards:
            self._shards[bucket].reshard()


def group_shards_by_unit(
    decoder: Decoder, shards: Mapping[GradientBucket, BucketShard]
) -> dict[str, list[BucketShard]]:
    """Return the shards that each unit of a decoder reads."""
    found: dict[str, list[BucketShard]] = {}
    for bucket, shard in shards.items():
        for unit in dict.fromkeys(get_fsdp_unit(decoder, each.name) for each in bucket.members):
            found.setdefault(unit, []).append(shard)
    return found


def make_gradient_sync(sharded_model: ShardedModel, *, bucket_bytes: int = BUCKET_BYTES) -> Sync:
    """Return how a layout keeps its replicas equal."""
    return GradientSync(sharded_model, bucket_bytes=bucket_bytes)
