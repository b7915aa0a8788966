"""Read measured operator tables: aiconfigurator's Parquet files and the JSON files beside this.

Every reader returns plain columns (a dict of NumPy arrays) in SI units, one entry per shape.
Nothing is fitted here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

Columns = dict[str, Any]

HERE = Path(__file__).parent
FOLDERS = {
    "a100-80g-sxm": "a100_sxm",
    "h100-80g-sxm": "h100_sxm",
    "h200-141g-sxm": "h200_sxm",
    "b200-180g-sxm": "b200_sxm",
    "gb200": "gb200",
    "b300-288g-sxm": "b300_sxm",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx-pro-6000-server": "rtx_pro_6000_server",
}
"""Folder of the tables per catalog name."""
# Kernels fit to train with: serving tables also hold slower fallbacks.
ATTENTION_KERNELS = {
    "a100-80g-sxm": {"sglang": "flash_attention", "vllm": "vllm_flash_attn"},
    "h100-80g-sxm": {"sglang": "fa3", "vllm": "vllm_flash_attn_fa3"},
    "h200-141g-sxm": {"sglang": "fa3", "vllm": "vllm_flash_attn_fa3"},
    "l40s": {"vllm": "vllm_flash_attn_fa2"},
    "rtx-pro-6000-server": {"vllm": "vllm_flash_attn_fa2", "sglang": "flashinfer"},
}
BLACKWELL_KERNELS = {"sglang": "trtllm_mha", "vllm": "vllm_flashinfer_trtllmprefill"}
OLD_VERSIONS = ("0.5.6.post2", "0.22.0", "0.19.0")


def data_folder(root: Path) -> Path:
    """Return the folder of the device tables inside an unpacked wheel."""
    found = sorted(root.glob("**/systems/data"))
    if not found:
        raise SystemExit(f"{root}: no systems/data folder; unzip the wheel aiconfigurator-core")
    return found[0]


def _files(data: Path, device: str, family: str, name: str) -> list[tuple[str, Path]]:
    paths = sorted((data / FOLDERS[device] / family).glob(f"*/*/{name}.parquet"))
    return [
        (path.parent.parent.name, path)
        for path in paths
        if not path.parent.name.startswith(OLD_VERSIONS)
    ]


def products(data: Path, device: str, kind: str, frameworks: tuple[str, ...]) -> Columns:
    """Return products of one input type: the median of the frameworks' times for each shape.

    Shapes that fewer than two frameworks measured are left out where two or more are asked for.
    """
    columns = {}
    for framework, path in _files(data, device, "gemm", "gemm_perf"):
        if framework not in frameworks:
            continue
        table = pd.read_parquet(path)
        table = table[(table.gemm_dtype == kind) & (table.latency > 0)]
        if len(table):
            columns[framework] = table.groupby(["m", "n", "k"]).latency.median() * 1e-3
    if not columns:
        return {}
    wide = pd.concat(columns, axis=1)
    least = len(columns) if device.startswith("a100") else min(2, len(columns))
    wide = wide[wide.notna().sum(axis=1) >= least]
    median = wide.median(axis=1)
    spread = wide.sub(median, axis=0).abs().div(median, axis=0).mean(axis=1)
    rows = median.rename("s").reset_index()
    result: Columns = {name: rows[name].to_numpy(float) for name in ("m", "n", "k", "s")}
    if len(columns) > 1:
        result["spread"] = spread.to_numpy(float)
    result["fold"] = fold(rows["n"].to_numpy(), rows["k"].to_numpy())
    return result


def attention(data: Path, device: str) -> Columns:
    """Return causal forward attention: the median of the frameworks' times for each shape."""
    kernels = ATTENTION_KERNELS.get(device, BLACKWELL_KERNELS)
    tables = []
    for framework, path in _files(data, device, "attention", "context_attention_perf"):
        if framework not in kernels:
            continue
        table = pd.read_parquet(path)
        table = table[
            (table.attn_dtype == "bfloat16")
            & (table.kv_cache_dtype == "bfloat16")
            & (table.kernel_source == kernels[framework])
            & (table.latency > 0)
            & (table.step == 0)
            & (table.head_dim <= 256)
        ]
        tables.append(table.assign(window=table.get("window_size", 0)))
    if not tables:
        return {}
    keys = ["batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "window"]
    rows = pd.concat(tables).groupby(keys).latency.median().reset_index()
    names = ("batch", "seq", "heads", "kv_heads", "head_dim", "window")
    result: Columns = {
        name: rows[key].to_numpy(float) for name, key in zip(names, keys, strict=True)
    }
    result["value_dim"] = result["head_dim"]
    result["causal"] = np.ones(len(rows), dtype=bool)
    result["s"] = rows["latency"].to_numpy(float) * 1e-3
    result["fold"] = fold(
        (rows.num_heads * 131 + rows.num_key_value_heads).to_numpy(),
        (rows.head_dim * 17 + rows.batch_size).to_numpy(),
    )
    return result


def experts(data: Path, device: str) -> Columns:
    """Return TensorRT-LLM's fused experts (two products, activation, permutes), balanced."""
    tables = [
        pd.read_parquet(path)
        for framework, path in _files(data, device, "moe", "moe_perf")
        if framework == "trtllm"
    ]
    if not tables:
        return {}
    rows = pd.concat(tables)
    rows = rows[
        (rows.moe_dtype == "bfloat16")
        & (rows.distribution == "balanced")
        & rows.kernel_source.str.contains("cutlass")
        & (rows.latency > 0)
    ]
    held = rows.num_experts / rows.moe_ep_size
    width = rows.inter_size / rows.moe_tp_size
    tokens = rows.num_tokens * rows.topk / rows.num_experts
    keep = ((tokens >= 256) & (held >= 1) & (width >= 512) & (held % 1 == 0)).to_numpy()
    return {
        "experts": held.to_numpy(float)[keep],
        "tokens": tokens.to_numpy(float)[keep],
        "hidden": rows.hidden_size.to_numpy(float)[keep],
        "width": width.to_numpy(float)[keep],
        "s": rows.latency.to_numpy(float)[keep] * 1e-3,
    }


def quantise(data: Path, device: str) -> Columns:
    """Return vLLM's static quantisation from bf16 to fp8, large sizes only."""
    for framework, path in _files(data, device, "quantize", "scale_matrix_perf"):
        if framework == "vllm":
            rows = pd.read_parquet(path)
            rows = rows[(rows.m >= 4096) & (rows.k >= 4096) & (rows.latency > 0)]
            elements = (rows.m * rows.k).to_numpy(float)
            return {"bytes": 3.0 * elements, "s": rows.latency.to_numpy(float) * 1e-3}
    return {}


def measured() -> dict[str, list[dict[str, Any]]]:
    """Return what `measure.py` wrote on one H200."""
    text = (HERE / "h200_measured.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def simumax() -> dict[str, Any]:
    """Return the operator efficiencies that SimuMax publishes for an A100-PCIe and a B200."""
    text = (HERE / "simumax_operators.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def columns(rows: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return the named fields of JSON rows as arrays."""
    return [np.array([row[name] for row in rows], dtype=float) for name in names]


def fold(first: Any, second: Any) -> Any:
    """Return 0 or 1 per row, the same for rows that share a pair of sizes."""
    mixed = (first.astype(np.int64) * 2654435761 + second.astype(np.int64) * 40503) % 2**31
    return (mixed // 7919) % 2


def pick(rows: Columns, keep: Any) -> Columns:
    """Return the rows that a mask keeps."""
    return {name: column[keep] for name, column in rows.items()}
