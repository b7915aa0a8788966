"""`Arrivals`: what has come of a version of weights, kept aside until it can be taken whole.

    arrivals.expect(7)
    arrivals.room(parcel)             memory for its bytes; whoever carries them writes there
    arrivals.accept(parcel)           checks them
    arrivals.commit()                 writes all of them where the model's weights lie

Weights keep their addresses, so captured graphs stay valid. What is kept aside takes as many bytes
as the rank's weights; `on="cpu"` keeps them in host memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.transfer import ROW_SCALES, Parcel, Slice, Transfer
from meshwright.run.posttrain.weights.packing import Rows, cast, parcel_bytes, unpack, verify
from meshwright.run.posttrain.weights.tensors import Place, part_of


class IncompleteVersion(MeshwrightError):
    """Some parcels of a version have not come."""


class HalfWritten(MeshwrightError):
    """New weights broke off while they were written: the model must not answer with them."""


class Arrivals:
    """The parcels of one rank that serves."""

    def __init__(
        self,
        plan: Transfer,
        rank: int,
        places: Mapping[str, Place],
        *,
        parcels: Sequence[Parcel] | None = None,
        on: torch.device | str | None = None,
    ) -> None:
        """Fill the places of target `rank`; `parcels` are all of the plan's, as they are sent."""
        every = plan.parcels() if parcels is None else parcels
        self.mine = tuple(each for each in every if rank in each.targets)
        """What this rank gets."""
        self.version = 0
        """The version in the model's memory; 0 are the weights it began with."""
        self._plan, self._rank = plan, rank
        self.places = places
        """Where the weights lie; to be told anew where they have moved, as by sleep. While they
        stand here their memory is held, also of an engine that gives it back."""
        device = next(iter(places.values())).placed.tensor.device
        self._device = device if on is None else torch.device(on)
        self._expected: int | None = None
        self._kept: dict[int, Tensor] = {}
        self._sound: set[int] = set()
        self._broken = ""

    def expect(self, version: int) -> None:
        """Begin to gather a version; what was gathered of another is dropped.

        Raises:
            InputError: where the model has this version or a newer one.
        """
        if version <= self.version:
            what = f"{version} is no newer than {self.version}, which the model has"
            raise InputError([Problem("version", what, f"use {self.version + 1} or more")])
        self.drop()
        self._expected = version

    def room(self, parcel: Parcel) -> Tensor:
        """Return memory for a parcel with its seal, the same until it is taken or dropped."""
        size = parcel_bytes(parcel)
        if parcel.number not in self._kept:
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._kept[parcel.number] = made
        return self._kept[parcel.number]

    def lend(self, parcel: Parcel, bytes_: Tensor) -> None:
        """Use memory that somebody else keeps until the version is taken."""
        self._kept[parcel.number] = bytes_

    def accept(self, parcel: Parcel) -> None:
        """Check a parcel that has come.

        Raises:
            DamagedWeights: where it is not what was sent, or of another version or plan.
        """
        version = self._awaited()
        verify(parcel, self._kept[parcel.number], version, self._plan.digest)
        self._sound.add(parcel.number)

    @property
    def missing(self) -> tuple[Parcel, ...]:
        """What has not come, or was not checked."""
        return tuple(each for each in self.mine if each.number not in self._sound)

    def drop(self) -> None:
        """Forget what has been gathered: the model stays as it is."""
        self._kept, self._sound, self._expected = {}, set(), None

    @torch.no_grad()
    def commit(self) -> int:
        """Write everything into the model; return its version.

        Raises:
            IncompleteVersion: where something is missing; nothing is written.
            HalfWritten: where writing broke off; only a whole version makes the model usable.
        """
        version = self.require_all()
        self._broken = f"version {version} broke off while it was written; send it again whole"
        try:
            self._write()
        except Exception as error:
            raise HalfWritten(f"{self._broken}: {error}") from error
        self._broken, self.version = "", version
        self.drop()
        return version

    def require_all(self) -> int:
        """Return the version that has come; raise `IncompleteVersion` where it has not."""
        version = self._awaited()
        if missing := self.missing:
            whom = sorted({each.source for each in missing})
            what = f"{len(missing)} of {len(self.mine)} parcels have not come"
            raise IncompleteVersion(f"version {version}: {what}, from sources {whom}")
        return version

    def require_whole(self) -> None:
        """Raise `HalfWritten` where the model has parts of two versions."""
        if self._broken:
            raise HalfWritten(self._broken)

    def _write(self) -> None:
        apart: dict[str, list[tuple[Slice, Tensor]]] = {}
        for parcel in self.mine:
            for slice_, start in zip(parcel.slices, parcel.starts, strict=True):
                place = self.places[slice_.tensor]
                value = unpack(slice_, start, self._kept[parcel.number])
                if isinstance(value, Rows):
                    self._write_rows(place, slice_, value)
                elif slice_.after[-1] == ROW_SCALES:
                    apart.setdefault(slice_.tensor, []).append((slice_, value))
                else:
                    part_of(place.placed, slice_).view.copy_(value)
        for name, pieces in apart.items():
            self._quantise(self.places[name], pieces)

    def _write_rows(self, place: Place, slice_: Slice, rows: Rows) -> None:
        part_of(place.placed, slice_).view.copy_(rows.data)
        assert place.scale is not None
        _scales(place, slice_).copy_(rows.scale)

    def _quantise(self, place: Place, pieces: Sequence[tuple[Slice, Tensor]]) -> None:
        """Put a matrix together, then round it: its scales hang on whole rows."""
        first, one = pieces[0]
        placed, target = place.placed, place.placed.tensor
        whole = torch.empty(target.shape, dtype=one.dtype, device=target.device)
        aside = replace(placed, tensor=whole)
        for slice_, value in pieces:
            part_of(aside, slice_).view.copy_(value)
        made = cast(whole, first.after)
        assert isinstance(made, Rows)
        assert place.scale is not None
        target.copy_(made.data)
        place.scale.copy_(made.scale)

    def _awaited(self) -> int:
        if self._expected is None:
            raise InputError([Problem("version", "none is awaited", "call expect first")])
        return self._expected


def _scales(place: Place, slice_: Slice) -> Tensor:
    """Return the scales of the rows that a slice fills."""
    assert place.scale is not None
    for part in place.placed.parts:
        first = slice_.box.offsets[0] - part.offsets[0]
        if 0 <= first < part.sizes[0]:
            row = part.local[0].start + first
            return place.scale[row : row + slice_.box.sizes[0]]
    raise ValueError(f"{slice_.tensor} has no {slice_.box} here")
