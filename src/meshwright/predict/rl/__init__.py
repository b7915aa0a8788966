"""Reinforcement learning predicted: steps in which engines generate and a trainer learns from it.

rl_setup          the question: model, GPUs of both sides, groups and their lengths
weight_sync       the time of the plan by which weights go to engines
trainer_costs     the time of a training step, a sync and a memory phase
rollout_engines   engines of `predict/serving` whose requests are groups
rl_simulation     the controller of `policy/rollout`, driven by a virtual clock
rl_metrics        step time, waits by name, the cost of skewed lengths
trainer_layout    the trainer's layout, which has room for what a step generates
rl_search         which placement, and how many GPUs for which side
"""

from meshwright.predict.rl.rl_metrics import RLMetrics, compute_rl_metrics, predict_rl
from meshwright.predict.rl.rl_search import RLAnswer, RLQuestion, plan_rl
from meshwright.predict.rl.rl_setup import RLSetup, RolloutBatch
from meshwright.predict.rl.rl_simulation import SimulatedRL, simulate_rl

__all__ = [
    "RLAnswer",
    "RLMetrics",
    "RLQuestion",
    "RLSetup",
    "RolloutBatch",
    "SimulatedRL",
    "compute_rl_metrics",
    "plan_rl",
    "predict_rl",
    "simulate_rl",
]
