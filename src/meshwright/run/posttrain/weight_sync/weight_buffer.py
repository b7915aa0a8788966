"""`WeightBuffer`: what has come of a version of weights, kept aside until it can be taken whole.

    buffer.begin_version(7)
    buffer.get_buffer(bucket)         memory for its bytes; whoever carries them writes there
    buffer.accept_bucket(bucket)      checks them
    buffer.commit()                   writes all of them where the model's weights lie

Weights keep their addresses, so captured graphs stay valid. What is kept aside takes as many bytes
as the rank's weights; `on="cpu"` keeps them in host memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.resharding.weight_transfer import (
    FP8_ROWWISE,
    TensorSlice,
    WeightBucket,
    WeightTransferPlan,
)
from meshwright.run.posttrain.weight_sync.bucket_packing import (
    Fp8RowwiseTensor,
    cast_formats,
    compute_bucket_bytes,
    unpack_slice,
    verify_bucket,
)
from meshwright.run.posttrain.weight_sync.weight_tensors import WeightTarget, get_slice_view
from meshwright.run.serve.engine.executor.rank_commands import PartialUpdateError


class IncompleteVersionError(MeshwrightError):
    """Some parcels of a version have not come."""


class PartialWeightUpdateError(PartialUpdateError):
    """New weights broke off while they were written: the model must not answer with them."""


class WeightBuffer:
    """The parcels of one rank that serves."""

    def __init__(
        self,
        plan: WeightTransferPlan,
        rank: int,
        targets: Mapping[str, WeightTarget],
        *,
        buckets: Sequence[WeightBucket] | None = None,
        on: torch.device | str | None = None,
    ) -> None:
        """Fill the places of target `rank`; `buckets` are all of the plan's, as they are sent."""
        every = plan.make_buckets() if buckets is None else buckets
        self.buckets = tuple(each for each in every if rank in each.targets)
        """What this rank gets."""
        self.version = 0
        """The version in the model's memory; 0 are the weights it began with."""
        self._plan, self._rank = plan, rank
        self.targets = targets
        """Where the weights lie; to be told anew where they have moved, as by sleep. While they
        stand here their memory is held, also of an engine that gives it back."""
        device = next(iter(targets.values())).sharded_tensor.tensor.device
        self._device = device if on is None else torch.device(on)
        self._expected: int | None = None
        self._kept: dict[int, Tensor] = {}
        self._sound: set[int] = set()
        self._broken = ""

    def begin_version(self, version: int) -> None:
        """Begin to gather a version; what was gathered of another is dropped.

        Raises:
            InputError: where the model has this version or a newer one.
        """
        if version <= self.version:
            what = f"{version} is no newer than {self.version}, which the model has"
            raise InputError([Problem("version", what, f"use {self.version + 1} or more")])
        self.discard()
        self._expected = version

    def get_buffer(self, bucket: WeightBucket) -> Tensor:
        """Return memory for a parcel with its seal, the same until it is taken or dropped."""
        size = compute_bucket_bytes(bucket)
        if bucket.index not in self._kept:
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._kept[bucket.index] = made
        return self._kept[bucket.index]

    def use_external_buffer(self, bucket: WeightBucket, bytes_: Tensor) -> None:
        """Use memory that somebody else keeps until the version is taken."""
        self._kept[bucket.index] = bytes_

    def accept_bucket(self, bucket: WeightBucket) -> None:
        """Check a parcel that has come.

        Raises:
            CorruptBucketError: where it is not what was sent, or of another version or plan.
        """
        version = self._awaited()
        verify_bucket(bucket, self._kept[bucket.index], version, self._plan.digest)
        self._sound.add(bucket.index)

    @property
    def missing(self) -> tuple[WeightBucket, ...]:
        """What has not come, or was not checked."""
        return tuple(each for each in self.buckets if each.index not in self._sound)

    def discard(self) -> None:
        """Forget what has been gathered: the model stays as it is."""
        self._kept, self._sound, self._expected = {}, set(), None

    @torch.no_grad()
    def commit(self) -> int:
        """Write everything into the model; return its version.

        Raises:
            IncompleteVersionError: where something is missing; nothing is written.
            PartialWeightUpdateError: where writing broke off; only a whole version makes the
                model usable.
        """
        version = self.require_complete()
        self._broken = f"version {version} broke off while it was written; send it again whole"
        try:
            self._write()
        except Exception as error:
            raise PartialWeightUpdateError(f"{self._broken}: {error}") from error
        self._broken, self.version = "", version
        self.discard()
        return version

    def require_complete(self) -> int:
        """Return the version that has come; raise `IncompleteVersionError` where it has not."""
        version = self._awaited()
        if missing := self.missing:
            whom = sorted({each.source for each in missing})
            what = f"{len(missing)} of {len(self.buckets)} buckets are missing"
            raise IncompleteVersionError(f"version {version}: {what}, from sources {whom}")
        return version

    def require_consistent(self) -> None:
        """Raise `PartialWeightUpdateError` where the model has parts of two versions."""
        if self._broken:
            raise PartialWeightUpdateError(self._broken)

    def _write(self) -> None:
        apart: dict[str, list[tuple[TensorSlice, Tensor]]] = {}
        for parcel in self.buckets:
            for slice_, start in zip(parcel.slices, parcel.byte_offsets, strict=True):
                place = self.targets[slice_.tensor_name]
                value = unpack_slice(slice_, start, self._kept[parcel.index])
                if isinstance(value, Fp8RowwiseTensor):
                    self._write_rows(place, slice_, value)
                elif slice_.target_casts[-1] == FP8_ROWWISE:
                    apart.setdefault(slice_.tensor_name, []).append((slice_, value))
                else:
                    get_slice_view(place.sharded_tensor, slice_).view.copy_(value)
        for name, pieces in apart.items():
            self._quantise(self.targets[name], pieces)

    def _write_rows(self, place: WeightTarget, slice_: TensorSlice, rows: Fp8RowwiseTensor) -> None:
        get_slice_view(place.sharded_tensor, slice_).view.copy_(rows.data)
        assert place.scale is not None
        _scales(place, slice_).copy_(rows.scale)

    def _quantise(self, place: WeightTarget, pieces: Sequence[tuple[TensorSlice, Tensor]]) -> None:
        """Put a matrix together, then round it: its scales hang on whole rows."""
        first, one = pieces[0]
        placed, target = place.sharded_tensor, place.sharded_tensor.tensor
        whole = torch.empty(target.shape, dtype=one.dtype, device=target.device)
        aside = replace(placed, tensor=whole)
        for slice_, value in pieces:
            get_slice_view(aside, slice_).view.copy_(value)
        made = cast_formats(whole, first.target_casts)
        assert isinstance(made, Fp8RowwiseTensor)
        assert place.scale is not None
        target.copy_(made.data)
        place.scale.copy_(made.scale)

    def _awaited(self) -> int:
        if self._expected is None:
            raise InputError([Problem("version", "none is awaited", "call expect first")])
        return self._expected


def _scales(place: WeightTarget, slice_: TensorSlice) -> Tensor:
    """Return the scales of the rows that a slice fills."""
    assert place.scale is not None
    for part in place.sharded_tensor.chunks:
        first = slice_.box.offsets[0] - part.offsets[0]
        if 0 <= first < part.sizes[0]:
            row = part.local_slices[0].start + first
            return place.scale[row : row + slice_.box.sizes[0]]
    raise ValueError(f"{slice_.tensor_name} has no {slice_.box} here")
