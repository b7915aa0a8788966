"""`Sync`: what happens to gradients between backward and update, and to weights after it.

    sync.begin()                       before the passes of a step
    runner(parts, share, sync.last)    gradients are reduced while backward still runs
    gradients = sync.gradients()       complete, for the parameters the optimizer updates
    norm = sync.norm()
    sync.finish()                      after the update: every rank has all weights it computes with

Without sharding (`zero` 0) the optimizer updates the decoder's own parameters on every rank. With
ZeRO 1 each rank updates its part of every bucket and has moments for no more; with ZeRO 2 it has
no more of the gradients either, as each microbatch's are reduced and dropped; with ZeRO 3 it has no
more of the weights but while a unit computes (`gathered_units`), under a pipeline from first use to
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

from meshwright.run.kernels.gradient_norm import GradientNorm
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Range
from meshwright.run.parallel.buckets import BUCKET_BYTES, Bucket, fill
from meshwright.run.parallel.gathered_units import GatheredUnits
from meshwright.run.parallel.gradients import GlobalNorm, Held, Reduction
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.reducer import Reducer
from meshwright.run.parallel.shards import Lie, Shard, mark
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.usage import unit_of, wanted

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Cut(NamedTuple):
    """How ranks share a flattened parameter."""

    group: Group
    runs: tuple[Range, ...]
    """What each rank of the group has of it, one behind the other."""


class Sync(Protocol):
    """Keeps the replicas of a model equal."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, by the names of the whole model."""

    def lies(self) -> dict[str, Lie]:
        """Return where each of them lies."""

    def cuts(self) -> dict[str, Cut]:
        """Return the parameters that are cut over ranks, also those this rank has nothing of."""

    def groups(self) -> list[Group]:
        """Return everybody it exchanges with."""

    def begin(self) -> None:
        """Get ready for the passes of a step."""

    def last(self, chunk: int) -> None:
        """Note that the backward pass that follows completes the gradients of a chunk."""

    def ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was added to by hand, where autograd's hooks do not see it."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the complete gradients of what the optimizer updates."""

    def norm(self) -> GradientNorm:
        """Return the norm of the whole model's gradients, the same on every rank."""

    def finish(self) -> None:
        """Drop the gradients, and let every rank have the updated weights."""

    def gathered(self) -> AbstractContextManager[None]:
        """Let the decoder's parameters be whole for a while; what is written to them counts."""


class BucketedSync:
    """Reduces gradients bucket by bucket, and cuts what `zero` says over the replicas."""

    def __init__(self, spread: Spread, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Move the parameters to where they stay; every rank does so at the same point."""
        self.spread, self._layout = spread, spread.mesh.layout
        decoder, layout = spread.decoder, self._layout
        format_ = FORMATS[layout.gradient_precision]
        learning = {name: each for name, each in spread.named_parameters() if each.requires_grad}
        self._names = {id(each): name for name, each in learning.items()}
        for name, each in learning.items():
            each.grad_dtype = format_
            mark(each, spread.holdings[name], 0)
        self._parameters = learning
        cut = {expert: self._groups(expert=expert) for expert in (False, True)}
        sizes = {"parts": cut[False][0].size, "expert_parts": cut[True][0].size}
        filled = {"element_bytes": format_.itemsize, "bucket_bytes": bucket_bytes}
        own = {name: each for name, each in learning.items() if name not in spread.used_with}
        buckets = fill(wanted(spread, own), by_unit=layout.zero == 3, **sizes, **filled)
        more = {name: each for name, each in learning.items() if name in spread.used_with}
        beside = fill(wanted(spread, more), by_unit=False, parts=1, expert_parts=1, **filled)
        self._frozen = self._cut_frozen(cut, sizes) if layout.zero == 3 else {}
        self._shards: dict[Bucket, Shard] = {}
        self._reductions = []
        for bucket in (*buckets, *beside):
            shards, copies = cut[bucket.expert]
            if bucket in beside:
                shards, copies = self._alone, spread.mesh["dp-cp"]
            if shards.size > 1:
                self._shards[bucket] = Shard(
                    bucket, learning, spread.holdings, shards, comes_and_goes=layout.zero == 3
                )
            self._reductions.append(
                Reduction(
                    bucket,
                    spread,
                    learning,
                    shards=shards,
                    copies=copies,
                    dtype=format_,
                    adds_up=layout.zero >= 2 and shards.size > 1 and not bucket.stages,
                )
            )
        self._updated = {
            name: each for shard in self._shards.values() for name, each in shard.updated.items()
        }
        self._of = {
            member.name: each for each in self._reductions for member in each.bucket.members
        }
        lets_go = layout.zero == 3 and layout.pp == 1
        self._reducer = Reducer(
            [each for each in self._reductions if not each.idle],
            overlaps=layout.overlap_gradients,
            on_leaving=self._free if lets_go else None,
        )
        if self._shards or self._frozen:
            GatheredUnits(
                decoder,
                by_units(decoder, self._shards),
                by_units(decoder, self._frozen),
                lets_go=lets_go,
                ahead=layout.overlap_parameters,
            )
        self._lies = self._find_lies()
        self._norm = GlobalNorm(spread.mesh)
        self._complete: dict[str, Tensor] = {}

    @property
    def _alone(self) -> Group:
        mesh = self.spread.mesh
        return Group("alone", (mesh.rank,), mesh.rank, None, mesh.journal)

    def _groups(self, *, expert: bool) -> tuple[Group, Group]:
        """Return over whom a bucket is cut, and who has the same part."""
        mesh = self.spread.mesh
        if self._layout.zero == 0:
            return self._alone, mesh["expert_dp" if expert else "dp-cp"]
        return (mesh["expert_dp"], self._alone) if expert else (mesh["shard"], mesh["replicate"])

    def _cut_frozen(
        self, cut: dict[bool, tuple[Group, Group]], sizes: dict[str, int]
    ) -> dict[Bucket, Shard]:
        """Cut what does not learn; nobody updates the parts."""
        decoder, holdings = self.spread.decoder, self.spread.holdings
        # Written between steps, when parts are let go of: each rank keeps all of these few numbers.
        moved = {id(part.balance) for part in decoder.experts()}
        named = {
            name: each
            for name, each in decoder.named_parameters()
            if not each.requires_grad and id(each) not in moved
        }
        found = {}
        for bucket in fill(wanted(self.spread, named), **sizes, element_bytes=1, by_unit=True):
            group = cut[bucket.expert][0]
            if group.size > 1:
                found[bucket] = Shard(bucket, named, holdings, group, comes_and_goes=True)
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the rank's parts of cut parameters, flat, and other parameters themselves."""
        self._settle()
        cut = {member.name for bucket in self._shards for member in bucket.members}
        for name, parameter in self.spread.named_parameters():
            if name not in cut:
                yield name, parameter
            elif name in self._updated:
                yield name, self._updated[name]

    def lies(self) -> dict[str, Lie]:
        """Return where each of them lies."""
        return self._lies

    def cuts(self) -> dict[str, Cut]:
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
                found[member.name] = Cut(shard.group, tuple(Range(*pair) for pair in places))
        return found

    def groups(self) -> list[Group]:
        """Return everybody it exchanges with."""
        found = [group for each in self._reductions for group in each.groups]
        return [*found, self.spread.mesh.world]  # for the norm

    def _find_lies(self) -> dict[str, Lie]:
        holdings = self.spread.holdings
        found = {
            name: Lie(holdings[name], 0, each.numel()) for name, each in self.named_parameters()
        }
        for shard in self._shards.values():
            for each in shard.pieces:
                found[each.name] = Lie(holdings[each.name], each.start, each.stop)
        return found

    def begin(self) -> None:
        """Get ready for the passes of a step."""
        self._reducer.begin()

    def last(self, chunk: int) -> None:
        """Note that the backward pass that follows completes the gradients of a chunk."""
        self._reducer.last(chunk)

    def ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was added to by hand, where autograd's hooks do not see it."""
        self._reducer.arrived(self._names[id(parameter)])

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Wait for the reductions, after starting those that have not begun."""
        self._reducer.flush()
        self._settle()
        sums = [
            each.start_adding_copies()
            for each in self._reductions
            if each.adds_up and each.copies.size > 1
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
            shard.free()
        self._complete = {name: found[name] for name in self._lies if name in found}
        return self._complete

    def _of_bucket(self, reduction: Reduction) -> dict[str, Tensor]:
        """Return the complete gradients of a bucket."""
        bucket, found = reduction.bucket, {}
        if bucket in self._shards:
            assert reduction.own is not None, "the bucket was reduced"
            return self._shards[bucket].cut(reduction.own)
        for member in bucket.members:
            parameter = self._parameters[member.name]
            if reduction.own is not None:
                grad = reduction.own[member.start : member.stop].view(parameter.shape)
                parameter.grad = grad
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=reduction.dtype)
            assert parameter.grad is not None
            found[member.name] = parameter.grad
        return found

    def norm(self) -> GradientNorm:
        """Return the norm of the whole model's gradients."""
        mesh, held = self.spread.mesh, []
        for name, grad in self._complete.items():
            reduction = self._of[name]
            stages, copies = reduction.bucket.stages, reduction.copies.size
            copies *= mesh[stages].size if stages else 1
            held.append(Held(grad, self._lies[name], copies))
        return self._norm(held)

    def finish(self) -> None:
        """Drop the gradients, and start to gather the weights."""
        self._complete = {}
        for parameter in self._parameters.values():
            parameter.grad = None
        for each in self._reductions:
            each.own = None
        # Buckets are in the order of backward; what is used first goes first.
        for shard in reversed(self._shards.values()):
            shard.changed()
            if not shard.comes_and_goes:
                shard.start_gathering()
        if not self._layout.overlap_parameters:
            self._settle()

    def _settle(self) -> None:
        """Wait for weights that no pass has used: who updates a part must not meet its transfer."""
        for shard in self._shards.values():
            if not shard.comes_and_goes:
                shard.whole()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the decoder's parameters be whole for a while; what is written to them counts."""
        every = [*self._frozen.values(), *self._shards.values()]
        for shard in reversed(every):
            shard.start_gathering()
        for shard in every:
            shard.whole()
        try:
            yield
        finally:
            with torch.no_grad():
                for shard in every:
                    shard.take_over()
                    shard.free()

    def _free(self, bucket: Bucket) -> None:
        if bucket in self._shards:
            self._shards[bucket].free()


def by_units(decoder: Decoder, shards: Mapping[Bucket, Shard]) -> dict[str, list[Shard]]:
    """Return the shards that each unit of a decoder reads."""
    found: dict[str, list[Shard]] = {}
    for bucket, shard in shards.items():
        for unit in dict.fromkeys(unit_of(decoder, each.name) for each in bucket.members):
            found.setdefault(unit, []).append(shard)
    return found


def make_sync(spread: Spread, *, bucket_bytes: int = BUCKET_BYTES) -> Sync:
    """Return how a layout keeps its replicas equal."""
    return BucketedSync(spread, bucket_bytes=bucket_bytes)
