"""The predicted world: what a run will need before anything is rented."""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.predict.event_sim.noise import StepNoise
    from meshwright.predict.event_sim.replicas import simulate_replicas
    from meshwright.predict.event_sim.step_simulation import SimulatedStep, simulate_step
    from meshwright.predict.long_run.long_run import LongRun, predict_long_run
    from meshwright.predict.long_run.reliability import Reliability
    from meshwright.predict.memory.memory_prediction import (
        MemoryPrediction,
        StageMemory,
        predict_memory,
    )
    from meshwright.predict.step.step_prediction import StepPrediction, predict_step
    from meshwright.predict.training_run.training_framework import TrainingFramework
    from meshwright.predict.training_run.training_run import TrainingRun
    from meshwright.predict.whatif.layout_suggestions import suggest_layouts
    from meshwright.predict.whatif.whatif import what_if

_MODULES = {
    "LongRun": "meshwright.predict.long_run.long_run",
    "MemoryPrediction": "meshwright.predict.memory.memory_prediction",
    "StepNoise": "meshwright.predict.event_sim.noise",
    "Reliability": "meshwright.predict.long_run.reliability",
    "TrainingRun": "meshwright.predict.training_run.training_run",
    "SimulatedStep": "meshwright.predict.event_sim.step_simulation",
    "TrainingFramework": "meshwright.predict.training_run.training_framework",
    "StageMemory": "meshwright.predict.memory.memory_prediction",
    "StepPrediction": "meshwright.predict.step.step_prediction",
    "suggest_layouts": "meshwright.predict.whatif.layout_suggestions",
    "predict_long_run": "meshwright.predict.long_run.long_run",
    "predict_memory": "meshwright.predict.memory.memory_prediction",
    "predict_step": "meshwright.predict.step.step_prediction",
    "simulate_replicas": "meshwright.predict.event_sim.replicas",
    "simulate_step": "meshwright.predict.event_sim.step_simulation",
    "what_if": "meshwright.predict.whatif.whatif",
}

__all__ = [
    "LongRun",
    "MemoryPrediction",
    "Reliability",
    "SimulatedStep",
    "StageMemory",
    "StepNoise",
    "StepPrediction",
    "TrainingFramework",
    "TrainingRun",
    "predict_long_run",
    "predict_memory",
    "predict_step",
    "simulate_replicas",
    "simulate_step",
    "suggest_layouts",
    "what_if",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
