"""What a form of trace is: the columns that tell it, and how its blocks become rows."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.measures.windows import Floats
from meshwright.observe.fleet.sources.public.files import Part
from meshwright.observe.fleet.sources.source import rows_of

Tables = dict[str, pa.Table]


class Told(NamedTuple):
    """What a block is read with."""

    cluster: str
    seen_s: float
    part: Part
    first_row: int = 0
    """How many rows came before the block."""


class Form(NamedTuple):
    """One form of trace."""

    name: str
    columns: frozenset[str]
    """Columns that all tables of this form have."""
    read: Callable[[pa.Table, Told], Tables] | None
    """Makes rows of a block; None: it holds statistics, not telemetry."""
    cluster: str = ""
    """The cluster's name where the form tells it; empty: that of the folder."""
    whole: bool = False
    """Whether rows can only be made of the whole table."""
    without: frozenset[str] = frozenset()
    """Columns that tables of this form do not have."""


def form(
    name: str,
    columns: str,
    read: Callable[[pa.Table, Told], Tables] | None,
    cluster: str = "",
    *,
    whole: bool = False,
    without: str = "",
) -> Form:
    """Make a form from comma-separated names of columns."""
    return Form(name, _names(columns), read, cluster, whole, _names(without))


def recognised(part: Part, forms: Iterable[Form]) -> Form | None:
    """Return the form with the most columns that a part has all of."""
    names = frozenset(part.columns)
    fitting = [one for one in forms if one.columns <= names and not one.without & names]
    return max(fitting, key=lambda one: len(one.columns), default=None)


def jobs(block: pa.Table, told: Told, **columns: object) -> Tables:
    """Make rows of jobs; what all of them share is filled in."""
    alike = {
        "cluster": [told.cluster] * block.num_rows,
        "attempt": np.zeros(block.num_rows, dtype=np.int32),
        "seen_s": np.full(block.num_rows, told.seen_s),
    }
    return {"jobs": rows_of("jobs", alike | columns)}


def nodes(told: Told, node: object, since_s: Floats, **columns: object) -> Tables:
    """Make rows of nodes that are up, from `since_s` on."""
    rows = len(since_s)
    alike = {
        "cluster": [told.cluster] * rows,
        "node": node,
        "since_s": since_s,
        "state": ["up"] * rows,
        "seen_s": np.full(rows, told.seen_s),
    }
    return {"nodes": rows_of("nodes", alike | columns)}


def _names(words: str) -> frozenset[str]:
    return frozenset(word.strip() for word in words.split(",") if word.strip())
