"""`mw twin` on a GPU: steps of one device, predicted from its calibration, then run."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from meshwright.cli.flags.calibration import CalibrationChoice, choose_calibration
from meshwright.cli.flags.layouts import read_layouts
from meshwright.cli.render.progress import show_progress
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.observe.twin.default_configs import build_default_gpu_configs
from meshwright.observe.twin.device_twin import (
    MAX_MEMORY_ERROR,
    MAX_STEP_ERROR,
    DeviceTwin,
    TwinConfig,
    TwinStep,
    run_device_twin,
)
from meshwright.observe.twin.drift.run_steps import find_cluster_with_gpu
from meshwright.observe.twin.step_breakdown import SHOWN_KINDS
from meshwright.spec.job_spec import read_model
from meshwright.spec.layout import Layout
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_bytes, format_seconds

SEQUENCE_LENGTH = 4096
_MEANING = (
    "step: the median of those that were timed; memory: most that tensors held at once; "
    "moved: the kind of work whose prediction is furthest off, predicted less measured"
)


def run_on_gpu(args: argparse.Namespace) -> CommandResult:
    """Answer with a row for each configuration."""
    import torch

    from meshwright.run.train.profiling.device_peak import find_catalog_gpu_of_device

    name = torch.cuda.get_device_name()
    gpu = find_catalog_gpu_of_device(torch.device("cuda"))
    if gpu is None:
        what = f"{name} is in no catalog"
        raise InputError([Problem("--device", what, "`mw gpus` lists those that are")])
    used, configs = choose_calibration(args, gpu), _configs(args)
    cluster, quiet = find_cluster_with_gpu(gpu), args.quiet or args.json
    found = list[DeviceTwin]()
    remarks = list[str]()
    with show_progress("running", len(configs), quiet=quiet) as advance:
        for number, config in enumerate(configs, 1):
            try:
                found.append(run_device_twin(config, cluster, used.calibration))
            except torch.OutOfMemoryError:
                remarks.append(f"{config} does not fit on {name}")
            else:
                if args.save:
                    found[-1].save(Path(args.save) / str(number))
            advance(1)
    if not found:
        raise InputError([Problem("layout", "; ".join(remarks), "use a smaller microbatch")])
    return _answer(name, used, found, remarks, check=args.check)


def _configs(args: argparse.Namespace) -> list[TwinConfig]:
    if args.model is None and not args.layouts:
        return list(build_default_gpu_configs())
    model = read_model(args.model or "llama3.2-1b")
    length = SEQUENCE_LENGTH if args.seq_len is None else args.seq_len
    found = []
    for given in read_layouts(args.layouts) or [Layout()]:
        layout = given if args.precision is None else replace(given, precision=args.precision)
        sequences = args.num_sequences or layout.global_batch or layout.microbatch
        if sequences % layout.microbatch:
            what = f"{sequences} is no multiple of the microbatch, {layout.microbatch}"
            fix = f"use {layout.microbatch} or a multiple"
            raise InputError([Problem("--num-sequences", what, fix)])
        found.append(TwinConfig(model, layout, length, sequences))
    return found


def _answer(
    name: str,
    used: CalibrationChoice,
    found: Sequence[DeviceTwin],
    remarks: list[str],
    *,
    check: bool,
) -> CommandResult:
    agree = all(twin.is_within_tolerance for twin in found)
    errors = sorted(abs(twin.step_error) for twin in found)
    memory = [abs(twin.memory_error or 0.0) for twin in found]
    data: dict[str, Any] = {
        "device": name,
        "calibration": used.data,
        "is_within_tolerance": agree,
        "remarks": remarks,
        "median_error": median(errors),
        "worst_error": errors[-1],
        "worst_memory_error": max(memory),
        "configurations": [_data(twin) for twin in found],
    }
    summary = (
        f"{100 * median(errors):.1f} % in the middle, {100 * errors[-1]:.1f} % at worst; "
        f"memory {100 * max(memory):.1f} % at worst"
    )
    views: list[View] = [
        make_fields({"device": name, "costs": used.description, "steps off by": summary}),
        _overview(found),
        _terms(found),
        NoteView(_MEANING),
        *map(NoteView, remarks),
    ]
    quiet = tuple("agrees" if twin.is_within_tolerance else "differs" for twin in found)
    return CommandResult("twin-gpu/2", data, tuple(views), quiet, 1 if check and not agree else 0)


def _overview(found: Sequence[DeviceTwin]) -> View:
    rows = []
    for number, twin in enumerate(found, 1):
        part, seconds = twin.largest_error
        off = twin.memory_error
        rows.append(
            (
                number,
                str(twin.config),
                format_seconds(twin.predicted.step_s),
                format_seconds(twin.measured.step_s),
                f"{100 * twin.step_error:+.1f} %",
                format_bytes(twin.predicted.peak_memory_bytes),
                format_bytes(twin.measured.peak_memory_bytes),
                "" if off is None else f"{100 * off:+.1f} %",
                f"{part} {1e3 * seconds:+.1f} ms",
            )
        )
    columns = "no., configuration, step predicted, measured, off"
    columns += ", memory predicted, memory measured, memory off, moved"
    numbers = "no., step predicted, measured, off, memory predicted, memory measured, memory off"
    return make_table(columns, rows, right=numbers, wide="configuration")


def _terms(found: Sequence[DeviceTwin]) -> View:
    """Every kind of work that takes a hundredth of some step, of all configurations."""
    rows = []
    for number, twin in enumerate(found, 1):
        for part in SHOWN_KINDS:
            predicted, measured = (
                twin.predicted.step_breakdown[part],
                twin.measured.step_breakdown[part],
            )
            if max(predicted, measured) < 0.01 * twin.measured.step_s:
                continue
            off = f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""
            rows.append((number, part, format_seconds(predicted), format_seconds(measured), off))
    right = "no., predicted, measured, off"
    return make_table("no., work, predicted, measured, off", rows, right=right)


def _data(twin: DeviceTwin) -> dict[str, Any]:
    return {
        "model": twin.config.model.name,
        "layout": encode(twin.config.layout),
        "seq_len": twin.config.seq_len,
        "num_sequences": twin.config.num_sequences,
        "predicted": _side(twin.predicted),
        "measured": _side(twin.measured),
        "steps_s": list(twin.steps_s),
        "step_error": twin.step_error,
        "memory_error": twin.memory_error,
        "is_within_tolerance": twin.is_within_tolerance,
    }


def _side(side: TwinStep) -> dict[str, Any]:
    return {
        "step_s": side.step_s,
        "peak_memory_bytes": side.peak_memory_bytes,
        "step_breakdown_s": dict(side.step_breakdown),
    }


TOLERANCE = f"a step is {100 * MAX_STEP_ERROR:g} %% off or memory {100 * MAX_MEMORY_ERROR:g} %%"
