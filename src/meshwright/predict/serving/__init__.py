"""Serving predicted: what a step of an engine costs, what fits in memory, how requests flow."""

from meshwright.predict.serving.cost.kv_memory import ServingMemory, predict_serving_memory
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import (
    SGLANG,
    TENSORRT_LLM,
    TENSORRT_LLM_TORCH,
    VLLM,
    ServingEngine,
)
from meshwright.predict.serving.cost.step_cost import StepCost, build_step_cost
from meshwright.predict.serving.sim.uniform_flow import (
    FlowResult,
    UniformLoad,
    simulate_uniform_flow,
)

__all__ = [
    "SGLANG",
    "TENSORRT_LLM",
    "TENSORRT_LLM_TORCH",
    "VLLM",
    "FlowResult",
    "Quantization",
    "Replica",
    "ServingEngine",
    "ServingMemory",
    "StepCost",
    "UniformLoad",
    "build_step_cost",
    "predict_serving_memory",
    "simulate_uniform_flow",
]
