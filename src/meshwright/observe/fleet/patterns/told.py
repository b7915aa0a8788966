"""`Told`: a finding about a fleet: what it is, what shows it, its GPU-hours, whose it is."""

from meshwright.observe.finding import Finding

OPERATORS = "operators"
UNKNOWN = "unknown"
"""Owner of jobs of which no user is told."""


class Told(Finding, frozen=True, kw_only=True):
    """One inefficiency of a fleet: all cases of one pattern that one owner can mend."""

    ranks: tuple[int, ...] = ()
    cost_ms_per_step: float | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    family: str
    gpu_hours: float | None
    """What it cost; None where that is not known."""
    money: float | None
    """The same in dollars; None where an hour has no price."""
    owner: str
    """The user who can change it, `operators`, or `unknown`."""
    team: str
    cases: int
    """Jobs, nodes or series of jobs that show it."""
    jobs: tuple[str, ...]
    users: tuple[str, ...]
    """Whose jobs those are."""
    nodes: tuple[str, ...]
    cost: str
    """What the hours are made of, and whether they are measured or estimated."""
