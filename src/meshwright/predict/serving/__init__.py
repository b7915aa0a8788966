"""Serving predicted: what a step of an engine costs, what fits in memory, how requests flow."""

from meshwright.predict.serving.engine import (
    SGLANG,
    TENSORRT_LLM,
    TENSORRT_LLM_TORCH,
    VLLM,
    Engine,
)
from meshwright.predict.serving.flow import Flowed, Load, flow
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.memory import ServingMemory, serving_memory
from meshwright.predict.serving.replica import Replica
from meshwright.predict.serving.step_cost import StepCost, step_cost

__all__ = [
    "SGLANG",
    "TENSORRT_LLM",
    "TENSORRT_LLM_TORCH",
    "VLLM",
    "Engine",
    "Flowed",
    "Formats",
    "Load",
    "Replica",
    "ServingMemory",
    "StepCost",
    "flow",
    "serving_memory",
    "step_cost",
]
