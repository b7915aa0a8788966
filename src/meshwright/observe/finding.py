"""The value that an inefficiency is told as: what it is, what shows it, its cost, its remedy."""

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One inefficiency of a run."""

    name: str
    """Its pattern, such as `data-loader-stall`."""
    title: str
    """The pattern in a few words."""
    family: str
    """The group of patterns that it belongs to."""
    evidence: tuple[str, ...]
    """What in the trace shows it, most telling first."""
    ranks: tuple[int, ...]
    """The ranks that show it."""
    cost_ms_per_step: float | None
    """What a step would save at most, in ms: the mean of the ranks that show it.

    None where steps or the cost are not known."""
    gpu_share: float | None
    """The same as a part of the time of all ranks' GPUs, 0 to 1; None where it is not known."""
    cost_basis: str
    """What the cost is made of, and whether it is measured or estimated."""
    remedy: str
    """What to change, with the exact setting."""
    spans: tuple[tuple[int, int, int], ...]
    """Where to look: rank, start and end in ns."""
    explained_by: str = ""
    """The pattern of which this is a consequence, in the main; mend that first. Empty for none."""
