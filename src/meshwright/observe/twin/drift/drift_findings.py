"""What changed in a run's steps, as findings: what shows it, what it costs, what to look at."""

from collections.abc import Sequence
from itertools import pairwise

from meshwright.observe.finding import Finding
from meshwright.observe.twin.drift.drift_detector import (
    DriftTerm,
    ExpectedStep,
    StepTimeChange,
    TermChange,
)
from meshwright.observe.twin.drift.run_steps import TrainSessionInfo
from meshwright.spec.units import format_seconds

STEP_DRIFT_PATTERN, OFF_PREDICTION_PATTERN = "step-drift", "off-prediction"
_COST_BASES = {
    "off_prediction": "estimated: a settled step less the predicted one",
    "slower": "measured: a step less the one that was settled before",
}
_PART = 0.1
"""Of a change, what a term has to have of it to be named beside the first."""

TERM_DESCRIPTIONS: dict[DriftTerm, str] = {
    "data": "waiting for data",
    "between": "the host between steps",
    "gradients": "forward and backward",
    "exchange": "waiting for other ranks",
    "update": "the update",
}
_SLOWER: dict[DriftTerm, str] = {
    "data": "the loader does not keep up: more data.num_workers, tokens on a disk of the "
    "machine's own, and look for other readers of that disk",
    "between": "host-bound between steps: other programs on its cores (top), a slow disk "
    "under metrics.jsonl, outputs that take long (logging.every_steps)",
    "gradients": "the same kernels take longer: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER "
    "(throttling), other programs on the GPU or its host; where it starts at a restart of the "
    "run, compare versions; mw train --profile-steps and mw diff show the kernels",
    "exchange": "another rank or its link has become slow: mw analyze RUN/timeline names who is "
    "waited for; look at that node's clocks, cores and network",
    "update": "the update takes longer: memory clocks (nvidia-smi -q -d CLOCK), swapping of states "
    "in host memory, other programs on the device",
}
_ON_CORES = (
    "other programs on these cores (top), clocks held down by heat or to save power; where "
    "it starts at a restart of the run, compare versions; mw train --profile-steps and mw diff "
    "show what takes longer"
)
_UNKNOWN = (
    "metrics.jsonl has no step breakdown: mw train --profile-steps and mw diff show what takes "
    "longer"
)
_CALIBRATE = (
    "if the run is as it should be, the prediction is off: mw bench and mw calibrate measure this "
    "device, and --cluster names where it runs"
)


def build_drift_finding(
    change: StepTimeChange,
    *,
    expected: ExpectedStep | None = None,
    num_ranks: int = 1,
    late: Sequence[int] = (),
    seen: Sequence[str] = (),
    sessions: Sequence[TrainSessionInfo] = (),
    ended: int | None = None,
) -> Finding | None:
    """Tell a change as a finding; None where it costs nothing.

    `late` are ranks that are known to be slow, `seen` what the hardware did meanwhile, `ended` the
    step at which a slowdown was over.
    """
    if change.kind not in ("off_prediction", "slower"):
        return None
    off_prediction = change.kind == "off_prediction"
    moved = change.largest_change
    evidence = [_off_prediction(change, expected) if off_prediction else _slower(change, ended)]
    evidence += _terms(change)
    if not off_prediction and _alike(change):
        evidence.append("passes and update are slower alike: the device, rather than the work")
    if late:
        evidence.append(
            f"rank {', '.join(map(str, late))} works longer than before, and is waited for"
        )
    if (
        not off_prediction
        and expected is not None
        and not expected.is_within_interval(change.after_s)
    ):
        evidence.append(f"with that, steps leave the predicted band, {_band(expected)}")
    evidence += [*seen, *_restart(change, sessions)]
    slower = change.after_s > change.before_s
    remedy = _UNKNOWN if moved is None else _SLOWER[moved.term]
    if moved is not None and moved.term in ("gradients", "update") and _on_cores(sessions):
        remedy = _ON_CORES
    if off_prediction:
        remedy = f"{remedy}; {_CALIBRATE}" if slower else _CALIBRATE
    lost_s = change.after_s - change.before_s
    return Finding(
        name=OFF_PREDICTION_PATTERN if off_prediction else STEP_DRIFT_PATTERN,
        title=_title(change, moved),
        family="drift",
        evidence=tuple(evidence),
        ranks=tuple(late) or tuple(range(num_ranks)),
        cost_ms_per_step=1e3 * lost_s if slower else None,
        gpu_share=lost_s / change.after_s if slower else None,
        cost_basis=_COST_BASES[change.kind],
        remedy=remedy,
        spans=(),
    )


def _title(change: StepTimeChange, moved: TermChange | None) -> str:
    why = "" if moved is None else f": {TERM_DESCRIPTIONS[moved.term]}"
    if change.kind == "slower":
        return f"Steps have become {100 * change.relative_increase:.1f} % slower{why}"
    way = "slower" if change.relative_increase > 0 else "faster"
    return f"Steps are {100 * abs(change.relative_increase):.0f} % {way} than predicted{why}"


def _slower(change: StepTimeChange, ended: int | None) -> str:
    text = (
        f"from step {change.since_step:,} on {format_seconds(change.after_s)} instead of "
        f"{format_seconds(change.before_s)}, told after step {change.step:,}"
    )
    return text if ended is None else f"{text}; over by step {ended:,}"


def _off_prediction(change: StepTimeChange, expected: ExpectedStep | None) -> str:
    band = "" if expected is None else f" (band {_band(expected)})"
    return (
        f"a settled step takes {format_seconds(change.after_s)}, predicted are "
        f"{format_seconds(change.before_s)}{band}"
    )


def _band(expected: ExpectedStep) -> str:
    return f"{format_seconds(expected.low_s)} to {format_seconds(expected.high_s)}"


def _terms(change: StepTimeChange) -> list[str]:
    """Return the terms that make up the change, the first of them first."""
    whole_s = change.after_s - change.before_s
    parts = [one for one in change.terms if whole_s and one.increase_s / whole_s >= _PART]
    parts.sort(key=lambda one: -one.increase_s / whole_s)
    return [
        f"{TERM_DESCRIPTIONS[one.term]}: {format_seconds(one.after_s)} instead of "
        f"{format_seconds(one.before_s)}, {100 * one.increase_s / whole_s:.0f} % of the change"
        for one in parts
    ]


def _alike(change: StepTimeChange) -> bool:
    """Tell whether both parts that compute rose by at least half as much as the whole."""
    rises = [one.after_s / one.before_s - 1 for one in change.terms
             if one.term in ("gradients", "update") and one.before_s > 0]  # fmt: skip
    return len(rises) == 2 and min(rises) >= change.relative_increase / 2 > 0


def _on_cores(sessions: Sequence[TrainSessionInfo]) -> bool:
    return bool(sessions) and sessions[-1].device == "CPU"


def _restart(change: StepTimeChange, sessions: Sequence[TrainSessionInfo]) -> list[str]:
    """Say where the change begins with a session, and what differs from the session before."""
    if not change.starts_session:
        return []
    for old, new in pairwise(sessions):
        if abs(change.since_step - new.resumed_after_step) <= 16:
            now = {**new.versions, "device": new.device}
            was = {**old.versions, "device": old.device}
            other = [f"{name} {was[name]} → {now[name]}" for name in now
                     if name in was and was[name] != now[name]]  # fmt: skip
            what = ", ".join(other) or "its device and versions are those of the one before"
            return [
                f"starts at the restart of the run after step {new.resumed_after_step:,}: {what}"
            ]
    return ["starts at a restart of the run"]
