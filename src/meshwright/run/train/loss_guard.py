"""`LossGuard`: what to do with a step whose loss or gradient is not what it should be.

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
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.serialization import decode

SpikeAction = Literal["off", "warn", "skip", "stop"]
GuardAction = Literal["go", "warn", "skip"]

_NORMAL = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


class LossGuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a step is skipped or the run stopped."""

    max_skipped_steps: int = 5
    """Steps skipped in a row before the run stops; 0 stops at the first."""
    spike_action: SpikeAction = "warn"
    """What a spike of the loss leads to."""
    spike_threshold: float = 8.0
    """How many robust standard deviations above the median a spike is."""
    spike_window: int = 128
    """Recent steps that the loss is compared with."""
    spike_min_steps: int = 32
    """Steps before the first judgement: fewer say little about the spread."""
    spike_min_deviation: float = 0.02
    """Least standard deviation, as a share of the median: nearly equal losses are no measure."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(0, max_skipped_steps=self.max_skipped_steps)
        bounds.one_of("spike_action", self.spike_action, get_args(SpikeAction))
        bounds.positive(
            spike_threshold=self.spike_threshold, spike_min_deviation=self.spike_min_deviation
        )
        bounds.count(2, spike_window=self.spike_window, spike_min_steps=self.spike_min_steps)
        if (
            bounds.is_valid("spike_window", "spike_min_steps")
            and self.spike_min_steps > self.spike_window
        ):
            what = f"{self.spike_min_steps} steps are never in a window of {self.spike_window}"
            bounds.add("spike_min_steps", what, f"use at most {self.spike_window}")
        bounds.raise_problems()


class LossGuardState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a guard remembers."""

    losses: tuple[float, ...] = ()
    """Of the recent steps, oldest first."""
    skipped_in_row: int = 0
    skipped: int = 0
    """In all of the run."""


class GuardDecision(NamedTuple):
    """What to do with a step, and why where it is not to go on."""

    action: GuardAction
    reason: str = ""


class TrainingStoppedError(MeshwrightError):
    """The figures of a run went wrong, and going on would waste time."""


class LossGuard:
    """Judges each step before its update is applied.

    decision = guard.check_step(step, loss, grad_norm, last_good="checkpoints/000007-step-150")
    """

    def __init__(
        self, settings: LossGuardConfig | None = None, saved: dict[str, Any] | None = None
    ) -> None:
        """Start without history, or with what `state_dict` returned."""
        self._settings = settings or LossGuardConfig()
        self.state = LossGuardState() if saved is None else decode(LossGuardState, saved, "guard")

    def check_step(
        self, step: int, loss: float, grad_norm: float = 0.0, *, last_good: object = None
    ) -> GuardDecision:
        """Return what to do with this step; raises `TrainingStoppedError` where the run is to end.

        `last_good` names the checkpoint to go back to, for the error only.
        """
        verdict, self.state = check_step_loss(self._settings, self.state, step, loss, grad_norm)
        stop = verdict.action == "skip" and (
            self.state.skipped_in_row > self._settings.max_skipped_steps
            or (_finite(loss, grad_norm) and self._settings.spike_action == "stop")
        )
        if stop:
            raise TrainingStoppedError(_reason(step, verdict, self.state, last_good))
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint."""
        saved: dict[str, Any] = msgspec.to_builtins(self.state)
        return saved


def check_step_loss(
    settings: LossGuardConfig, state: LossGuardState, step: int, loss: float, grad_norm: float
) -> tuple[GuardDecision, LossGuardState]:
    """Judge one step; return the verdict and what to remember."""
    if not _finite(loss, grad_norm):
        name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient", grad_norm)
        return GuardDecision("skip", f"the {name} of step {step} is {value}"), _skipped(state)
    spike = _spike(settings, state, step, loss)
    if spike and settings.spike_action in ("skip", "stop"):
        return GuardDecision("skip", spike), _skipped(state)
    seen = msgspec.structs.replace(
        state, losses=(*state.losses, loss)[-settings.spike_window :], skipped_in_row=0
    )
    return (GuardDecision("warn", spike) if spike else GuardDecision("go")), seen


def _spike(settings: LossGuardConfig, state: LossGuardState, step: int, loss: float) -> str:
    """Say how far a loss lies above the recent ones; empty where that is not far."""
    if settings.spike_action == "off" or len(state.losses) < settings.spike_min_steps:
        return ""
    middle = statistics.median(state.losses)
    spread = statistics.median(abs(value - middle) for value in state.losses)
    deviation = max(_NORMAL * spread, settings.spike_min_deviation * abs(middle))
    if loss - middle <= settings.spike_threshold * deviation:
        return ""
    far = f"{(loss - middle) / deviation:.1f} deviations" if deviation else "far"
    return (
        f"the loss of step {step} is {loss:.4g}, {far} above the median {middle:.4g} "
        f"of the last {len(state.losses)} steps"
    )


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _skipped(state: LossGuardState) -> LossGuardState:
    return msgspec.structs.replace(
        state, skipped=state.skipped + 1, skipped_in_row=state.skipped_in_row + 1
    )


def _reason(step: int, verdict: GuardDecision, state: LossGuardState, last_good: object) -> str:
    row = f" (step {state.skipped_in_row} in a row)" if state.skipped_in_row > 1 else ""
    back = f"the last good checkpoint is {last_good}" if last_good else "there is no checkpoint yet"
    return (
        f"stopped at step {step}: {verdict.reason}{row}; {back}. Go back to it with a lower "
        f"learning "
        "rate, or look at the data of these steps"
    )
