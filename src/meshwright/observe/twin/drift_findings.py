"""What changed in a run's steps, as findings: what shows it, what it costs, what to look at."""

from collections.abc import Sequence
from itertools import pairwise

from meshwright.observe.finding import Finding
from meshwright.observe.twin.drift import Change, Expected, Term, TermChange
from meshwright.observe.twin.drift_run import Sitting
from meshwright.spec.units import format_seconds

DRIFT, AWAY = "step-drift", "away-from-prediction"
_PART = 0.1
"""Of a change, what a term has to have of it to be named beside the first."""

WORDS: dict[Term, str] = {
    "data": "waiting for data",
    "between": "the host between steps",
    "gradients": "forward and backward",
    "exchange": "waiting for other ranks",
    "update": "the update",
}
_SLOWER: dict[Term, str] = {
    "data": "the loader does not keep up: more data.workers, tokens on a disk of the "
    "machine's own, and look for other readers of that disk",
    "between": "the host is late between steps: other programs on its cores (top), a slow disk "
    "under metrics.jsonl, outputs that take long (output.every_steps)",
    "gradients": "the same passes take longer: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER "
    "(throttling), other programs on the GPU or its host; where a sitting began with it, compare "
    "its versions; mw train --profile and mw diff show the kernels",
    "exchange": "another rank or its link has become slow: mw analyze RUN/timeline names who is "
    "waited for; look at that node's clocks, cores and network",
    "update": "the update takes longer: memory clocks (nvidia-smi -q -d CLOCK), swapping of states "
    "in host memory, other programs on the device",
}
_ON_CORES = (
    "other programs on these cores (top), clocks held down by heat or to save power; where a "
    "sitting began with it, compare its versions; mw train --profile and mw diff show what takes "
    "longer"
)
_UNKNOWN = "the rows tell no parts of a step: mw train --profile and mw diff show what takes longer"
_CALIBRATE = (
    "if the run is as it should be, the prediction is off: mw bench and mw calibrate measure this "
    "device, and --cluster names where it runs"
)


def finding_of(
    change: Change,
    *,
    expected: Expected | None = None,
    num_ranks: int = 1,
    late: Sequence[int] = (),
    seen: Sequence[str] = (),
    sittings: Sequence[Sitting] = (),
    ended: int | None = None,
) -> Finding | None:
    """Tell a change as a finding; None where it costs nothing.

    `late` are ranks that are known to be slow, `seen` what the hardware did meanwhile, `ended` the
    step at which a slowdown was over.
    """
    if change.kind not in ("away", "slower"):
        return None
    away = change.kind == "away"
    moved = change.moved
    evidence = [_away(change, expected) if away else _slower(change, ended)]
    evidence += _terms(change)
    if not away and _alike(change):
        evidence.append("passes and update are slower alike: the device, rather than the work")
    if late:
        evidence.append(
            f"rank {', '.join(map(str, late))} works longer than before, and is waited for"
        )
    if not away and expected is not None and not expected.holds(change.after_s):
        evidence.append(f"with that, steps leave the predicted band, {_band(expected)}")
    evidence += [*seen, *_sat(change, sittings)]
    slower = change.after_s > change.before_s
    remedy = _UNKNOWN if moved is None else _SLOWER[moved.term]
    if moved is not None and moved.term in ("gradients", "update") and _on_cores(sittings):
        remedy = _ON_CORES
    if away:
        remedy = f"{remedy}; {_CALIBRATE}" if slower else _CALIBRATE
    lost_s = change.after_s - change.before_s
    return Finding(
        name=AWAY if away else DRIFT,
        title=_title(change, moved),
        evidence=tuple(evidence),
        ranks=tuple(late) or tuple(range(num_ranks)),
        cost_ms_per_step=1e3 * lost_s if slower else None,
        gpu_share=lost_s / change.after_s if slower else None,
        remedy=remedy,
        spans=(),
    )


def _title(change: Change, moved: TermChange | None) -> str:
    why = "" if moved is None else f": {WORDS[moved.term]}"
    if change.kind == "slower":
        return f"Steps have become {100 * change.rise:.1f} % slower{why}"
    way = "slower" if change.rise > 0 else "faster"
    return f"Steps are {100 * abs(change.rise):.0f} % {way} than predicted{why}"


def _slower(change: Change, ended: int | None) -> str:
    text = (
        f"from step {change.since:,} on {format_seconds(change.after_s)} instead of "
        f"{format_seconds(change.before_s)}, told after step {change.step:,}"
    )
    return text if ended is None else f"{text}; over by step {ended:,}"


def _away(change: Change, expected: Expected | None) -> str:
    band = "" if expected is None else f" (band {_band(expected)})"
    return (
        f"a settled step takes {format_seconds(change.after_s)}, predicted are "
        f"{format_seconds(change.before_s)}{band}"
    )


def _band(expected: Expected) -> str:
    return f"{format_seconds(expected.low_s)} to {format_seconds(expected.high_s)}"


def _terms(change: Change) -> list[str]:
    """Return the terms that make up the change, the first of them first."""
    whole_s = change.after_s - change.before_s
    parts = [one for one in change.terms if whole_s and one.rise_s / whole_s >= _PART]
    parts.sort(key=lambda one: -one.rise_s / whole_s)
    return [
        f"{WORDS[one.term]}: {format_seconds(one.after_s)} instead of "
        f"{format_seconds(one.before_s)}, {100 * one.rise_s / whole_s:.0f} % of the change"
        for one in parts
    ]


def _alike(change: Change) -> bool:
    """Tell whether both parts that compute rose by at least half as much as the whole."""
    rises = [one.after_s / one.before_s - 1 for one in change.terms
             if one.term in ("gradients", "update") and one.before_s > 0]  # fmt: skip
    return len(rises) == 2 and min(rises) >= change.rise / 2 > 0


def _on_cores(sittings: Sequence[Sitting]) -> bool:
    return bool(sittings) and sittings[-1].device == "CPU"


def _sat(change: Change, sittings: Sequence[Sitting]) -> list[str]:
    """Say where it begins with a sitting, and what that has that the one before had not."""
    if not change.begins:
        return []
    for old, new in pairwise(sittings):
        if abs(change.since - new.after) <= 16:
            now = {**new.versions, "device": new.device}
            was = {**old.versions, "device": old.device}
            other = [f"{name} {was[name]} → {now[name]}" for name in now
                     if name in was and was[name] != now[name]]  # fmt: skip
            what = ", ".join(other) or "its device and versions are those of the one before"
            return [f"it begins with the sitting after step {new.after:,}: {what}"]
    return ["it begins with a sitting"]
