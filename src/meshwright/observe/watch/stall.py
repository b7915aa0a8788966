"""How long a job may go without a step before it is asked where it stands."""

STEPS = 5
"""So many usual steps are waited for, where that is longer than the patience given."""
BEFORE_FIRST = 5
"""Times the patience before the first step: loading, compiling and connecting take long."""


def limit_s(patience_s: float, step_s: float | None) -> float:
    """Return how long no step may end; `step_s` is the usual one, None before the first."""
    if step_s is None:
        return BEFORE_FIRST * patience_s
    return max(patience_s, STEPS * step_s)
