"""Reinforcement learning predicted: steps in which engines generate and a trainer learns from it.

setup      what is asked: model, GPUs of both sides, groups and their lengths
sync       the plan by which weights go to engines, priced
prices     what a training step, a sync and a memory phase take
engines    engines of `predict/serving` whose requests are groups
simulate   the controller of `policy/rollout`, driven by a virtual clock
outcome    step time, waits by name, what skewed lengths cost
training   the trainer's layout, which has room for what a step generates
planning   which placement, and how many GPUs for which side
"""

from meshwright.predict.rl.outcome import Outcome, outcome_of, predict_rl
from meshwright.predict.rl.planning import Answer, Question, plan_rl
from meshwright.predict.rl.setup import Rounds, Setup
from meshwright.predict.rl.simulate import Simulated, simulate

__all__ = [
    "Answer",
    "Outcome",
    "Question",
    "Rounds",
    "Setup",
    "Simulated",
    "outcome_of",
    "plan_rl",
    "predict_rl",
    "simulate",
]
