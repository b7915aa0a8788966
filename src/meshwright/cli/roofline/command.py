"""`mw roofline PATH`: kernels of a profile against what the device can do."""

import argparse
from typing import Any

from meshwright.cli.flags.calibration import CalibrationChoice, add_calibration, choose_calibration
from meshwright.cli.flags.trace_input import TraceRanks
from meshwright.cli.parser import add_common
from meshwright.cli.render.step_bars import draw_stacked_bar
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.compute_efficiency.achievable_peak import apply_measured_peaks
from meshwright.observe.analyze.compute_efficiency.roofline import (
    Roofline,
    RooflineKernel,
    analyze_roofline,
)
from meshwright.observe.analyze.device_time.kernel_names import shorten_name
from meshwright.spec.catalog import get_gpu
from meshwright.spec.cluster import Gpu
from meshwright.spec.units import format_flops, format_rate

EXAMPLES = (
    "mw roofline trace.json.gz",
    "mw roofline traces/ --ranks 0 --gpu h100-80g-sxm",
)
_SHOWN = 12
_WIDTH = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw roofline PATH [flags]"
    parser.add_argument(
        "path", metavar="PATH",
        help="a trace with shapes (record_shapes=True), or a folder of ranks",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", metavar="NAME", help="the device, where the trace does not name it"
    )
    parser.add_argument("--ranks", metavar="LIST", help="only these ranks: 3, or 0-3,7")
    parser.add_argument("--num-workers", metavar="N", default="1", help="read with N processes")
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor keep what was read before"
    )
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the kernels that lose most."""
    device = get_gpu(args.gpu) if args.gpu else None
    used, best = CalibrationChoice(None, ""), list[Gpu]()

    def roofs(named: Gpu) -> Gpu:
        nonlocal used
        used = choose_calibration(args, named)
        best.append(
            named if used.calibration is None else apply_measured_peaks(named, used.calibration)
        )
        return best[0]

    parts = TraceRanks(args.path, args, detail="shapes")
    found = analyze_roofline(parts, device, roofs=roofs)
    if not parts.count:
        raise parts.no_ranks_error()
    if found is None:
        fix = "name it: --gpu h100-80g-sxm (mw gpus lists all)"
        raise InputError([Problem(args.path, "names no device of the catalog", fix)])
    if not found.compute_ns:
        raise parts.no_device_work_error()
    notes = [NoteView(line) for line in (*_notes(found), *parts.damaged)]
    quiet = tuple(f"{kernel.roofline_share:.4f}\t{kernel.name}" for kernel in found.kernels)
    views = (*_screen(found, best[0], used), *notes)
    data = {**_data(found), "calibration": used.data}
    return CommandResult("roofline/1", data, views, quiet, 1 if parts.damaged else 0)


def _screen(found: Roofline, device: Gpu, used: CalibrationChoice) -> list[View]:
    per = "step" if found.num_steps else "trace"
    peak = f"{format_flops(device.bf16_flops)}/s bf16, " if device.bf16_flops else ""
    lost = sum(kernel.lost_ns for kernel in found.kernels)
    head = {
        "device": f"{device.name}: {peak}{format_rate(device.memory_bytes_per_s)}",
        "roofs": "the catalog's peaks (mw bench and mw calibrate measure what this device reaches)"
        if used.path is None
        else f"the best that was measured here, {used.path.name}; peaks with --no-calibration",
        "covered": (
            f"{100 * found.covered_share:.1f} % of compute,"
            f" {found.covered_ns / 1e6:.2f} of {found.compute_ns / 1e6:.2f} ms per {per}"
        ),
        "above the roof": f"{lost / 1e6:.2f} ms per {per} could be saved at most",
    }
    views: list[View] = [make_fields(head)]
    if found.kernels:
        views.append(
            make_table(
                f"of roof, drawn, bound by, ms per {per}, lost, calls, FLOP/byte, rate, kernel",
                [_row(kernel) for kernel in found.kernels[:_SHOWN]],
                f"kernels that lose most (of {len(found.kernels)})",
                right=f"of roof, ms per {per}, lost, calls, FLOP/byte, rate",
                bars="drawn",
            )
        )
    if found.uncovered_kernels:
        rows = [
            (f"{one.total_ns / 1e6:.2f}", shorten_name(one.name, 70))
            for one in found.uncovered_kernels[:5]
        ]
        views.append(
            make_table(
                f"ms per {per}, kernel", rows, "not covered, longest first", right=f"ms per {per}"
            )
        )
    return views


def _row(kernel: RooflineKernel) -> tuple[str, ...]:
    seconds = kernel.total_ns / 1e9
    if kernel.bound == "compute":
        rate = f"{format_flops(kernel.flops / seconds)}/s" if seconds else ""
    else:
        rate = format_rate(kernel.bytes / seconds) if seconds else ""
    bar = draw_stacked_bar(
        [("█", min(kernel.roofline_share, 1.0)), ("·", max(0.0, 1 - kernel.roofline_share))],
        1.0,
        _WIDTH,
    )
    return (
        f"{100 * kernel.roofline_share:.0f} %",
        bar,
        kernel.bound,
        f"{kernel.total_ns / 1e6:.2f}",
        f"{kernel.lost_ns / 1e6:.2f}",
        f"{kernel.calls:.0f}",
        f"{kernel.intensity:.0f}" if kernel.intensity else "",
        rate,
        shorten_name(kernel.name, 44),
    )


def _notes(found: Roofline) -> list[str]:
    if not found.has_shapes:
        return ["no shapes are recorded: profile with record_shapes=True, then kernels are covered"]
    notes = [
        "covered are products, convolutions, attention, element-by-element operators and"
        " kernels of torch.compile; not collectives, copies, custom kernels, CUDA graphs"
    ]
    if any(kernel.roofline_share > 1 for kernel in found.kernels):
        notes.append(
            "above 100 %: the bytes came from a cache, or the device was cooler than when it was "
            "measured, so the roof is higher than told"
        )
    return notes


def _data(found: Roofline) -> dict[str, Any]:
    return {
        "device": found.device,
        "ranks": found.num_ranks,
        "steps": found.num_steps,
        "compute_ms": found.compute_ns / 1e6,
        "covered_ms": found.covered_ns / 1e6,
        "covered_share": found.covered_share,
        "kernels": [
            {
                "name": kernel.name,
                "operator": kernel.operator,
                "calls": kernel.calls,
                "ms": kernel.total_ns / 1e6,
                "least_ms": kernel.roofline_ns / 1e6,
                "lost_ms": kernel.lost_ns / 1e6,
                "share": kernel.roofline_share,
                "bound": kernel.bound,
                "flops": kernel.flops,
                "bytes": kernel.bytes,
                "intensity": kernel.intensity,
            }
            for kernel in found.kernels
        ],
        "uncovered": [
            {"name": one.name, "ms": one.total_ns / 1e6} for one in found.uncovered_kernels
        ],
    }
