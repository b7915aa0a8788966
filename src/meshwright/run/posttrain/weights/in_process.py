"""`InProcess`: weights between ranks that live in one process, such as a trainer and its engine."""

from collections.abc import Mapping, Sequence

import torch

from meshwright.policy.transfer import PARCEL_BYTES, Transfer
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights.arrivals import Arrivals
from meshwright.run.posttrain.weights.packing import pack, parcel_bytes
from meshwright.run.posttrain.weights.tensors import Place


class InProcess:
    """Carries versions from sources to targets of this process."""

    def __init__(
        self,
        plan: Transfer,
        sources: Sequence[Mapping[str, Placed]],
        targets: Sequence[Mapping[str, Place]],
        *,
        most_bytes: int = PARCEL_BYTES,
    ) -> None:
        self._plan, self._sources = plan, [dict(each) for each in sources]
        self._parcels = plan.parcels(most_bytes)
        self.arrivals = [
            Arrivals(plan, rank, each, parcels=self._parcels) for rank, each in enumerate(targets)
        ]

    def bring(self, version: int) -> None:
        """Gather a version; every target has all of it aside afterwards."""
        for each in self.arrivals:
            each.expect(version)
        for parcel in self._parcels:
            tensors = self._sources[parcel.source]
            device = tensors[parcel.slices[0].tensor].tensor.device
            bytes_ = torch.empty(parcel_bytes(parcel), dtype=torch.uint8, device=device)
            pack(parcel, tensors, version, self._plan.digest, bytes_)
            for rank in parcel.targets:
                self.arrivals[rank].room(parcel).copy_(bytes_)
                self.arrivals[rank].accept(parcel)

    def commit(self) -> None:
        """Let all targets take what they have gathered; none does where one lacks something."""
        for each in self.arrivals:
            each.require_all()
        for each in self.arrivals:
            each.commit()
