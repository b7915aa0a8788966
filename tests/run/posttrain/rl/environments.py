"""Environments whose verifiers hang, or die once."""

from typing import Any

from meshwright.run.posttrain.rollout import EnvironmentStep, RolloutTurn
from meshwright.run.posttrain.rollout.verifiers import VerifierJob

_JUDGES = "tests.run.posttrain.rollout.judges"


class _Asked:
    def __init__(self, verifier: str, job: dict[str, Any]) -> None:
        self.prompt, self._verifier, self._job = (12, 1, 10), verifier, job

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:
        job = {**self._job, "number": turn.tokens[0] % 3}
        return EnvironmentStep(
            done=True, verifier_jobs=(VerifierJob(name="it", verifier=self._verifier, payload=job),)
        )


class _Judged:
    name, may_block, vocab_size, max_tokens, stop_token_ids = "judged", False, 14, 3, (11,)

    def __init__(self, verifier: str, job: dict[str, Any], bad: range) -> None:
        mine = verifier if ":" in verifier else f"{_JUDGES}:{verifier}"
        self.verifiers = (mine, f"{_JUDGES}:double")
        self._job, self._bad = job, bad

    def reset(self, prompt: int, /) -> _Asked:
        return _Asked(self.verifiers[0 if prompt in self._bad else 1], self._job)


def judged(*, part: str, verifier: str, bad: int, first: int = 0, **job: Any) -> _Judged:
    """Ask the bad verifier about so many prompts, and a good one about the others."""
    del part
    return _Judged(verifier, job, range(first, first + bad))


def bare(*, part: str) -> object:
    """Return what is no environment."""
    return part.encode


def breaks(*, part: str) -> object:
    """Fail on the way."""
    return len(part) / 0
