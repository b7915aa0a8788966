"""`RunWatch`: follows a run's folder, judges its steps, and keeps what the GPUs did meanwhile."""

from pathlib import Path
from typing import NamedTuple

from meshwright.observe.finding import Finding
from meshwright.observe.twin.drift import Change, Detector, Expected
from meshwright.observe.twin.drift_findings import finding_of
from meshwright.observe.twin.drift_ranks import late_ranks
from meshwright.observe.twin.drift_run import ROWS, Rows, sittings_of, step_of
from meshwright.observe.watch.hardware import Gpu, Sample, changes

_KEPT = 4000
"""Samples of the hardware; at two a second, half an hour."""


class Told(NamedTuple):
    """How a run does."""

    changes: tuple[Change, ...]
    findings: tuple[Finding, ...]
    steps: int
    """Steps that were judged."""
    last: int
    """The newest step."""
    usual_s: float | None
    """A step as it is settled now."""
    slower: Change | None
    """The slowdown that lasts."""


class RunWatch:
    """The steps of one run, as far as they were read."""

    def __init__(self, folder: Path, expected: Expected | None, num_ranks: int = 1) -> None:
        self.folder, self.expected, self._num_ranks = folder, expected, num_ranks
        self._rows = Rows(folder / ROWS)
        self._detector = Detector(expected)
        self._changes: list[Change] = []
        self._samples: list[tuple[int, Sample]] = []
        self.last = 0

    def read(self) -> tuple[int, list[Change]]:
        """Judge what has come; return how many steps, and what they tell."""
        count, found = 0, []
        for row in self._rows.new():
            count += 1
            self.last = int(row["step"])
            change = self._detector.add(step_of(row))
            if change is not None:
                found.append(change)
        self._changes += found
        return count, found

    def sample(self, time_s: float, gpus: tuple[Gpu, ...]) -> None:
        """Keep what the GPUs do, at the step that was read last."""
        self._samples = [*self._samples[1 - _KEPT :], (self.last, Sample(time_s, gpus))]

    def finding(self, change: Change) -> Finding | None:
        """Tell a change with all that is known by now."""
        later = [one for one in self._changes if one.step > change.step]
        until = later[0].since if later else self.last + 1
        ended = next((one.step for one in later if one.kind == "recovered"), None)
        late: tuple[int, ...] = ()
        waits = any(one.term == "exchange" for one in change.terms)
        if change.kind == "slower" and waits:
            rise_s = change.after_s - change.before_s
            late = late_ranks(self.folder / "timeline", change.since, rise_s)
        return finding_of(
            change,
            expected=self.expected,
            num_ranks=self._num_ranks,
            late=late,
            seen=self._seen(change, until) if change.kind == "slower" else (),
            sittings=sittings_of(self.folder),
            ended=ended,
        )

    def _seen(self, change: Change, until: int) -> tuple[str, ...]:
        before = [sample for step, sample in self._samples if step < change.since]
        after = [sample for step, sample in self._samples if change.since <= step < until]
        return changes(before, after)

    def told(self) -> Told:
        """Sum up."""
        found = (self.finding(change) for change in self._changes)
        return Told(
            tuple(self._changes),
            tuple(one for one in found if one is not None),
            self._detector.taken,
            self.last,
            self._detector.usual_s,
            self._detector.slower,
        )
