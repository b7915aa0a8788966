"""The predicted world: what a run will need before anything is rented."""

from meshwright.predict.memory import MemoryPrediction, StageMemory, predict_memory

__all__ = ["MemoryPrediction", "StageMemory", "predict_memory"]
