"""`ResumedRollouts`: what earlier sessions of a synchronous run left of a step that is done again.

Rollouts stand as they were recorded, and their tokens do in any case. Verdicts that failed stand
where a step was trained on without them, since weights that came of it drew the rollouts behind it.
Otherwise they are asked again: what ended the run was perhaps that they failed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.run.posttrain.rollout.replay import find_recorded_rollout
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey
from meshwright.run.posttrain.rollout.rollout_log import RolloutLog
from meshwright.spec.units import format_quantity


class ResumeMatch(NamedTuple):
    """What there is of the rollouts that are asked for."""

    complete: list[Rollout]
    """As they were recorded."""
    incomplete: dict[RolloutKey, Rollout]
    """Those that have to be judged again, or drawn to their end."""


class ResumedRollouts:
    """Looks asked rollouts up in a file, and puts new verdicts there."""

    def __init__(self, log: RolloutLog | None, say: Callable[[str], object], told: int = 0) -> None:
        """Look into a file as it is now; where there is none, nothing was left.

        So many steps were `told` of as trained.
        """
        self._log, self._say = log, say
        # A step before the newest weights was trained on too, even if it was never told of.
        self._trained = told if log is None else max(told, log.newest_version)
        self._open: set[RolloutKey] = set()
        self._judged: list[Rollout] = []

    def match(self, keys: Sequence[RolloutKey], version: int) -> ResumeMatch:
        """Return what is left of rollouts by weights of a version."""
        log = self._log
        there = [] if log is None else [key for key in keys if key in log.keys]
        if log is None or not there:
            return ResumeMatch([], {})
        # Prompts to spare that a step needed until a verdict came after all.
        old = {key for key in there if any(each < version for each in log.read(key).versions)}
        if old:
            log.retain(lambda key: key not in old)
        found = [find_recorded_rollout(log, key, version) for key in there if key not in old]
        again = {
            each.key: each for each in found if not each.has_reward and version >= self._trained
        }
        if again:
            self._open.update(again)
            some = format_quantity(len(again), "answer")
            self._say(f"{some} of an earlier run session had not been judged: judging again")
        return ResumeMatch([each for each in found if each.key not in again], again)

    def replace_if_rejudged(self, rollout: Rollout) -> bool:
        """Take a rollout that was judged again; tell whether it is one.

        The file has the old ones until all are judged, so that no tokens are lost.
        """
        if rollout.key not in self._open:
            return False
        self._open.remove(rollout.key)
        self._judged.append(rollout)
        if not self._open:
            assert self._log is not None, "what was left is in a file"
            self._log.replace(self._judged)
            self._judged = []
        return True
