"""Rollouts: what a model samples in environments, judged, recorded, and replayed bit by bit.

environment     what is asked of a model and said to its answers, in tokens
drawing         how it is asked
generate        groups of samples through the serving engine, by seeds that follow from their keys
verifiers       functions that judge, in child processes with bounds (names of their own)
record          a rollout with its tokens, log-probabilities, weights' version and rewards
log, table      files of rollouts: lines that a killed run goes on with, and Parquet
replay          the groups of a step, written down as they are drawn, or from a file
tasks           tasks that need no download

    task = SortingDigits()
    with VerifierPool(task.verifiers) as pool:
        drawing = Drawing(samples=16, max_tokens=task.max_tokens, stop_tokens=(task.words.end,))
        groups = Generator(llm.engine, task, pool, drawing).groups(0, range(32), version=0)
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.rollouts.drawing import Drawing
    from meshwright.run.posttrain.rollouts.environment import Environment, Reply
    from meshwright.run.posttrain.rollouts.generate import Generator
    from meshwright.run.posttrain.rollouts.log import RolloutLog, origin_of
    from meshwright.run.posttrain.rollouts.record import Key, RewardPart, Rollout, Turn
    from meshwright.run.posttrain.rollouts.replay import Draws, Recording, Replay
    from meshwright.run.posttrain.rollouts.table import read_rollouts, write_rollouts
    from meshwright.run.posttrain.rollouts.tasks.sorting import SortingDigits
    from meshwright.run.posttrain.rollouts.verifiers.check import Check

_HERE = "meshwright.run.posttrain.rollouts"
# By name on first use: a verifier that lives in here must not load all of it in its child.
_HOMES = {
    "Check": f"{_HERE}.verifiers.check",
    "Drawing": f"{_HERE}.drawing",
    "Draws": f"{_HERE}.replay",
    "Environment": f"{_HERE}.environment",
    "Generator": f"{_HERE}.generate",
    "Key": f"{_HERE}.record",
    "Recording": f"{_HERE}.replay",
    "Replay": f"{_HERE}.replay",
    "Reply": f"{_HERE}.environment",
    "RewardPart": f"{_HERE}.record",
    "Rollout": f"{_HERE}.record",
    "RolloutLog": f"{_HERE}.log",
    "SortingDigits": f"{_HERE}.tasks.sorting",
    "Turn": f"{_HERE}.record",
    "origin_of": f"{_HERE}.log",
    "read_rollouts": f"{_HERE}.table",
    "write_rollouts": f"{_HERE}.table",
}

__all__ = [
    "Check",
    "Drawing",
    "Draws",
    "Environment",
    "Generator",
    "Key",
    "Recording",
    "Replay",
    "Reply",
    "RewardPart",
    "Rollout",
    "RolloutLog",
    "SortingDigits",
    "Turn",
    "origin_of",
    "read_rollouts",
    "write_rollouts",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
