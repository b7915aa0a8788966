"""The predicted world: what a run will need before anything is rented."""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.predict.changes import best_changes
    from meshwright.predict.long_run import LongRun, predict_long_run
    from meshwright.predict.memory import MemoryPrediction, StageMemory, predict_memory
    from meshwright.predict.reliability import Reliability
    from meshwright.predict.replicas import simulate_replicas
    from meshwright.predict.run import Run
    from meshwright.predict.simulate import SimulatedStep, simulate_step
    from meshwright.predict.simulate_noise import Noise
    from meshwright.predict.software import Software
    from meshwright.predict.step import StepPrediction, predict_step
    from meshwright.predict.whatif import what_if

_HOMES = {
    "LongRun": "meshwright.predict.long_run",
    "MemoryPrediction": "meshwright.predict.memory",
    "Noise": "meshwright.predict.simulate_noise",
    "Reliability": "meshwright.predict.reliability",
    "Run": "meshwright.predict.run",
    "SimulatedStep": "meshwright.predict.simulate",
    "Software": "meshwright.predict.software",
    "StageMemory": "meshwright.predict.memory",
    "StepPrediction": "meshwright.predict.step",
    "best_changes": "meshwright.predict.changes",
    "predict_long_run": "meshwright.predict.long_run",
    "predict_memory": "meshwright.predict.memory",
    "predict_step": "meshwright.predict.step",
    "simulate_replicas": "meshwright.predict.replicas",
    "simulate_step": "meshwright.predict.simulate",
    "what_if": "meshwright.predict.whatif",
}

__all__ = [
    "LongRun",
    "MemoryPrediction",
    "Noise",
    "Reliability",
    "Run",
    "SimulatedStep",
    "Software",
    "StageMemory",
    "StepPrediction",
    "best_changes",
    "predict_long_run",
    "predict_memory",
    "predict_step",
    "simulate_replicas",
    "simulate_step",
    "what_if",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
