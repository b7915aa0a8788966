"""A verifier's score as a verdict; whatever it does short of ending its process has an outcome."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MAX_REWARD = 3.4028234663852886e38
"""Of float32, in which rewards are trained on: what lies beyond would be infinite there."""
OUTCOMES = ("ok", "memory", "output", "error", "timeout", "died")


class Verdict(NamedTuple):
    """What became of one check."""

    outcome: str
    """One of `OUTCOMES`."""
    value: float
    reason: str

    def bound(self, most_bytes: int) -> "Verdict":
        """Return the same, or an outcome of `output` where the reason is too long."""
        length = len(self.reason.encode(errors="surrogatepass"))
        if length <= most_bytes:
            return self
        reason = f"it answered {length:,} bytes, at most {most_bytes:,} are read"
        return Verdict("output", 0.0, reason)


class VerifierFailure(Exception):
    """A verifier that watches over a program says how the program failed."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def run_verifier(verifier: Callable[..., object], *arguments: object) -> Verdict:
    """Call a verifier; whatever it does short of ending the process becomes an outcome."""
    try:
        value, reason = _score(verifier(*arguments))
    except MemoryError:
        return Verdict("memory", 0.0, "it ran out of memory")
    except VerifierFailure as failure:
        return Verdict(failure.outcome, 0.0, str(failure))
    except BaseException as error:  # noqa: BLE001  also SystemExit: one check is no reason to end
        return Verdict("error", 0.0, f"{type(error).__name__}: {error}")
    if not abs(value) <= MAX_REWARD:
        what = f", and float32 ends at {MAX_REWARD:.2g}" if math.isfinite(value) else ""
        return Verdict("error", 0.0, f"its score is {value}{what}")
    return Verdict("ok", value, reason)


def read_verdict(message: object) -> Verdict:
    """Return a verdict as another process sent it; what is none is an `output` failure."""
    if isinstance(message, Mapping):
        parts: Mapping[str, Any] = message
        outcome, value, reason = (parts.get(name) for name in Verdict._fields)
        if outcome in OUTCOMES and isinstance(reason, str) and isinstance(value, int | float):
            return Verdict(outcome, float(value), reason)
    return Verdict("output", 0.0, "it answered what is no verdict")


def _score(answer: Any) -> tuple[float, str]:
    try:
        score, reason = answer if isinstance(answer, tuple) else (answer, "")
        if isinstance(score, str | bytes):
            raise TypeError  # "1.0" is what a model wrote, and no verdict on it
        return float(score), str(reason)
    except (TypeError, ValueError):
        what = f"it returned a {type(answer).__name__}, not a score, or a score and a reason"
        raise TypeError(what) from None
