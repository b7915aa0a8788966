"""The account of a fleet: every GPU-hour of a window in exactly one bucket, and what follows."""

from meshwright.fleet.account.account import GpuHourAccount, build_account, to_gpu_hours
from meshwright.fleet.account.buckets import (
    ALLOCATED_CELLS,
    BUCKET_TITLES,
    BUCKETS,
    EVIDENCE_TITLES,
)

__all__ = [
    "ALLOCATED_CELLS",
    "BUCKETS",
    "BUCKET_TITLES",
    "EVIDENCE_TITLES",
    "GpuHourAccount",
    "build_account",
    "to_gpu_hours",
]
