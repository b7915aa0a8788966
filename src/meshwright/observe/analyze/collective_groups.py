"""Who is in a process group, as far as a profile tells.

PyTorch's profiler lists the groups of its rank beside the trace (`pg_config`), in full where calls
cut long lists short. Our own trainer says its layout, which gives the groups their ranks.
"""

from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.timeline.once import once
from meshwright.timeline.timeline import Timeline


@once
def groups_listed(part: Timeline) -> dict[str, tuple[int, ...]]:
    """The ranks of each group that a rank's profile lists, by name."""
    try:
        told = msgspec.json.decode(part.metadata.get("distributed", "{}"), type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
    rows = told.get("pg_config")
    found = {}
    for row in rows if isinstance(rows, list) else ():
        ranks = row.get("ranks") if isinstance(row, dict) else None
        if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
            found[str(row.get("pg_name"))] = tuple(ranks)
    return found


def group_in_layout(part: Timeline, label: str) -> tuple[int, ...]:
    """The ranks that a group of our own trainer has; none where the profile tells no layout."""
    text = part.metadata.get("layout", "")
    if not text or not part.ranks:
        return ()
    from meshwright.spec.layout import Layout
    from meshwright.spec.layout.ranks import group_of
    from meshwright.spec.read import read

    try:
        layout = read(Layout, msgspec.json.decode(text))
        return tuple(sorted(group_of(layout, part.ranks[0], label)))
    except (InputError, msgspec.MsgspecError):
        return ()
