"""Patterns of device memory, from the profiler's counters."""

import re

import numpy as np

from meshwright.observe.findings.arithmetic import device_bytes
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.timeline.columns import coded, numbers
from meshwright.timeline.schema import COUNTERS

LEAST_UNUSED_BYTES = 1 << 30
LEAST_UNUSED = 0.3
LEAST_FILLED = 0.5
"""Where less of the device's memory is reserved, nobody misses the rest."""
_COUNTER = re.compile(r"^memory (allocated|reserved) (gpu.*)$")


@of_rank(
    Pattern(
        name="memory-fragmentation",
        title="Reserved memory is not used",
        family="memory",
        detected="the profile's memory counters (profile_memory=True): at their peaks, reserved "
        "exceeds allocated by 30 % and 1 GiB, and fills half of the device",
        cost="memory, not time",
        remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or max_split_size_mb:128; "
        "mw memory SNAPSHOT shows where",
    )
)
def memory_fragmentation(rank: Rank) -> Hit | None:
    """Reserved against allocated."""
    counters = rank.part.counters
    if not counters.num_rows:
        return None
    names, values = coded(counters, COUNTERS["name"]), numbers(counters, COUNTERS["value"])
    peaks: dict[str, dict[str, float]] = {}
    for code, name in enumerate(names.values):
        match = _COUNTER.match(name)
        if match:
            own = values[names.codes == code]
            peaks.setdefault(match[2], {})[match[1]] = float(np.max(own, initial=0.0))
    whole = device_bytes(rank)
    for device, peak in peaks.items():
        reserved, used = peak.get("reserved", 0.0), peak.get("allocated", 0.0)
        unused = reserved - used
        if whole is not None and reserved < LEAST_FILLED * whole:
            continue
        if used and unused >= LEAST_UNUSED_BYTES and unused >= LEAST_UNUSED * reserved:
            evidence = (
                f"{device}: {reserved / 2**30:.1f} GiB reserved at most, "
                f"{used / 2**30:.1f} GiB allocated at most",
            )
            return Hit(None, evidence)
    return None
