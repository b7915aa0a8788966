"""Patterns of device memory, from the profiler's counters."""

import re

import numpy as np

from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.timeline.columns import to_dictionary, to_numpy
from meshwright.timeline.schema import COUNTER_COLUMNS_BY_NAME

MIN_UNUSED_BYTES = 1 << 30
MIN_UNUSED_SHARE = 0.3
MIN_FILLED_SHARE = 0.5
"""Where less of the device's memory is reserved, nobody misses the rest."""
_COUNTER = re.compile(r"^memory (allocated|reserved) (gpu.*)$")


@detects_on_rank(
    Pattern(
        name="memory-fragmentation",
        title="Reserved memory is not used",
        family="memory",
        rule="the profile's memory counters (profile_memory=True): at their peaks, reserved "
        "exceeds allocated by 30 % and 1 GiB, and fills half of the device",
        cost_basis="memory, not time",
        remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or max_split_size_mb:128; "
        "mw memory SNAPSHOT shows where",
    )
)
def detect_memory_fragmentation(rank: RankContext) -> Detection | None:
    """Reserved against allocated."""
    counters = rank.rank_timeline.counters
    if not counters.num_rows:
        return None
    names, values = (
        to_dictionary(counters, COUNTER_COLUMNS_BY_NAME["name"]),
        to_numpy(counters, COUNTER_COLUMNS_BY_NAME["value"]),
    )
    peaks: dict[str, dict[str, float]] = {}
    for code, name in enumerate(names.values):
        match = _COUNTER.match(name)
        if match:
            own = values[names.codes == code]
            peaks.setdefault(match[2], {})[match[1]] = float(np.max(own, initial=0.0))
    whole = rank.find_device_bytes()
    for device, peak in peaks.items():
        reserved, used = peak.get("reserved", 0.0), peak.get("allocated", 0.0)
        unused = reserved - used
        if whole is not None and reserved < MIN_FILLED_SHARE * whole:
            continue
        if used and unused >= MIN_UNUSED_BYTES and unused >= MIN_UNUSED_SHARE * reserved:
            evidence = (
                f"{device}: {reserved / 2**30:.1f} GiB reserved at most, "
                f"{used / 2**30:.1f} GiB allocated at most",
            )
            return Detection(None, evidence)
    return None
