"""The engine and the number formats of a published serving run."""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.predict.serving.cost.quantization import KvFormat, Quantization, WeightFormat
from meshwright.predict.serving.cost.serving_engine import (
    SGLANG,
    TENSORRT_LLM,
    TENSORRT_LLM_EARLY,
    TENSORRT_LLM_TORCH,
    VLLM,
    ServingEngine,
)
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec.cluster import Gpu
from meshwright.spec.model import Model

_BLOCKS_OF_EIGHT = ("deepseek", "kimi", "minimax", "glm", "qwen3.5", "qwen3")
"""Models whose own checkpoints are scaled by blocks."""
_LATE_SINCE, _TORCH_SINCE = (0, 15), (0, 19)


def read_engine(row: Mapping[str, Any]) -> ServingEngine:
    """Return the engine that a row names."""
    text = str(row["engine"]).lower()
    if "gpt-fast" in text or "transformers" in text:
        raise UnusableRowError(f"no costs are known of {row['engine']}")
    if "sglang" in text:
        return SGLANG
    if "vllm" in text or "mango" in text or "aiter" in text:
        return VLLM
    if "tensorrt" not in text and not text.startswith("cuda"):
        raise UnusableRowError(f"no costs are known of {row['engine']}")
    if "silicon_sample" in str(row.get("source")):
        return TENSORRT_LLM_TORCH
    if "blogs/Best_perf" in str(row.get("source")):
        return TENSORRT_LLM_TORCH
    release = re.match(r"(\d+)\.(\d+)", str(row.get("engine_version") or ""))
    if release is None:
        return TENSORRT_LLM
    number = int(release[1]), int(release[2])
    if number >= _TORCH_SINCE:
        return TENSORRT_LLM_TORCH
    return TENSORRT_LLM if number >= _LATE_SINCE else TENSORRT_LLM_EARLY


def read_quantization(
    row: Mapping[str, Any], model: Model, gpu: Gpu, engine: ServingEngine
) -> Quantization:
    """Return how a row stored its weights, keys and values."""
    weights = _weights(row, model, gpu)
    named = str(row.get("precision_kv") or "").lower()
    tensorrt = engine.name.startswith("TensorRT")
    kv: KvFormat = "fp8" if tensorrt and weights not in ("bf16", "fp16") else "bf16"
    if "gpt-oss" in model.name and gpu.arch.startswith("sm_9"):
        kv = "bf16"
    if named:
        kv = "fp8" if "8" in named else "bf16"
    if kv == "fp8" and gpu.fp8_flops is None:
        kv = "bf16"
    return Quantization(weights=weights, kv=kv)


def _weights(row: Mapping[str, Any], model: Model, gpu: Gpu) -> WeightFormat:
    text = str(row.get("precision_weights") or "").lower()
    name = f"{row['model']} {row.get('source')}".lower()
    if "gpt-oss" in model.name:
        return "mxfp4"
    if not text:
        if str(row.get("concurrency_or_batch_or_rate")).lower().startswith("mlperf"):
            text = _usual(gpu)
        else:
            marks = ("nvfp4", "fp4", "fp8", "bf16", "int4")
            own = "fp8" if model.name.startswith(("deepseek", "minimax", "glm")) else "bf16"
            own = "int4" if re.search(r"kimi-k2\.[56]", name) else own
            own = "fp8" if "kimi-k2-" in name else own
            text = next((mark for mark in marks if mark in str(row["model"]).lower()), own)
    if "fp4" in text:
        return "mxfp4" if "mx" in text else "nvfp4"
    if "int4" in text:
        return "int4"
    if text in ("int8", "w8a8"):
        return "int8"
    if "fp8" in text:
        blocks = model.name.startswith(_BLOCKS_OF_EIGHT) and "perf-overview" not in name
        return "fp8-blockwise" if blocks else "fp8"
    return "bf16"


def _usual(gpu: Gpu) -> str:
    """Return the fewest bits that MLPerf's submitters use on a GPU."""
    if "nvfp4" in gpu.precisions:
        return "fp4"
    return "fp8" if gpu.fp8_flops is not None else "fp16"
