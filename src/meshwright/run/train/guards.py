"""`Guard`: what to do with a step whose loss or gradient is not what it should be.

A loss or gradient that is not finite is skipped, a few times in a row at most. A loss far above
the recent ones is a spike: its distance from their median is measured in robust standard
deviations (1.4826 times the median distance from the median; Iglewicz and Hoaglin, "How to Detect
and Handle Outliers", 1993), which spikes among them hardly move. Verdicts depend on nothing but
the settings and the figures seen, so a resumed run judges as an uninterrupted one would.
"""

import math
import statistics
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.bounds import Bounds
from meshwright.spec.read import read

SpikeAction = Literal["off", "warn", "skip", "stop"]
Action = Literal["go", "warn", "skip"]

_NORMAL = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a step is skipped or the run stopped."""

    most_skipped: int = 5
    """Steps skipped in a row before the run stops; 0 stops at the first."""
    spike_action: SpikeAction = "warn"
    """What a spike of the loss leads to."""
    spike_deviations: float = 8.0
    """How many robust standard deviations above the median a spike is."""
    spike_window: int = 128
    """Recent steps that the loss is compared with."""
    spike_after: int = 32
    """Steps before the first judgement: fewer say little about the spread."""
    spike_floor: float = 0.02
    """Least standard deviation, as a share of the median: nearly equal losses are no measure."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(0, most_skipped=self.most_skipped)
        bounds.one_of("spike_action", self.spike_action, get_args(SpikeAction))
        bounds.positive(spike_deviations=self.spike_deviations, spike_floor=self.spike_floor)
        bounds.count(2, spike_window=self.spike_window, spike_after=self.spike_after)
        if bounds.sound("spike_window", "spike_after") and self.spike_after > self.spike_window:
            what = f"{self.spike_after} steps are never in a window of {self.spike_window}"
            bounds.add("spike_after", what, f"use at most {self.spike_window}")
        bounds.require()


class GuardState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a guard remembers."""

    losses: tuple[float, ...] = ()
    """Of the recent steps, oldest first."""
    skipped_in_row: int = 0
    skipped: int = 0
    """In all of the run."""


class Verdict(NamedTuple):
    """What to do with a step, and why where it is not to go on."""

    action: Action
    why: str = ""


class TrainingStopped(MeshwrightError):
    """The figures of a run went wrong, and going on would waste time."""


class Guard:
    """Judges each step before its update is applied.

    verdict = guard.judge(step, loss, gradient_norm, last_good="checkpoints/000007-step-150")
    """

    def __init__(
        self, settings: GuardSettings | None = None, saved: dict[str, Any] | None = None
    ) -> None:
        """Start afresh, or with what `to_save` returned."""
        self._settings = settings or GuardSettings()
        self.state = GuardState() if saved is None else read(GuardState, saved, "guard")

    def judge(
        self, step: int, loss: float, gradient_norm: float = 0.0, *, last_good: object = None
    ) -> Verdict:
        """Return what to do with this step; raises `TrainingStopped` where the run is to end.

        `last_good` names the checkpoint to go back to, for the error only.
        """
        verdict, self.state = judged(self._settings, self.state, step, loss, gradient_norm)
        stop = verdict.action == "skip" and (
            self.state.skipped_in_row > self._settings.most_skipped
            or (_finite(loss, gradient_norm) and self._settings.spike_action == "stop")
        )
        if stop:
            raise TrainingStopped(_reason(step, verdict, self.state, last_good))
        return verdict

    def to_save(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint."""
        saved: dict[str, Any] = msgspec.to_builtins(self.state)
        return saved


def judged(
    settings: GuardSettings, state: GuardState, step: int, loss: float, gradient_norm: float
) -> tuple[Verdict, GuardState]:
    """Judge one step; return the verdict and what to remember."""
    if not _finite(loss, gradient_norm):
        name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient", gradient_norm)
        return Verdict("skip", f"the {name} of step {step} is {value}"), _skipped(state)
    spike = _spike(settings, state, step, loss)
    if spike and settings.spike_action in ("skip", "stop"):
        return Verdict("skip", spike), _skipped(state)
    seen = msgspec.structs.replace(
        state, losses=(*state.losses, loss)[-settings.spike_window :], skipped_in_row=0
    )
    return (Verdict("warn", spike) if spike else Verdict("go")), seen


def _spike(settings: GuardSettings, state: GuardState, step: int, loss: float) -> str:
    """Say how far a loss lies above the recent ones; empty where that is not far."""
    if settings.spike_action == "off" or len(state.losses) < settings.spike_after:
        return ""
    middle = statistics.median(state.losses)
    spread = statistics.median(abs(value - middle) for value in state.losses)
    deviation = max(_NORMAL * spread, settings.spike_floor * abs(middle))
    if loss - middle <= settings.spike_deviations * deviation:
        return ""
    far = f"{(loss - middle) / deviation:.1f} deviations" if deviation else "far"
    return (
        f"the loss of step {step} is {loss:.4g}, {far} above the median {middle:.4g} "
        f"of the last {len(state.losses)} steps"
    )


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _skipped(state: GuardState) -> GuardState:
    return msgspec.structs.replace(
        state, skipped=state.skipped + 1, skipped_in_row=state.skipped_in_row + 1
    )


def _reason(step: int, verdict: Verdict, state: GuardState, last_good: object) -> str:
    row = f" (step {state.skipped_in_row} in a row)" if state.skipped_in_row > 1 else ""
    back = f"the last good checkpoint is {last_good}" if last_good else "there is no checkpoint yet"
    return (
        f"stopped at step {step}: {verdict.why}{row}; {back}. Go back to it with a lower learning "
        "rate, or look at the data of these steps"
    )
