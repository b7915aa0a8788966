"""The predicted world: what a run will need before anything is rented."""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.predict.memory import MemoryPrediction, StageMemory, predict_memory
    from meshwright.predict.run import Run
    from meshwright.predict.simulate import SimulatedStep, simulate_step
    from meshwright.predict.software import Software
    from meshwright.predict.step import StepPrediction, predict_step

_HOMES = {
    "MemoryPrediction": "meshwright.predict.memory",
    "Run": "meshwright.predict.run",
    "SimulatedStep": "meshwright.predict.simulate",
    "Software": "meshwright.predict.software",
    "StageMemory": "meshwright.predict.memory",
    "StepPrediction": "meshwright.predict.step",
    "predict_memory": "meshwright.predict.memory",
    "predict_step": "meshwright.predict.step",
    "simulate_step": "meshwright.predict.simulate",
}

__all__ = [
    "MemoryPrediction",
    "Run",
    "SimulatedStep",
    "Software",
    "StageMemory",
    "StepPrediction",
    "predict_memory",
    "predict_step",
    "simulate_step",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
