"""Write the tables of `docs/guide/operator-costs.md` between its markers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.predict.cost import build_device_costs, gemm_s
from meshwright.predict.cost.device_costs import list_measured_devices
from meshwright.spec.catalog.hardware import list_gpus
from validation.operators import checks

WORDS = ("device", "kernel", "source", "precision", "measurement", "layer (ms)", "constant")
PAGE = Path(__file__).parents[2] / "docs/guide/operator-costs.md"


def write(data: Path, built: dict[str, Any]) -> None:
    """Replace every generated table of the page."""
    list_measured_devices.cache_clear()
    build_device_costs.cache_clear()
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (
        ("products", _products(built)),
        ("regions", _regions(built)),
        ("attention", _attention(built)),
        ("checks", _checks(data)),
        ("layers", _layers()),
        ("product-constants", _product_constants()),
        ("attention-constants", _attention_constants()),
        ("memory-constants", _memory_constants()),
    ):
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        page, count = re.subn(pattern, _between(text), page, flags=re.S)
        assert count == 1, f"{PAGE}: no place for {name}"
    PAGE.write_text(page, encoding="utf-8")


def _between(text: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{text}\n{found[2]}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---" if column in WORDS else "--:" for column in head]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _percent(value: float, signed: bool = False) -> str:
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _products(built: dict[str, Any]) -> str:
    rows = []
    for name, device in built.items():
        for precision, fitted in device.products.items():
            errors = fitted.errors
            spread = fitted.rows.get("spread")
            rows.append(
                [
                    name,
                    precision,
                    f"{len(errors):,}",
                    _percent(float(np.abs(errors).mean())),
                    _percent(float(np.median(np.abs(errors)))),
                    _percent(float(errors.mean()), signed=True),
                    _percent(float(spread.mean())) if spread is not None else "",
                ]
            )
    head = ["device", "precision", "rows", "mean error", "median", "bias", "tables disagree by"]
    return _table(head, rows)


def _regions(built: dict[str, Any]) -> str:
    """Return errors of the bf16 fits by size, warm-up included, and of the shipped cool cost."""
    bins = ((0, 1e10), (1e10, 1e11), (1e11, 1e12), (1e12, 1e13), (1e13, np.inf))
    rows = []
    for name, device in built.items():
        fitted = device.products["bf16"]
        x = fitted.rows
        flops = 2.0 * x["m"] * x["n"] * x["k"]
        costs = build_device_costs(list_gpus()[name])
        sample = np.random.default_rng(1).permutation(len(flops))[:3000]
        cool = np.full(len(flops), np.nan)
        for i in sample:
            shape = (int(x["m"][i]), int(x["n"][i]), int(x["k"][i]))
            cool[i] = gemm_s(costs, *shape) / x["s"][i] - 1.0
        cells = []
        for low, high in bins:
            keep = (flops >= low) & (flops < high)
            bias = float(fitted.errors[keep].mean())
            plain = float(np.nanmean(cool[keep]))
            cells.append(f"{_percent(bias, signed=True)} / {_percent(plain, signed=True)}")
        rows.append([name, *cells])
    head = ["device", "below 10¹⁰", "10¹⁰ to 10¹¹", "10¹¹ to 10¹²", "10¹² to 10¹³", "10¹³ and up"]
    return _table(head, rows)


def _attention(built: dict[str, Any]) -> str:
    rows = []
    for name, device in built.items():
        for (kernel, part), (_, source, error, bias) in device.attention.items():
            scored = error is not None
            rows.append(
                [
                    name,
                    f"{kernel} {part}",
                    _percent(error) if scored else "",
                    _percent(bias, signed=True) if scored else "",
                    source.replace("validation/operators/", ""),
                ]
            )
    return _table(["device", "kernel", "mean error", "bias", "source"], rows)


def _checks(data: Path) -> str:
    rows = [
        [what, f"{count:,}", f"{level:.2f}", _percent(spread)]
        for what, count, level, spread in checks.all_checks(data)
    ]
    return _table(["measurement", "rows", "predicted ÷ measured", "spread around it"], rows)


def _layers() -> str:
    rows = [
        [
            row.layer,
            *(f"{1e3 * value:.2f}" for value in (row.predicted_s, row.loaded_s, row.measured_s)),
            *(
                f"{1e3 * mine:.2f} / {1e3 * theirs:.2f}"
                for mine, theirs in zip(row.loaded_parts_s, row.measured_parts_s, strict=True)
            ),
        ]
        for row in checks.layers()
    ]
    head = [
        "layer (ms)",
        "predicted cool",
        "predicted under load",
        "measured under load",
        "products",
        "attention",
        "the rest",
    ]
    return _table(head, rows)


def _product_constants() -> str:
    names = (
        "efficiency",
        "bandwidth",
        "launch_s",
        "fill_k",
        "tail",
        "tile_penalty",
        "split_penalty",
        "accumulate_bytes",
        "gradient_ratio",
    )
    rows = [
        [device, curve.precision, *(f"{getattr(curve, name):.3g}" for name in names)]
        for device, calibration in list_measured_devices().items()
        for curve in calibration.products
    ]
    return _table(["device", "precision", *names], rows)


def _attention_constants() -> str:
    names = ("efficiency", "softmax_dims", "fill_keys", "tail", "wave", "launch_s", "pad_dims")
    rows = [
        [device, f"{curve.kernel} {curve.part}", *(f"{getattr(curve, n):.3g}" for n in names)]
        for device, calibration in list_measured_devices().items()
        for curve in calibration.attention
    ]
    return _table(["device", "kernel", *names], rows)


def _memory_constants() -> str:
    found = list_measured_devices()
    ops = [curve.op for curve in next(iter(found.values())).memory]
    rows = []
    for op in ops:
        shares = [next(c.efficiency for c in cal.memory if c.op == op) for cal in found.values()]
        rows.append([op, *(f"{share:.2f}" for share in shares)])
    rows += [
        [name, *(f"{getattr(calibration, name):.3g}" for calibration in found.values())]
        for name in ("sustained_slowdown", "grouped_efficiency", "grouped_launch_s")
    ]
    return _table(["constant", *found], rows)
