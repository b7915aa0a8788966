"""What `mw analyze` says of a run beside what its device was measured to reach."""

import argparse
import statistics
from typing import Any, NamedTuple

from meshwright.cli.calibrations import used_for
from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.reached import reached, reached_share
from meshwright.observe.runs import Overview
from meshwright.spec.catalog import gpu


class Measured(NamedTuple):
    """The share, for the screen and for scripts."""

    words: str = ""
    data: dict[str, Any] | None = None
    """None where no calibration is used."""


def of_measured(args: argparse.Namespace, found: Overview) -> Measured:
    """Hold the products of ranks against a calibration of their device, where there is one."""
    named = sorted({one.device for one in found.ranks if one.device})
    if len(named) != 1:
        if args.calibration is not None:
            what = f"the trace is of {' and '.join(named) or 'no device of the catalog'}"
            raise InputError([Problem("--calibration", what, "leave it out")])
        return Measured()
    device = gpu(named[0])
    used = used_for(args, device)
    if used.calibration is None:
        return Measured()
    best = reached(device, used.calibration)
    shares = {one.rank: reached_share(one.mfu, device, best) for one in found.ranks}
    known = [share for share in shares.values() if share is not None]
    data = {
        **used.data,
        "share": statistics.median(known) if known else None,
        "ranks": [{"rank": rank, "share": share} for rank, share in shares.items()],
    }
    if not known:
        return Measured("", data)
    assert used.path is not None, "a calibration that is used lies somewhere"
    words = f"{statistics.median(known):.1%} of what products were measured to reach on this device"
    return Measured(f"{words} ({used.path.name})", data)
