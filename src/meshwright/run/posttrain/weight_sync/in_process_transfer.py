"""`InProcessTransfer`: weights between ranks of one process, such as a trainer and its engine."""

from collections.abc import Mapping, Sequence

import torch

from meshwright.policy.resharding.weight_transfer import BUCKET_BYTES, WeightTransferPlan
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.bucket_packing import compute_bucket_bytes, pack_bucket
from meshwright.run.posttrain.weight_sync.weight_buffer import WeightBuffer
from meshwright.run.posttrain.weight_sync.weight_tensors import WeightTarget


class InProcessTransfer:
    """Carries versions from sources to targets of this process."""

    def __init__(
        self,
        plan: WeightTransferPlan,
        sources: Sequence[Mapping[str, ShardedTensor]],
        targets: Sequence[Mapping[str, WeightTarget]],
        *,
        most_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._plan, self._sources = plan, [dict(each) for each in sources]
        self._parcels = plan.make_buckets(most_bytes)
        self.buffers = [
            WeightBuffer(plan, rank, each, buckets=self._parcels)
            for rank, each in enumerate(targets)
        ]

    def transfer(self, version: int) -> None:
        """Gather a version; every target has all of it aside afterwards."""
        for each in self.buffers:
            each.begin_version(version)
        for parcel in self._parcels:
            tensors = self._sources[parcel.source]
            device = tensors[parcel.slices[0].tensor_name].tensor.device
            bytes_ = torch.empty(compute_bucket_bytes(parcel), dtype=torch.uint8, device=device)
            pack_bucket(parcel, tensors, version, self._plan.digest, bytes_)
            for rank in parcel.targets:
                self.buffers[rank].get_buffer(parcel).copy_(bytes_)
                self.buffers[rank].accept_bucket(parcel)

    def commit(self) -> None:
        """Let all targets take what they have gathered; none does where one lacks something."""
        for each in self.buffers:
            each.require_complete()
        for each in self.buffers:
            each.commit()
