"""What one checkpoint of a job holds and costs. It knows nothing of failures.

Every number of the model and of its optimizer is written once: ranks that hold the same split it
between them, as Megatron's parallel saving and ByteCheckpoint do. Loading reads it once, and ranks
pass on what others need. Interference of writes in the background with training is left out.
"""

import msgspec

from meshwright.predict.long_run.reliability import Reliability
from meshwright.spec.cluster import Cluster
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout, stage_state_bytes
from meshwright.spec.model import Model


class CheckpointCost(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint: its size, and the time it takes from the job."""

    total_bytes: int
    """Parameters and optimizer states, each number once."""
    pause_s: float
    """Training stands still for it."""
    write_s: float
    """Writing to the storage; part of the pause where that blocks."""
    delay_s: float
    """From the end of the pause until it can be restored."""
    load_s: float
    """Reading it back."""


def checkpoint_bytes(model: Model, layout: Layout) -> int:
    """Return the bytes of parameters and optimizer states, in the layout's formats."""
    # A layout that does not divide anything holds each number exactly once.
    whole = Layout(
        precision=layout.precision,
        optimizer=layout.optimizer,
        master_precision=layout.master_precision,
        moment_precision=layout.moment_precision,
    )
    (states,) = stage_state_bytes(whole, model)
    return states.parameters + states.optimizer


def predict_checkpoint(work: JobSpec, reliability: Reliability) -> CheckpointCost:
    """Predict what one checkpoint costs."""
    cluster, gpus = work.cluster, work.layout.gpus
    size = checkpoint_bytes(work.model, work.layout)
    copy_s = size / gpus / _copy_rate(cluster)
    writes, reads = _storage_rates(cluster, gpus, reliability)
    pause_s, write_s = reliability.snapshot_s + copy_s, size / writes
    blocking = reliability.checkpointing == "blocking"
    return CheckpointCost(
        total_bytes=size,
        pause_s=pause_s + write_s if blocking else pause_s,
        write_s=write_s,
        delay_s=0.0 if blocking else write_s,
        load_s=size / reads + copy_s,
    )


def _copy_rate(cluster: Cluster) -> float:
    """Return the bytes per second that one GPU moves to its host while all of a node do."""
    host = cluster.host
    if host.memory_bytes_per_s is None:
        return host.gpu_bytes_per_s
    return min(host.gpu_bytes_per_s, host.memory_bytes_per_s / cluster.gpus_per_node)


def _storage_rates(cluster: Cluster, gpus: int, reliability: Reliability) -> tuple[float, float]:
    """Return the bytes per second that the job's nodes write and read together."""
    storage = cluster.storage
    if storage is None:
        assumed = gpus * reliability.gpu_storage_bytes_per_s
        return assumed, assumed
    nodes = -(-gpus // cluster.gpus_per_node)
    writes, reads = storage.write_bytes_per_s, storage.read_bytes_per_s
    if storage.node_write_bytes_per_s is not None:
        writes = min(writes, nodes * storage.node_write_bytes_per_s)
    if storage.node_read_bytes_per_s is not None:
        reads = min(reads, nodes * storage.node_read_bytes_per_s)
    return writes, reads
