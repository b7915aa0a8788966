"""`RunMonitor`: follows a run's folder, judges its steps, and keeps what the GPUs did meanwhile."""

from pathlib import Path
from typing import NamedTuple

from meshwright.observe.finding import Finding
from meshwright.observe.hardware.hardware_sample import GpuSample, HardwareSample, describe_changes
from meshwright.observe.twin.drift.drift_detector import DriftDetector, ExpectedStep, StepTimeChange
from meshwright.observe.twin.drift.drift_findings import build_drift_finding
from meshwright.observe.twin.drift.run_steps import (
    METRICS_FILE,
    MetricsTail,
    parse_step,
    read_sessions,
)
from meshwright.observe.twin.drift.slow_rank import find_slow_ranks

_KEPT = 4000
"""Samples of the hardware; at two a second, half an hour."""


class RunStatus(NamedTuple):
    """How a run does."""

    changes: tuple[StepTimeChange, ...]
    findings: tuple[Finding, ...]
    num_steps: int
    """Steps that were judged."""
    last_step: int
    """The newest step."""
    baseline_s: float | None
    """A step as it is settled now."""
    slowdown: StepTimeChange | None
    """The slowdown that lasts."""


class RunMonitor:
    """The steps of one run, as far as they were read."""

    def __init__(self, folder: Path, expected: ExpectedStep | None, num_ranks: int = 1) -> None:
        self.folder, self.expected, self._num_ranks = folder, expected, num_ranks
        self._rows = MetricsTail(folder / METRICS_FILE)
        self._detector = DriftDetector(expected)
        self._changes: list[StepTimeChange] = []
        self._samples: list[tuple[int, HardwareSample]] = []
        self.last_step = 0

    def poll(self) -> tuple[int, list[StepTimeChange]]:
        """Judge what has come; return how many steps, and what they tell."""
        count, found = 0, []
        for row in self._rows.read_new_rows():
            count += 1
            self.last_step = int(row["step"])
            change = self._detector.add(parse_step(row))
            if change is not None:
                found.append(change)
        self._changes += found
        return count, found

    def add_hardware_sample(self, time_s: float, gpus: tuple[GpuSample, ...]) -> None:
        """Keep what the GPUs do, at the step that was read last."""
        self._samples = [
            *self._samples[1 - _KEPT :],
            (self.last_step, HardwareSample(time_s, gpus)),
        ]

    def build_finding(self, change: StepTimeChange) -> Finding | None:
        """Tell a change with all that is known by now."""
        later = [one for one in self._changes if one.step > change.step]
        until = later[0].since_step if later else self.last_step + 1
        ended = next((one.step for one in later if one.kind == "recovered"), None)
        late: tuple[int, ...] = ()
        waits = any(one.term == "exchange" for one in change.terms)
        if change.kind == "slower" and waits:
            rise_s = change.after_s - change.before_s
            late = find_slow_ranks(self.folder / "timeline", change.since_step, rise_s)
        return build_drift_finding(
            change,
            expected=self.expected,
            num_ranks=self._num_ranks,
            late=late,
            seen=self._seen(change, until) if change.kind == "slower" else (),
            sessions=read_sessions(self.folder),
            ended=ended,
        )

    def _seen(self, change: StepTimeChange, until: int) -> tuple[str, ...]:
        before = [sample for step, sample in self._samples if step < change.since_step]
        after = [sample for step, sample in self._samples if change.since_step <= step < until]
        return describe_changes(before, after)

    def summarize(self) -> RunStatus:
        """Sum up."""
        found = (self.build_finding(change) for change in self._changes)
        return RunStatus(
            tuple(self._changes),
            tuple(one for one in found if one is not None),
            self._detector.taken,
            self.last_step,
            self._detector.baseline_s,
            self._detector.slowdown,
        )
