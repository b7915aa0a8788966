"""`Judges`: verifiers and reward models as one, who give a verdict on every check."""

from collections.abc import Sequence
from concurrent.futures import Future

from meshwright.run.posttrain.questions.scoring import RewardScorer
from meshwright.run.posttrain.rollouts.record import RewardPart
from meshwright.run.posttrain.rollouts.verifiers.check import Check
from meshwright.run.posttrain.rollouts.verifiers.pool import VerifierPool


class Judges:
    """A pool of verifiers with reward models beside it."""

    def __init__(self, pool: VerifierPool, scorers: Sequence[RewardScorer]) -> None:
        """Let models score where somebody asks them, while verifiers work in their processes."""
        self._pool, self._scorers = pool, {each.verifier: each for each in scorers}
        told = {each.verifier: each.fingerprint for each in scorers}
        self.fingerprints = {**pool.fingerprints, **told}
        """Of the verifiers' modules, and checksums of the models."""

    def submit(self, checks: Sequence[Check]) -> "list[Future[RewardPart]]":
        """Judge checks; each verdict comes as a part of a reward, also where it fails."""
        others = [check for check in checks if check.verifier not in self._scorers]
        verdicts = iter(self._pool.submit(others))
        scored: dict[str, list[Check]] = {}
        for check in checks:
            if check.verifier in self._scorers:
                scored.setdefault(check.verifier, []).append(check)
        parts = {who: iter(self._scorers[who].judge(mine)) for who, mine in scored.items()}
        return [
            _known(next(parts[check.verifier])) if check.verifier in parts else next(verdicts)
            for check in checks
        ]


def _known(part: RewardPart) -> "Future[RewardPart]":
    found: Future[RewardPart] = Future()
    found.set_result(part)
    return found
