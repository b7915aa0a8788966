"""Fit the operator constants to measured tables and write them with their held-out errors.

    python -m validation.operators.fit FOLDER

FOLDER is the unpacked wheel `aiconfigurator-core` 0.12.0 (PyPI, Apache-2.0), whose tables are not
copied here. It writes `src/meshwright/predict/cost/devices.toml` and the tables of
`docs/guide/operator-costs.md`. Errors are of rows whose (n, k), or heads and batch, were left out
of the fit: each half is scored with the constants of the other; the constants that ship come from
all rows. Needs pandas.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.observe.calibrate.least_squares import fit_log_constants
from meshwright.predict.cost.gemm_rate import INPUT_BYTES
from meshwright.spec.catalog.hardware import list_gpus
from meshwright.spec.cluster import Gpu
from validation.operators import forms, tables

Constants = dict[str, float]
Columns = dict[str, Any]
Model = Callable[[Constants, Columns], Any]

SOURCE = "aiconfigurator-core 0.12.0 tables"
MEASURED = "measured on one H200: validation/operators/h200_measured.json"
HOPPER = ("h100-80g-sxm", "h200-141g-sxm")
START = {
    "efficiency": 0.85,
    "bandwidth": 0.75,
    "launch_s": 2.5e-6,
    "fill_k": 120.0,
    "tail": 0.3,
    "tile_penalty": 0.03,
    "split_penalty": 3.0,
    "droop": 0.12,
}
MOST_ROWS = 6000
# Never fitted beyond what the constants mean.
CEILINGS = {"efficiency": 1.0, "bandwidth": 1.0, "tail": 1.0, "wave": 1.0}
FLOORS = {"launch_s": 1e-6}
FAR = 1e4
"""How many times larger or smaller than at its start any other constant may become."""


class Fitted:
    """Constants from all rows, with the errors of each half under the other's constants."""

    def __init__(self, constants: Constants, rows: Columns, errors: Any) -> None:
        self.constants = constants
        self.rows = rows
        self.errors = errors

    @property
    def error(self) -> float:
        """Mean absolute relative error on held-out rows."""
        return float(np.abs(self.errors).mean())

    @property
    def bias(self) -> float:
        """Mean signed relative error on held-out rows."""
        return float(self.errors.mean())


def bounded(constants: Constants) -> Constants:
    """Hold constants inside what they mean."""
    return {
        name: max(FLOORS.get(name, 0.0), min(CEILINGS.get(name, np.inf), value))
        for name, value in constants.items()
    }


def solve(
    model: Model, rows: Columns, start: Constants, free: tuple[str, ...], weights: Any = None
) -> Constants:
    """Fit the free constants to the logarithm of the times, outliers counting less."""
    count = len(rows["s"])
    keep = np.arange(count)
    if count > MOST_ROWS:
        keep = np.random.default_rng(0).choice(count, MOST_ROWS, replace=False)
    part = tables.pick(rows, keep)

    def constants(values: Any) -> Constants:
        return bounded({**start, **dict(zip(free, np.asarray(values).tolist(), strict=True))})

    def limits(name: str) -> tuple[float, float, float]:
        first = start[name]
        least, most = FLOORS.get(name, first / FAR), CEILINGS.get(name, first * FAR)
        return first, least, most

    found, _ = fit_log_constants(
        lambda values: model(constants(values), part),
        part["s"],
        [limits(name) for name in free],
        weights[keep] if weights is not None else 1.0,
    )
    return constants(found)


def cross_fit(
    model: Model,
    rows: Columns,
    start: Constants,
    free: tuple[str, ...],
    *,
    weights: Callable[[Columns], Any] | None = None,
    scored: Callable[[Columns], Any] | None = None,
) -> Fitted:
    """Fit all rows for the constants, and each half for the errors of the other."""
    errors = np.zeros(len(rows["s"]))
    for side in (0, 1):
        mine = rows["fold"] == side
        half = tables.pick(rows, mine)
        found = solve(model, half, start, free, weights(half) if weights else None)
        others = tables.pick(rows, ~mine)
        errors[~mine] = model(found, others) / others["s"] - 1.0
    constants = solve(model, rows, start, free, weights(rows) if weights else None)
    keep = scored(rows) if scored else np.ones(len(errors), dtype=bool)
    return Fitted(constants, tables.pick(rows, keep), errors[keep])


def training(rows: Columns) -> Any:
    """Mark the products that training has: no dimension below 512."""
    return (rows["m"] >= 512) & (rows["n"] >= 512) & (rows["k"] >= 512)


def _weights(rows: Columns) -> Any:
    middle = (rows["m"] >= 16) & (rows["n"] >= 256) & (rows["k"] >= 256)
    return np.where(training(rows), 1.0, np.where(middle, 0.05, 0.0125))


def hardware(gpu: Gpu, precision: str) -> tuple[float, float, int]:
    """Return what the forms need of a device."""
    assert gpu.sms is not None
    return gpu.peak_flops(precision), gpu.memory_bytes_per_s, gpu.sms


def fit_bf16(data: Path, gpu: Gpu) -> Fitted:
    """Fit all constants of a device's bf16 products to the frameworks' median."""
    rows = tables.products(data, gpu.name, "bfloat16", ("sglang", "trtllm", "vllm"))
    device = hardware(gpu, "bf16")

    def model(c: Constants, x: Columns) -> Any:
        return forms.warmed_s(forms.product_s(c, device, (x["m"], x["n"], x["k"])), c["droop"])

    return cross_fit(model, rows, START, tuple(START), weights=_weights, scored=training)


def fit_quantised(
    data: Path,
    gpu: Gpu,
    base: Constants,
    *,
    precision: str,
    kind: str,
    frameworks: tuple[str, ...],
) -> Fitted | None:
    """Fit efficiency and fill of an 8- or 4-bit precision, the rest taken from bf16.

    These tables time a layer, so quantising the activations is in them: it gets a time of its
    own in the fit, which is then dropped.
    """
    rows = tables.products(data, gpu.name, kind, frameworks)
    if not rows or precision not in gpu.precisions:
        return None
    rows = tables.pick(rows, training(rows))
    device = hardware(gpu, precision)
    size = INPUT_BYTES[precision]
    start = {**base, "fill_k": 200.0, "quantise_share": 0.5, "quantise_s": 3e-6}

    def model(c: Constants, x: Columns) -> Any:
        product = forms.product_s(c, device, (x["m"], x["n"], x["k"]), input_bytes=size)
        moved = (2.0 + size) * x["m"] * x["k"]
        quantise = c["quantise_s"] + moved / (c["quantise_share"] * device[1])
        return forms.warmed_s(product + quantise, c["droop"])

    free = ("efficiency", "fill_k", "droop", "quantise_share", "quantise_s")
    return cross_fit(model, rows, start, free)


def fit_measured_fp8(gpu: Gpu, base: Constants, field: str) -> Fitted:
    """Fit efficiency and fill of 8-bit products to those measured on the H200."""
    found = tables.measured()["products_fp8"]
    m, n, k, s = tables.columns(found, "m", "n", "k", field)
    rows = {"m": m, "n": n, "k": k, "s": s, "fold": tables.fold(n, k)}
    device = hardware(gpu, "fp8")

    def model(c: Constants, x: Columns) -> Any:
        shape = (x["m"], x["n"], x["k"])
        return forms.product_s(c, device, shape, input_bytes=1.0, whole=by_row)

    # cuBLAS keeps the tiles of bf16; what it has for scales per row is cut less finely.
    by_row = field.startswith("rowwise")
    free = ("efficiency", "fill_k", "tail") if by_row else ("efficiency", "fill_k")
    return cross_fit(model, rows, {**base, "fill_k": 250.0}, free)


def measured_attention(kernel: str, part: str) -> Columns:
    """Return the H200's attention times of one kernel and direction."""
    name = "cudnn" if kernel == "native" else "flash2"
    found = [
        row
        for row in tables.measured()["attention"]
        # cuDNN falls back to a slow backward kernel for 192/128 without a mask.
        if f"{name}_both_s" in row and (part == "forward" or row["causal"] or row["d"] == row["dv"])
    ]
    fields = ("b", "s", "h", "kv", "d", "dv", "causal")
    names = ("batch", "seq", "heads", "kv_heads", "head_dim", "value_dim", "causal")
    rows: Columns = dict(zip(names, tables.columns(found, *fields), strict=True))
    forward, both = tables.columns(found, f"{name}_forward_s", f"{name}_both_s")
    rows["s"] = forward if part == "forward" else both - forward
    rows["window"] = np.zeros(len(found))
    rows["causal"] = rows["causal"] > 0
    rows["fold"] = tables.fold(rows["seq"], rows["causal"])
    return rows


def fit_measured_attention(gpu: Gpu, kernel: str, part: str) -> Fitted:
    """Fit one kernel and direction to what was measured on the H200."""
    backward = part == "backward"
    start = {
        "efficiency": 0.7 if kernel == "native" else 0.4,
        "softmax_dims": 300.0 if backward else 150.0,
        "fill_keys": 200.0,
        "tail": 0.6,
        "wave": 0.2,
        "launch_s": 4e-6,
        "pad_dims": 64.0 if kernel == "native" else 32.0,
    }
    device = hardware(gpu, "bf16")

    def model(c: Constants, x: Columns) -> Any:
        return forms.attention_s(c, device, x, backward)

    free = ("efficiency", "softmax_dims", "fill_keys", "tail", "wave", "launch_s")
    return cross_fit(model, measured_attention(kernel, part), start, free)


def fit_table_attention(data: Path, gpu: Gpu, like: Constants) -> Fitted | None:
    """Fit forward attention to the serving tables, where writing the key cache is on top."""
    rows = tables.attention(data, gpu.name)
    if not rows:
        return None
    rows = tables.pick(rows, (rows["seq"] >= 1024) & (rows["heads"] >= 4) & (rows["window"] == 0))
    device = hardware(gpu, "bf16")
    # Start inside the bounds, where the slope says which way to go.
    start = {**like, "efficiency": 0.65, "fill_keys": 100.0, "tail": 0.6}
    start |= {"cache_passes": 2.0, "serving_s": 10e-6}

    def model(c: Constants, x: Columns) -> Any:
        cache = 4.0 * x["batch"] * x["seq"] * x["kv_heads"] * x["head_dim"]
        extra = c["serving_s"] + c["cache_passes"] * cache / device[1]
        return forms.attention_s(c, device, x) + extra

    free = ["efficiency", "fill_keys", "tail", "cache_passes", "serving_s"]
    if len(np.unique(rows["head_dim"])) > 1:
        free.append("softmax_dims")
    return cross_fit(model, rows, start, tuple(free))


def fit_grouped(gpu: Gpu, base: Constants) -> tuple[float, float]:
    """Return efficiency and launch time of grouped products over dense ones (H200)."""
    found = tables.measured()["grouped"]
    e, t, n, k = tables.columns(found, "experts", "tokens", "n", "k")
    parts = [
        (e, t, n, k, tables.columns(found, "forward_s")[0]),
        (e, t, k, n, tables.columns(found, "input_gradient_s")[0]),
        (e, n, k, t, tables.columns(found, "weight_gradient_s")[0]),
    ]
    groups, m, n, k, s = (np.concatenate(column) for column in zip(*parts, strict=True))
    peak, bandwidth, sms = hardware(gpu, "bf16")

    def model(c: Constants, _: Columns) -> Any:
        waves = groups * np.ceil(m / 128) * np.ceil(n / 256) / sms
        speed = base["efficiency"] * c["ratio"] * peak / sms
        depth = k + base["fill_k"]
        compute = forms.waves_of(waves, base["tail"]) * 2.0 * 128 * 256 * depth / speed
        moved = groups * 2.0 * (k * (m + n) + m * n)
        memory = moved / (base["bandwidth"] * bandwidth)
        return base["launch_s"] + c["extra_s"] + forms.smooth_max(compute, memory)

    found_c = solve(model, {"s": s}, {"ratio": 0.95, "extra_s": 1e-5}, ("ratio", "extra_s"))
    return min(1.0, found_c["ratio"]), found_c["extra_s"]


def main(folder: str) -> None:
    """Fit every device and write the constants and the tables of the guide."""
    from validation.operators import assemble, report

    data = tables.data_folder(Path(folder))
    built = assemble.devices(data, list_gpus())
    assemble.write_toml(built)
    report.write(data, built)


if __name__ == "__main__":
    main(sys.argv[1])
