"""The loop of reinforcement learning: our engine draws, verifiers judge, the trainer learns.

settings       a run, as its file gives it; `objective` what it minimises
tasks          the environments it names
trainer        weights, optimizer and step; `policy_step` is the step itself, `prepare` what it
               knows before it changes anything, `judging` what a microbatch costs, `critic` what
               learns values beside the policy
sampling       the engine, its verifiers, and weights on their way to it
ranks          the same trainer where several ranks hold the model together
driving        carries out what `policy.rollout` decides, in every placement
engines        who draws: an engine in this thread, or a file; `engine_thread` beside the trainer
keeping        the folder that a killed run goes on from; `earlier` what is judged again then,
               `frozen_weights` whether an adapter still stands beside the weights it began with
running        all of it
export         the policy as a Hugging Face folder
presets        settings that were found to learn

    from meshwright.run.posttrain.loop import run, sorting_digits
    outcome = run(sorting_digits(seed=0), say=print)
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.loop.presets import sorting_digits
    from meshwright.run.posttrain.loop.running import Outcome, run
    from meshwright.run.posttrain.loop.settings import LoopSettings

_HERE = "meshwright.run.posttrain.loop"
_HOMES = {
    "LoopSettings": f"{_HERE}.settings",
    "Outcome": f"{_HERE}.running",
    "run": f"{_HERE}.running",
    "sorting_digits": f"{_HERE}.presets",
}

__all__ = ["LoopSettings", "Outcome", "run", "sorting_digits"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
