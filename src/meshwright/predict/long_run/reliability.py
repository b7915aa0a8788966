"""`Reliability`: what is assumed of a cluster and its software over weeks. It predicts nothing.

Every default carries its source. A run that knows better figures overrides them.
"""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker, check_integer, check_number

Checkpointing = Literal["asynchronous", "blocking"]


class Reliability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a job breaks, what it saves, how it comes back, and what stands by."""

    failures_per_gpu_hour: float | None = None
    """Interruptions of the job for one GPU and hour; None takes the cluster's figure."""
    usual_failures_per_gpu_hour: float = 1.973e-5
    """The same where neither says: 419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3
    report, arXiv 2407.21783). Meta's A100 clusters had 0.6 to 1.7 times that (arXiv 2410.21680)."""
    checkpointing: Checkpointing = "asynchronous"
    """Whether training goes on once the states are in host memory, or waits for the storage."""
    checkpoint_interval_s: float | None = None
    """Training time between two checkpoints, in whole steps; None takes the best."""
    snapshot_s: float = 1.0
    """Pause of a checkpoint beside the copy to the host: planning and barriers. Assumed, between
    0.34 and 0.59 s of ByteCheckpoint (arXiv 2407.20143, table 8) and 6 s of PyTorch's asynchronous
    saver (blog of June 2024)."""
    gpu_storage_bytes_per_s: float = 85e6
    """What the storage moves for each GPU where the cluster says nothing of it: 81 MB/s in Llama
    3's cluster (2 TB/s, 24,576 GPUs), 89 MB/s written in Selene (273 GB/s, 3,072 GPUs; arXiv
    2104.04473)."""
    detect_s: float = 60.0
    """From a failure until it is noticed: about 60 s where there is a message (ByteRobust, arXiv
    2509.16293). A hang waits for a timeout of 10 to 60 minutes."""
    diagnose_s: float = 300.0
    """Finding the node at fault: 2 to 15 minutes (ByteRobust); under 10 with detection on average
    (MegaScale, arXiv 2402.15627)."""
    replace_s: float = 60.0
    """Putting a waiting spare in its place: 46 to 65 s for jobs kept in place on 2,048 to 16,384
    GPUs; queueing the whole job again takes 454 to 768 s (ByteRobust, table 7)."""
    start_s: float = 180.0
    """Processes, communicators and warm-up. Assumed, between 30 s of MegaScale on over 10,000 GPUs
    and 361 s of Megatron-LM with a better store on 2,048."""
    node_loss_share: float = 0.78
    """Interruptions that take a node away for repair: 78 % had hardware behind them (Llama 3)."""
    repair_s: float = 3 * 86400.0
    """Mean time until such a node is back: 3 to 5 days for hardware (Arfeen et al., arXiv
    2504.06095); minutes where a provider hands out another one."""
    spares: int | None = None
    """Nodes that stand by, paid like the others; None takes the number that makes the run need the
    fewest GPU-hours."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("checkpointing", self.checkpointing, get_args(Checkpointing))
        bounds.positive(
            checkpoint_interval_s=self.checkpoint_interval_s,
            gpu_storage_bytes_per_s=self.gpu_storage_bytes_per_s,
        )
        bounds.not_negative(
            failures_per_gpu_hour=self.failures_per_gpu_hour,
            usual_failures_per_gpu_hour=self.usual_failures_per_gpu_hour,
            snapshot_s=self.snapshot_s,
            detect_s=self.detect_s,
            diagnose_s=self.diagnose_s,
            replace_s=self.replace_s,
            start_s=self.start_s,
            repair_s=self.repair_s,
        )
        if self.spares is not None:
            bounds.problems += check_integer("spares", self.spares, 0, 1_000_000)
        bounds.problems += check_number("node_loss_share", self.node_loss_share, 0.0, 1.0)
        bounds.raise_problems()


RELIABILITY = Reliability()
"""The values in use where none are given."""
