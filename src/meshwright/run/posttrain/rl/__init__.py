"""The loop of reinforcement learning: our engine draws, verifiers judge, the trainer learns.

config             a run, as its file gives it; what it minimises; presets that were found to learn
task_loader        the environments it names
trainer            weights, optimizer and step: `policy_step` is the step itself, `step_preparation`
                   what it knows before it changes anything, `microbatch_loss` what a microbatch
                   costs, `critic` what learns values beside the policy
generation         who draws: the engine, its verifiers, weights on their way to it, a file
distributed        the same trainer where several ranks hold the model together
rendezvous         how the ranks of a run find each other
driver             carries out what `policy.rollout` decides, in every placement
run_state          the folder that a killed run goes on from
checkpoint_fingerprint   identifies the base weights of an adapter run
timeline_recorder  what both sides did and waited for
rl_run             all of it
policy_export      the policy as a Hugging Face folder

    from meshwright.run.posttrain.rl import get_sorting_digits_preset, run_rl
    outcome = run_rl(get_sorting_digits_preset(seed=0), say=print)
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.rl.config.presets import get_sorting_digits_preset
    from meshwright.run.posttrain.rl.config.rl_config import RLConfig
    from meshwright.run.posttrain.rl.rl_run import RLResult, run_rl

_HERE = "meshwright.run.posttrain.rl"
_MODULES = {
    "RLConfig": "meshwright.run.posttrain.rl.config.rl_config",
    "RLResult": "meshwright.run.posttrain.rl.rl_run",
    "run_rl": "meshwright.run.posttrain.rl.rl_run",
    "get_sorting_digits_preset": "meshwright.run.posttrain.rl.config.presets",
}

__all__ = ["RLConfig", "RLResult", "get_sorting_digits_preset", "run_rl"]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
