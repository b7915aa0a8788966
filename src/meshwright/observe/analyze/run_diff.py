"""Two runs side by side, per step: what costs more, what costs less, what has no partner.

Phases add up to the step, so their changes add up to its change. Kernels and collectives run at
once, so theirs need not: a collective that got slower behind compute costs nothing.
"""

from typing import NamedTuple

from meshwright.observe.analyze.step_profile import CostsByName, PerStepCost, StepProfile
from meshwright.timeline.schema import TimelineSource

MIN_CHANGE_SHARE = 0.0005
"""A change of less than this part of a step is not listed as one."""


class CostChange(NamedTuple):
    """One thing in both runs, or in one."""

    category: str
    """`phase`, `idle`, `kernel`, `operator` or `collective`."""
    name: str
    a: PerStepCost | None
    """Per step; None where the first run has none of it."""
    b: PerStepCost | None

    @property
    def cost_ns(self) -> float:
        """What the second run pays more per step; below 0 it pays less."""
        return (self.b.ns if self.b else 0.0) - (self.a.ns if self.a else 0.0)

    @property
    def ratio(self) -> float | None:
        """The second over the first; None where either has none of it."""
        return self.b.ns / self.a.ns if self.a and self.b and self.a.ns else None


class RunDiff(NamedTuple):
    """Two runs side by side; of each table the greatest changes first."""

    a: StepProfile
    b: StepProfile
    phases: tuple[CostChange, ...]
    """In their own order."""
    idle: tuple[CostChange, ...]
    kernels: tuple[CostChange, ...]
    operators: tuple[CostChange, ...]
    collectives: tuple[CostChange, ...]
    notes: tuple[str, ...]
    """What cannot be compared, and why."""

    @property
    def cost_ns(self) -> float:
        """What a step of the second run takes longer."""
        return self.b.step_ns - self.a.step_ns

    @property
    def regressions(self) -> tuple[CostChange, ...]:
        """Kernels, collectives and causes of idleness that cost more, most costly first."""
        return tuple(sorted(self._noticed(1), key=lambda change: -change.cost_ns))

    @property
    def improvements(self) -> tuple[CostChange, ...]:
        """Those that cost less, the greatest gain first."""
        return tuple(sorted(self._noticed(-1), key=lambda change: change.cost_ns))

    @property
    def only_in_a(self) -> tuple[CostChange, ...]:
        """Kernels and collectives of the first run without a partner."""
        return tuple(c for c in (*self.kernels, *self.collectives) if c.b is None)

    @property
    def only_in_b(self) -> tuple[CostChange, ...]:
        """Kernels and collectives of the second run without a partner."""
        return tuple(c for c in (*self.kernels, *self.collectives) if c.a is None)

    def _noticed(self, sign: int) -> list[CostChange]:
        least = MIN_CHANGE_SHARE * max(self.a.step_ns, self.b.step_ns)
        rows = (*self.kernels, *self.collectives, *self.idle)
        return [change for change in rows if sign * change.cost_ns > least]


def diff_profiles(a: StepProfile, b: StepProfile) -> RunDiff:
    """Compare two runs; the first is what the second is held against."""
    predicted = TimelineSource.SIMULATED in (a.source, b.source)
    talk_a, talk_b = a.collectives, b.collectives
    if predicted:
        talk_a, talk_b = _by_kind(talk_a), _by_kind(talk_b)
    return RunDiff(
        a,
        b,
        tuple(CostChange("phase", name, a.phases[name], b.phases[name]) for name in a.phases),
        () if predicted else _changes("idle", a.idle, b.idle),
        () if predicted else _changes("kernel", a.kernels, b.kernels),
        () if predicted else _changes("operator", a.operators, b.operators),
        _changes("collective", talk_a, talk_b),
        tuple(_notes(a, b, predicted)),
    )


def _changes(what: str, a: CostsByName, b: CostsByName) -> tuple[CostChange, ...]:
    names = dict.fromkeys((*a, *b))
    rows = (CostChange(what, name, a.get(name), b.get(name)) for name in names)
    return tuple(sorted(rows, key=lambda change: -abs(change.cost_ns)))


def _by_kind(amounts: CostsByName) -> CostsByName:
    found: CostsByName = {}
    for name, amount in amounts.items():
        kind = name.split(" ")[0]
        found[kind] = found.get(kind, PerStepCost(0.0)).add(amount)
    return found


def _notes(a: StepProfile, b: StepProfile, predicted: bool) -> list[str]:
    notes = []
    if predicted:
        notes.append(
            "a prediction names its own spans: phases and collectives are compared, kernels and"
            " operators are not"
        )
    without = [
        one.label
        for one in (a, b)
        if one.source != TimelineSource.SIMULATED and not any(one.num_steps)
    ]
    if without:
        alone = "" if len(without) == 2 else ", which compares with the other only if it is one"
        notes.append(
            f"no steps are marked in {' and '.join(without)}: all of it counts as one{alone}"
        )
    if not predicted and set(a.ranks) != set(b.ranks):
        common = sorted(set(a.ranks) & set(b.ranks))
        fix = f"; --ranks {_listed(common)} compares those in both" if common else ""
        notes.append(
            f"{len(a.ranks)} ranks are compared with {len(b.ranks)}, by the means over each{fix}"
        )
    if not predicted and bool(a.operators) != bool(b.operators):
        bare = a.label if not a.operators else b.label
        notes.append(f"{bare} has no operators: they have no partner")
    return notes


def _listed(ranks: list[int]) -> str:
    """Ranks as `--ranks` takes them."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
