"""Rollouts: what a model samples in environments, judged, recorded, and replayed bit by bit.

environment                what is asked of a model and said to its answers, in tokens
rollout_config             how it is asked
generator                  groups of samples through the serving engine, by seeds that follow from
                           their keys
verifiers                  functions that judge, in child processes with bounds (names of their own)
rollout, reward_component  a rollout with its tokens, log-probabilities, weight version and rewards
rollout_log, parquet_log   files of rollouts: lines that a killed run goes on with, and Parquet
replay                     the groups of a step, written down as they are drawn, or from a file
sorting_task               a task that needs no download

    task = SortingDigits()
    with VerifierPool(task.verifiers) as pool:
        config = RolloutConfig(
            group_size=16, max_tokens=task.max_tokens, stop_token_ids=(task.words.end,)
        )
        generator = RolloutGenerator(llm.engine, task, pool, config)
        groups = generator.get_groups(0, range(32), version=0)
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.rollout.environment import Environment, EnvironmentStep
    from meshwright.run.posttrain.rollout.generator import RolloutGenerator
    from meshwright.run.posttrain.rollout.parquet_log import read_rollouts, write_rollouts
    from meshwright.run.posttrain.rollout.replay import GroupSource, RecordingSource, ReplaySource
    from meshwright.run.posttrain.rollout.reward_component import RewardComponent
    from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey, RolloutTurn
    from meshwright.run.posttrain.rollout.rollout_config import RolloutConfig
    from meshwright.run.posttrain.rollout.rollout_log import RolloutLog, describe_origin
    from meshwright.run.posttrain.rollout.sorting_task.sorting_digits import SortingDigits
    from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob

_HERE = "meshwright.run.posttrain.rollout"
# By name on first use: a verifier that lives in here must not load all of it in its child.
_MODULES = {
    "VerifierJob": "meshwright.run.posttrain.rollout.verifiers.verifier_job",
    "RolloutConfig": "meshwright.run.posttrain.rollout.rollout_config",
    "GroupSource": "meshwright.run.posttrain.rollout.replay",
    "Environment": "meshwright.run.posttrain.rollout.environment",
    "RolloutGenerator": "meshwright.run.posttrain.rollout.generator",
    "RolloutKey": "meshwright.run.posttrain.rollout.rollout",
    "RecordingSource": "meshwright.run.posttrain.rollout.replay",
    "ReplaySource": "meshwright.run.posttrain.rollout.replay",
    "EnvironmentStep": "meshwright.run.posttrain.rollout.environment",
    "RewardComponent": "meshwright.run.posttrain.rollout.reward_component",
    "Rollout": "meshwright.run.posttrain.rollout.rollout",
    "RolloutLog": "meshwright.run.posttrain.rollout.rollout_log",
    "SortingDigits": "meshwright.run.posttrain.rollout.sorting_task.sorting_digits",
    "RolloutTurn": "meshwright.run.posttrain.rollout.rollout",
    "describe_origin": "meshwright.run.posttrain.rollout.rollout_log",
    "read_rollouts": "meshwright.run.posttrain.rollout.parquet_log",
    "write_rollouts": "meshwright.run.posttrain.rollout.parquet_log",
}

__all__ = [
    "Environment",
    "EnvironmentStep",
    "GroupSource",
    "RecordingSource",
    "ReplaySource",
    "RewardComponent",
    "Rollout",
    "RolloutConfig",
    "RolloutGenerator",
    "RolloutKey",
    "RolloutLog",
    "RolloutTurn",
    "SortingDigits",
    "VerifierJob",
    "describe_origin",
    "read_rollouts",
    "write_rollouts",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
