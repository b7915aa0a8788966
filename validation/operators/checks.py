"""Score the shipped cost functions on measurements that no constant was fitted to.

Each check returns rows of (what, number of measurements, median of predicted ÷ measured, mean
absolute error once that level is taken out). A level below 1 on a source that measured under
lasting load is the power limit, which the cost functions leave out.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.predict.cost import (
    DeviceCosts,
    apply_sustained_load,
    attention_flops,
    attention_s,
    build_device_costs,
    bytes_moved,
    gemm_s,
    grouped_gemm_s,
    linear_s,
    memory_s,
)
from meshwright.spec.catalog.hardware import list_gpus
from validation.operators import tables

Row = tuple[str, int, float, float]


def score(what: str, predicted: list[float], measured: list[float]) -> Row:
    """Return the level and the spread of a list of predictions."""
    ratio = np.array(predicted) / np.array(measured)
    level = float(np.median(ratio))
    return what, len(ratio), level, float(np.abs(ratio / level - 1.0).mean())


def h200_products() -> Iterator[Row]:
    """Products of the three kinds on an H200, and awkward ones (bf16 fits used serving tables)."""
    costs = build_device_costs(list_gpus()["h200-141g-sxm"])
    rows = tables.measured()["products"]
    kinds: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
        ("forward", "tn_s", lambda r: linear_s(costs, r["m"], r["n"], r["k"])),
        (
            "input gradient",
            "nn_s",
            lambda r: linear_s(costs, r["m"], r["n"], r["k"], part="input_gradient"),
        ),
        (
            "weight gradient, bf16",
            "nt_bf16_s",
            lambda r: gemm_s(costs, r["n"], r["k"], r["m"], layout="NT", out_bytes=2.0),
        ),
        (
            "weight gradient, added into fp32",
            "nt_accumulate_s",
            lambda r: linear_s(costs, r["m"], r["n"], r["k"], part="weight_gradient"),
        ),
    )
    for name, field, cost in kinds:
        mine = [row for row in rows if field in row]
        yield score(f"H200 {name}", [cost(r) for r in mine], [r[field] for r in mine])
    odd = tables.measured()["products_odd"]
    plain = [r for r in odd if "op" not in r]
    yield score(
        "H200 awkward sizes",
        [gemm_s(costs, r["m"], r["n"], r["k"]) for r in plain],
        [r["s"] for r in plain],
    )
    batched = [r for r in odd if "op" in r]
    yield score(
        "H200 batched, as in unfused attention",
        [gemm_s(costs, r["m"], r["n"], r["k"], batch=r["batch"]) for r in batched],
        [r["s"] for r in batched],
    )


def simumax_products() -> Iterator[Row]:
    """SimuMax's training products, measured under lasting load."""
    for name in ("a100-80g-pcie", "b200-180g-sxm"):
        gpu = list_gpus()[name]
        costs = build_device_costs(gpu)
        table = tables.simumax()[name]["products"]
        rows = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
        for layout in ("TN", "NN", "NT"):
            mine = [r for r in rows if r["layout"] == layout and r["out"] != "bf16"]
            mine = mine or [r for r in rows if r["layout"] == layout]
            yield score(
                f"SimuMax {name} {layout}",
                [
                    gemm_s(costs, r["m"], r["n"], r["k"], layout=layout, batch=r["batch"])
                    for r in mine
                ],
                [
                    2.0 * r["batch"] * r["m"] * r["n"] * r["k"]
                    / (r["efficiency"] * gpu.peak_flops("bf16"))
                    for r in mine
                ],
            )  # fmt: skip


def published_attention() -> Iterator[Row]:
    """Figures of the FlashAttention-3 paper for an H100."""
    text = (Path(__file__).parent / "published_attention.json").read_text(encoding="utf-8")
    for row in json.loads(text)["rows"]:
        costs = build_device_costs(list_gpus()[row["gpu"]])
        heads = 2048 // row["head_dim"]
        predicted, measured = [], []
        for seq, tflops in row["tflops"].items():
            shape = {"batch": 16384 // int(seq), "heads": heads, "head_dim": row["head_dim"]}
            mask = {"seq": int(seq), "mask": "full", "part": row["part"]}
            flops = attention_flops(**shape, **mask)
            measured.append(flops / (tflops * 1e12))
            predicted.append(
                attention_s(costs, **shape, kv_heads=heads, **mask, kernel=row["kernel"])
            )
        name = row.get("name", "FlashAttention-2")
        yield score(f"FA3 paper, {name} {row['part']}", predicted, measured)


def table_attention(data: Path) -> Iterator[Row]:
    """Serving tables of kernels and windows that were not fitted."""
    cases: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
        ("h100-80g-sxm", "FA3 tables, no window", lambda r: r["window"] == 0),
        ("h200-141g-sxm", "FA3 tables, no window", lambda r: r["window"] == 0),
        ("h200-141g-sxm", "FA3 tables, window 128 to 8192", lambda r: r["window"] > 0),
        ("b200-180g-sxm", "window 128 to 8192", lambda r: r["window"] > 0),
    )
    for device, what, keep in cases:
        rows = tables.attention(data, device)
        mask = keep(rows) & (rows["seq"] >= 2048) & (rows["heads"] >= 8) & (rows["s"] > 2e-4)
        mask &= (rows["window"] < rows["seq"]) & (rows["head_dim"] <= 128)
        rows = tables.pick(rows, mask)
        costs = build_device_costs(list_gpus()[device])
        predicted = [_table_attention_s(costs, rows, i) for i in range(len(rows["s"]))]
        yield score(f"{device} {what}", predicted, rows["s"].tolist())


def _table_attention_s(costs: DeviceCosts, rows: dict[str, Any], i: int) -> float:
    window = int(rows["window"][i])
    names = ("batch", "heads", "kv_heads", "head_dim", "seq")
    shape = {name: int(rows[name][i]) for name in names}
    return attention_s(costs, **shape, window=window or None)


def expert_layers(data: Path) -> Iterator[Row]:
    """TensorRT-LLM's whole expert layer against two grouped products and what lies between."""
    for device in ("h100-80g-sxm", "h200-141g-sxm", "b200-180g-sxm"):
        rows = tables.experts(data, device)
        costs = build_device_costs(list_gpus()[device])
        for low, high in ((256, 1024), (1024, 2**20)):
            mine = tables.pick(rows, (rows["tokens"] >= low) & (rows["tokens"] < high))
            predicted = []
            for experts, tokens, hidden, width in zip(
                *(mine[name] for name in ("experts", "tokens", "hidden", "width")), strict=True
            ):
                held, inner, model = int(experts), int(width), int(hidden)
                total = experts * tokens
                predicted.append(
                    grouped_gemm_s(costs, held, tokens, 2 * inner, model)
                    + grouped_gemm_s(costs, held, tokens, model, inner)
                    + memory_s(costs, "activation", bytes_moved("activation", 2 * inner * total))
                    + memory_s(costs, "permute", bytes_moved("permute", model * total))
                    + memory_s(costs, "unpermute", bytes_moved("unpermute", model * total))
                )
            what = f"{device} experts, {low}+ tokens each"
            yield score(what, predicted, mine["s"].tolist())


def simumax_grouped() -> Iterator[Row]:
    """SimuMax's grouped products: Transformer Engine's, one cuBLAS call per expert."""
    parts = {"fwd": "forward", "bwd_grad_act": "input_gradient", "bwd_grad_w": "weight_gradient"}
    for name in ("a100-80g-pcie", "b200-180g-sxm"):
        gpu = list_gpus()[name]
        costs = build_device_costs(gpu)
        table = tables.simumax()[name]["grouped"]
        rows = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
        for stage, part in parts.items():
            mine = [r for r in rows if r["stage"] == stage and r["tokens"] >= 512]
            predicted = [
                grouped_gemm_s(costs, r["experts"], r["tokens"], r["n"], r["k"], part=part)
                for r in mine
            ]
            measured = [
                2.0 * r["experts"] * r["tokens"] * r["n"] * r["k"]
                / (r["efficiency"] * gpu.peak_flops("bf16"))
                for r in mine
            ]  # fmt: skip
            yield score(f"SimuMax {name} grouped {part.replace('_', ' ')}", predicted, measured)


class LayerCheck(NamedTuple):
    """A decoder layer, forward and backward: predicted, and measured after seconds of load."""

    layer: str
    predicted_s: float
    loaded_s: float
    measured_s: float
    loaded_parts_s: tuple[float, float, float]
    """Products, attention and the rest."""
    measured_parts_s: tuple[float, float, float]


def layers() -> Iterator[LayerCheck]:
    """Whole decoder layers on an H200, compiled by torch and run in a CUDA graph."""
    cool = build_device_costs(list_gpus()["h200-141g-sxm"])
    loaded = apply_sustained_load(cool)
    for row in tables.measured()["layers"]:
        parts = _layer_s(loaded, row)
        yield LayerCheck(
            row["layer"],
            sum(_layer_s(cool, row)),
            sum(parts),
            row["both_sustained_s"],
            parts,
            (
                row["products_sustained_s"],
                row["attention_sustained_s"],
                row["other_sustained_s"],
            ),
        )


def _layer_s(costs: DeviceCosts, row: dict[str, Any]) -> tuple[float, float, float]:
    m, h, heads, kv, ffn = (row[name] for name in ("m", "h", "heads", "kv", "ffn"))
    products = attention = rest = 0.0
    for n, k in (((heads + 2 * kv) * 128, h), (h, heads * 128), (2 * ffn, h), (h, ffn)):
        products += linear_s(costs, m, n, k) + linear_s(costs, m, n, k, part="input_gradient")
        products += gemm_s(costs, n, k, m, layout="NT", out_bytes=2.0)
    shape = {"batch": 1, "heads": heads, "kv_heads": kv, "head_dim": 128, "seq": m}
    attention += attention_s(costs, **shape) + attention_s(costs, **shape, part="backward")
    for op, elements, times in (
        ("norm", m * h, 2),
        ("norm_backward", m * h, 2),
        ("residual", m * h, 4),
        ("activation", m * 2 * ffn, 1),
        ("activation_backward", m * 2 * ffn, 1),
    ):
        rest += times * memory_s(costs, op, bytes_moved(op, elements))  # type: ignore[arg-type]
    return products, attention, rest


def all_checks(data: Path) -> list[Row]:
    """Run every check."""
    return [
        *h200_products(),
        *simumax_products(),
        *published_attention(),
        *table_attention(data),
        *expert_layers(data),
        *simumax_grouped(),
    ]
