"""What `mw analyze` says of a run beside what its device was measured to reach."""

import argparse
import statistics
from typing import Any, NamedTuple

from meshwright.cli.flags.calibration import choose_calibration
from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.compute_efficiency.achievable_peak import (
    apply_measured_peaks,
    compute_achievable_mfu,
)
from meshwright.observe.overview import RunOverview
from meshwright.spec.catalog import get_gpu


class AchievedRate(NamedTuple):
    """The share, for the screen and for scripts."""

    description: str = ""
    data: dict[str, Any] | None = None
    """None where no calibration is used."""


def compare_with_calibration(args: argparse.Namespace, found: RunOverview) -> AchievedRate:
    """Hold the products of ranks against a calibration of their device, where there is one."""
    named = sorted({one.device for one in found.ranks if one.device})
    if len(named) != 1:
        if args.calibration is not None:
            what = f"the trace is of {' and '.join(named) or 'no device of the catalog'}"
            raise InputError([Problem("--calibration", what, "leave it out")])
        return AchievedRate()
    device = get_gpu(named[0])
    used = choose_calibration(args, device)
    if used.calibration is None:
        return AchievedRate()
    best = apply_measured_peaks(device, used.calibration)
    shares = {one.rank: compute_achievable_mfu(one.mfu, device, best) for one in found.ranks}
    known = [share for share in shares.values() if share is not None]
    data = {
        **used.data,
        "share": statistics.median(known) if known else None,
        "ranks": [{"rank": rank, "share": share} for rank, share in shares.items()],
    }
    if not known:
        return AchievedRate("", data)
    assert used.path is not None, "a calibration that is used lies somewhere"
    words = f"{statistics.median(known):.1%} of what products were measured to reach on this device"
    return AchievedRate(f"{words} ({used.path.name})", data)
