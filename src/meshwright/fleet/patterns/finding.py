"""`FleetFinding`: a finding about a fleet, with its evidence, GPU-hours and owner."""

from meshwright.observe.finding import Finding

OPERATOR_OWNER = "operators"
UNKNOWN_OWNER = "unknown"
"""Owner of jobs of which no user is told."""


class FleetFinding(Finding, frozen=True, kw_only=True):
    """One inefficiency of a fleet: all cases of one pattern that one owner can mend."""

    ranks: tuple[int, ...] = ()
    cost_ms_per_step: float | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    gpu_hours: float | None
    """What it cost; None where that is not known."""
    dollars: float | None
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
