"""Put fitted, measured and published constants together into one calibration per device."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import (
    MEMORY_OPS,
    AttentionCurve,
    GemmCurve,
    LaunchCurve,
    MemoryCurve,
    MemoryOp,
)
from meshwright.spec.catalog.hardware import list_gpus
from meshwright.spec.cluster import Gpu
from meshwright.spec.serialization import encode
from validation.operators import fit, forms, tables

Constants = dict[str, float]
TOML = Path(__file__).parents[2] / "src/meshwright/predict/cost/devices.toml"
H200 = "h200-141g-sxm"
QUANTISED = (
    ("fp8-tensorwise", "fp8", ("trtllm",)),
    ("fp8-blockwise", "fp8_block", ("trtllm",)),
    ("nvfp4", "nvfp4", ("sglang", "trtllm", "vllm")),
)
# DeepGEMM's block-scaled tables on Blackwell hold host time; its tensor cores scale blocks
# themselves, so the tensorwise curve serves there.
NO_BLOCKWISE = ("b200-180g-sxm", "gb200", "b300-288g-sxm", "gb300", "l40s", "rtx-pro-6000-server")
ACCUMULATE_BYTES = {"a100-80g-sxm": 4.0}
# Rows of h200_measured.json behind each class, as compiled by torch or as torch's own kernel.
MEMORY_ROWS: dict[MemoryOp, tuple[str, ...]] = {
    "copy": ("copy",),
    "residual": ("add",),
    "norm": ("norm", "residual_norm"),
    "norm_backward": ("norm_backward", "residual_norm_backward"),
    "activation": ("swiglu", "gelu"),
    "activation_backward": ("swiglu_backward", "gelu_backward"),
    "rotary": ("rotary", "rotary_backward"),
    "cross_entropy": ("cross_entropy", "cross_entropy_sharded"),
    "cross_entropy_backward": ("cross_entropy_backward", "cross_entropy_sharded_backward"),
    "quantise": ("quantise_tensorwise", "quantise_blockwise"),
}
# Share of the bandwidth for classes that torch has no good kernel for.
MEMORY_PUBLISHED: dict[MemoryOp, tuple[float, str]] = {
    "softmax": (0.7, "taken as a norm's: Megatron-LM's fused softmax also keeps a row on chip"),
    "permute": (0.52, "SimuMax, B200: 0.50 of 8.0 TB/s"),
    "unpermute": (0.53, "SimuMax, B200: 0.51 of 8.0 TB/s"),
}
LAUNCH = LaunchCurve(
    kernel_s=2e-6,
    host_s=7e-6,
    graph_s=10e-6,
    source="kernel: 1 µs of work-free time per kernel in a graph on the H200, and a gap of 1 µs "
    "between kernels of a stream; host: 4-6 µs for the driver and 5-25 µs for a PyTorch "
    "operator are reported; graph: recalled",
)


class Built(msgspec.Struct, kw_only=True):
    """One device's calibration, and the fits it came from."""

    calibration: Calibration
    products: dict[str, Any]
    attention: dict[str, Any]


def devices(data: Path, known: Any) -> dict[str, Built]:
    """Fit every device that has tables."""
    h200 = known[H200]
    bf16 = {name: fit.fit_bf16(data, known[name]) for name in tables.FOLDERS}
    base = bf16[H200].constants
    grouped = fit.fit_grouped(h200, base)
    eight = {
        "fp8-tensorwise": fit.fit_measured_fp8(h200, base, "tensorwise_fast_s"),
        "fp8-rowwise": fit.fit_measured_fp8(h200, base, "rowwise_fast_s"),
    }
    hopper = {
        (kernel, part): fit.fit_measured_attention(h200, kernel, part)
        for kernel in ("native", "flash2")
        for part in ("forward", "backward")
    }
    built = {}
    for name in tables.FOLDERS:
        gpu = known[name]
        products = {"bf16": bf16[name], **_quantised(data, gpu, bf16[name].constants, eight)}
        attention = _attention(data, gpu, hopper)
        built[name] = Built(
            calibration=Calibration(
                gpu=name,
                source=fit.SOURCE,
                products=tuple(_product(name, p, f) for p, f in products.items()),
                attention=tuple(_curve(key, value) for key, value in attention.items()),
                memory=_memory(data, gpu),
                launch=LAUNCH,
                grouped_efficiency=_short(grouped[0]),
                grouped_launch_s=_seconds(grouped[1]),
                sustained_slowdown=_slowdown(gpu, bf16[name].constants),
            ),
            products=products,
            attention=attention,
        )
    return built


def _quantised(data: Path, gpu: Gpu, base: Constants, eight: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision, kind, frameworks in QUANTISED:
        hopper = gpu.name in fit.HOPPER
        if (hopper and precision == "fp8-tensorwise") or (
            precision == "fp8-blockwise" and gpu.name in NO_BLOCKWISE
        ):
            continue
        fitted = fit.fit_quantised(
            data, gpu, base, precision=precision, kind=kind, frameworks=frameworks
        )
        # An efficiency at its ceiling means that the catalog's peak cannot be right.
        if fitted is not None and fitted.constants["efficiency"] < 1.0:
            found[precision] = fitted
    if gpu.name in fit.HOPPER:
        # The chip is the same, so the shares of the peak carry over; the rest is the device's own.
        for precision, fitted in eight.items():
            own = {**base, "efficiency": fitted.constants["efficiency"]}
            own["fill_k"] = fitted.constants["fill_k"]
            if precision == "fp8-rowwise":
                own["tail"] = fitted.constants["tail"]
            found[precision] = fit.Fitted(own, fitted.rows, fitted.errors)
    return found


def _product(device: str, precision: str, fitted: Any) -> GemmCurve:
    c = fitted.constants
    measured = device in fit.HOPPER and precision in ("fp8-tensorwise", "fp8-rowwise")
    return GemmCurve(
        precision=precision,
        efficiency=_short(c["efficiency"]),
        bandwidth=_short(c["bandwidth"]),
        launch_s=_seconds(c["launch_s"]),
        fill_k=_short(c["fill_k"]),
        tail=_short(c["tail"]),
        tile_penalty=_short(c["tile_penalty"]),
        split_penalty=_short(c["split_penalty"]),
        accumulate_bytes=ACCUMULATE_BYTES.get(device, 8.0),
        gradient_ratio=_gradient_ratio() if measured else 1.0,
        whole=measured and precision == "fp8-rowwise",
        source=fit.MEASURED if measured else fit.SOURCE,
        error=_short(fitted.error),
        bias=round(fitted.bias, 4),
    )


def _gradient_ratio() -> float:
    # Gradients accumulate in full precision on Hopper, which its 8-bit tensor cores do slower.
    rows = tables.measured()["products_fp8"]
    fast, full = tables.columns(rows, "tensorwise_fast_s", "tensorwise_s")
    return _short(float(np.median(fast / full)))


def _attention(data: Path, gpu: Gpu, hopper: dict[Any, Any]) -> dict[Any, Any]:
    """Return (constants, source, error, bias) by kernel and direction."""

    def entry(constants: Constants, source: str, fitted: Any = None) -> tuple[Any, ...]:
        if fitted is None:
            return constants, source, None, None
        return constants, source, fitted.error, fitted.bias

    if gpu.name in fit.HOPPER:
        # An H100 and an H200 are one chip with different memory, which attention hardly sees.
        mine = gpu.name == H200
        return {
            key: entry(
                f.constants, fit.MEASURED + ("" if mine else ", the same chip"), f if mine else None
            )
            for key, f in hopper.items()
        }
    old = gpu.arch in ("sm_80", "sm_89", "sm_120")
    kernel = "flash2" if old else "native"
    forward, backward = (hopper[kernel, part].constants for part in ("forward", "backward"))
    fitted = fit.fit_table_attention(data, gpu, forward)
    own = fitted.constants if fitted else forward
    ratio = {
        name: backward[name] / forward[name] for name in ("efficiency", "softmax_dims", "fill_keys")
    }
    back = {**backward, **{name: own[name] * ratio[name] for name in ratio}}
    source = "forward's constants times backward ÷ forward of the same kernel on the H200"
    if not old:
        back |= _blackwell_backward({**back, "fill_keys": own["fill_keys"]})
        back["efficiency"] *= own["efficiency"] / _b200_forward(data)
        source = "efficiency and fill from SimuMax's B200 rows, the rest as on the H200"
    own = {**own, "launch_s": forward["launch_s"], "wave": forward["wave"]}
    back = fit.bounded(back)
    return {
        ("native", "forward"): entry(own, fit.SOURCE, fitted),
        ("native", "backward"): entry(back, source),
    }


@cache
def _b200_forward(data: Path) -> float:
    """Return the B200's fitted forward efficiency, which its relatives are compared with."""
    like = fit.fit_measured_attention(list_gpus()[H200], "native", "forward").constants
    fitted = fit.fit_table_attention(data, list_gpus()["b200-180g-sxm"], like)
    assert fitted is not None
    return fitted.constants["efficiency"]


def _blackwell_backward(start: Constants) -> Constants:
    """Fit backward efficiency and fill to SimuMax's B200 rows of up to 32k tokens."""
    device = fit.hardware(list_gpus()["b200-180g-sxm"], "bf16")
    rows, times = simumax_attention("b200-180g-sxm", device[0], "backward")
    rows["s"] = times
    rows = tables.pick(rows, (rows["seq"] <= 32768) & (rows["heads"] >= 8))

    def model(c: Constants, x: Any) -> Any:
        return forms.attention_s(c, device, x, backward=True)

    found = fit.solve(model, rows, {**start, "efficiency": 0.6}, ("efficiency", "fill_keys"))
    return {name: found[name] for name in ("efficiency", "fill_keys")}


def simumax_attention(name: str, peak: float, part: str) -> tuple[dict[str, Any], Any]:
    """Return SimuMax's attention rows of one direction with their times."""
    table = tables.simumax()[name]["attention"]
    found = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
    found = [row for row in found if row["part"] == part]
    names = ("batch", "seq", "heads", "kv_heads", "head_dim", "value_dim", "efficiency")
    rows: dict[str, Any] = dict(zip(names, tables.columns(found, *names), strict=True))
    rows["causal"] = np.ones(len(found), dtype=bool)
    rows["window"] = np.zeros(len(found))
    square = 2.0 * rows["batch"] * rows["heads"] * rows["seq"] ** 2
    dims = rows["head_dim"] + rows["value_dim"]
    times = (2.5 if part == "backward" else 1.0) * square * dims / (rows["efficiency"] * peak)
    return rows, times


def _curve(key: tuple[Any, Any], value: tuple[Any, ...]) -> AttentionCurve:
    (kernel, part), (c, source, error, bias) = key, value
    return AttentionCurve(
        kernel=kernel,
        part=part,
        efficiency=_short(c["efficiency"]),
        softmax_dims=_short(c["softmax_dims"]),
        fill_keys=_short(c["fill_keys"]),
        tail=_short(c["tail"]),
        wave=_short(c["wave"]),
        launch_s=_seconds(c["launch_s"]),
        pad_dims=int(c["pad_dims"]),
        source=source,
        error=None if error is None else _short(error),
        bias=None if bias is None else round(bias, 4),
    )


def _memory(data: Path, gpu: Gpu) -> tuple[MemoryCurve, ...]:
    factor, how = _memory_factor(data, gpu)
    found = tables.measured()
    rows = [row for row in (*found["elementwise"], *found["compiled"]) if row["bytes"] > 1e8]
    peak = 4.8e12
    curves = []
    for op in MEMORY_OPS:
        if op in MEMORY_PUBLISHED:
            share, source = MEMORY_PUBLISHED[op]
            if op in ("permute", "unpermute") and gpu.arch == "sm_80":
                share, source = 0.16, "SimuMax, A100-PCIe: 0.19 of 1.6 TB/s"
            curves.append(MemoryCurve(op=op, efficiency=share, source=source))
            continue
        if op in ("optimizer", "gradient_norm"):
            name, each = ("adamw_fused", 28) if op == "optimizer" else ("gradient_norm", 4)
            row = [r for r in found["optimizer"] if r["op"] == name][-1]
            share = row["parameters"] * each / row["s"] / peak
        elif op == "cast":
            share = next(r["bytes"] / r["s"] / peak for r in rows if r["op"] == "cast_fp8")
        else:
            mine = [r["bytes"] / r["s"] / peak for r in rows if r["op"] in MEMORY_ROWS[op]]
            share = float(np.mean(mine))
        curves.append(
            MemoryCurve(
                op=op, efficiency=_short(min(0.95, share * factor)), source="H200, measured" + how
            )
        )
    return tuple(curves)


def _memory_factor(data: Path, gpu: Gpu) -> tuple[float, str]:
    """Return how a device's elementwise kernels compare with the H200's, by one common kernel."""
    if gpu.name == H200:
        return 1.0, ""
    rows, ours = tables.quantise(data, gpu.name), tables.quantise(data, H200)
    if not rows:
        return 0.95, " × 0.95 by SimuMax's A100-PCIe"
    share = float(np.median(rows["bytes"] / rows["s"])) / gpu.memory_bytes_per_s
    reference = float(np.median(ours["bytes"] / ours["s"])) / 4.8e12
    factor = share / reference
    return factor, f" × {factor:.2f} by vLLM's quantise kernel"


def _slowdown(gpu: Gpu, c: Constants) -> float:
    """Return how much slower lasting load makes large products, by the best evidence there is."""
    if gpu.name == H200:
        return _short(float(np.mean(_layer_slowdowns(gpu, c))))
    if gpu.name == "b200-180g-sxm":
        table = tables.simumax()[gpu.name]["products"]
        rows = [r for r in table["rows"] if r[0] == "TN" and 2.0 * r[1] * r[2] * r[3] > 1e12]
        m, n, k = (np.array([r[i] for r in rows], dtype=float) for i in (1, 2, 3))
        device = fit.hardware(gpu, "bf16")
        times = 2.0 * m * n * k / (np.array([r[7] for r in rows]) * device[0])
        return _short(float(np.median(times / forms.product_s(c, device, (m, n, k)))))
    return _short(1.0 + c["droop"])


def _layer_slowdowns(gpu: Gpu, c: Constants) -> list[float]:
    """Return how much slower products ran inside decoder layers after seconds of load."""
    device = fit.hardware(gpu, "bf16")
    ratios = []
    for row in tables.measured()["layers"]:
        m, h, heads, kv, ffn = (row[name] for name in ("m", "h", "heads", "kv", "ffn"))
        n = np.array([(heads + 2 * kv) * 128, h, 2 * ffn, h], dtype=float)
        k = np.array([h, heads * 128, h, ffn], dtype=float)
        tokens = np.full(4, float(m))
        cool = sum(
            forms.product_s(c, device, shape).sum()
            for shape in ((tokens, n, k), (tokens, k, n), (n, k, tokens))
        )
        ratios.append(row["products_sustained_s"] / float(cool))
    return ratios


def _short(value: float) -> float:
    # Three digits are more than the data holds; a vanishing penalty is none.
    return float(f"{value:.3g}") if value > 1e-4 else 0.0


def _seconds(value: float) -> float:
    return float(f"{value:.3g}")


def write_toml(built: dict[str, Built]) -> None:
    """Write the constants that ship, one curve a line."""
    lines = [
        "# Constants of the operator cost models per device, explained in",
        "# docs/guide/operator-costs.md. Written by validation/operators/fit.py, not by hand.",
    ]
    for name, device in built.items():
        lines += ["", f"[{name}]"]
        for key, value in encode(device.calibration).items():
            if key == "gpu":
                continue
            if isinstance(value, list):
                lines += [f"{key} = [", *(f"    {_inline(item)}," for item in value), "]"]
            else:
                lines.append(f"{key} = {_inline(value)}")
    TOML.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_inline(item)}" for key, item in value.items())
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False)
