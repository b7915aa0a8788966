"""`mw twin` on a GPU: steps of one device, predicted from its calibration, then run."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.calibrations import Used, used_for
from meshwright.cli.layouts import read_layouts
from meshwright.cli.progress import progress
from meshwright.errors import InputError, Problem
from meshwright.observe.twin.alone import (
    MEMORY_SHARE,
    STEP_SHARE,
    AloneTwin,
    Config,
    Side,
    twin_alone,
)
from meshwright.observe.twin.configs import standard
from meshwright.observe.twin.drift_run import cluster_with
from meshwright.observe.twin.kernel_terms import SHOWN
from meshwright.spec.layout import Layout
from meshwright.spec.read import plain
from meshwright.spec.units import format_bytes, format_seconds
from meshwright.spec.work import read_model

LENGTH = 4096
_MEANING = (
    "step: the median of those that were timed; memory: most that tensors held at once; "
    "moved: the kind of work whose prediction is furthest off, predicted less measured"
)


def run_on_gpu(args: argparse.Namespace) -> Answer:
    """Answer with a row for each configuration."""
    import torch

    from meshwright.run.train.peak import device_gpu

    name = torch.cuda.get_device_name()
    gpu = device_gpu(torch.device("cuda"))
    if gpu is None:
        what = f"{name} is in no catalog"
        raise InputError([Problem("--device", what, "`mw gpus` lists those that are")])
    used, configs = used_for(args, gpu), _configs(args)
    cluster, quiet = cluster_with(gpu), args.quiet or args.json
    found = list[AloneTwin]()
    remarks = list[str]()
    with progress("running", len(configs), quiet=quiet) as advance:
        for number, config in enumerate(configs, 1):
            try:
                found.append(twin_alone(config, cluster, used.calibration))
            except torch.OutOfMemoryError:
                remarks.append(f"{config} does not fit on {name}")
            else:
                if args.save:
                    found[-1].save(Path(args.save) / str(number))
            advance(1)
    if not found:
        raise InputError([Problem("layout", "; ".join(remarks), "use a smaller microbatch")])
    return _answer(name, used, found, remarks, check=args.check)


def _configs(args: argparse.Namespace) -> list[Config]:
    if args.model is None and not args.layouts:
        return list(standard())
    model = read_model(args.model or "llama3.2-1b")
    length = LENGTH if args.sequence is None else args.sequence
    found = []
    for given in read_layouts(args.layouts) or [Layout()]:
        layout = given if args.precision is None else replace(given, precision=args.precision)
        sequences = args.sequences or layout.global_batch or layout.microbatch
        if sequences % layout.microbatch:
            what = f"{sequences} is no multiple of the microbatch, {layout.microbatch}"
            fix = f"use {layout.microbatch} or a multiple"
            raise InputError([Problem("--sequences", what, fix)])
        found.append(Config(model, layout, length, sequences))
    return found


def _answer(
    name: str, used: Used, found: Sequence[AloneTwin], remarks: list[str], *, check: bool
) -> Answer:
    agree = all(twin.agrees for twin in found)
    errors = sorted(abs(twin.step_error) for twin in found)
    memory = [abs(twin.memory_error or 0.0) for twin in found]
    data: dict[str, Any] = {
        "device": name,
        "calibration": used.data,
        "agree": agree,
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
        facts({"device": name, "costs": used.words, "steps off by": summary}),
        _overview(found),
        _terms(found),
        Note(_MEANING),
        *map(Note, remarks),
    ]
    quiet = tuple("agrees" if twin.agrees else "differs" for twin in found)
    return Answer("twin-gpu/1", data, tuple(views), quiet, 1 if check and not agree else 0)


def _overview(found: Sequence[AloneTwin]) -> View:
    rows = []
    for number, twin in enumerate(found, 1):
        part, seconds = twin.moved
        off = twin.memory_error
        rows.append(
            (
                number,
                str(twin.config),
                format_seconds(twin.predicted.step_s),
                format_seconds(twin.measured.step_s),
                f"{100 * twin.step_error:+.1f} %",
                format_bytes(twin.predicted.memory_bytes),
                format_bytes(twin.measured.memory_bytes),
                "" if off is None else f"{100 * off:+.1f} %",
                f"{part} {1e3 * seconds:+.1f} ms",
            )
        )
    columns = "no., configuration, step predicted, measured, off"
    columns += ", memory predicted, memory measured, memory off, moved"
    numbers = "no., step predicted, measured, off, memory predicted, memory measured, memory off"
    return table(columns, rows, right=numbers, wide="configuration")


def _terms(found: Sequence[AloneTwin]) -> View:
    """Every kind of work that takes a hundredth of some step, of all configurations."""
    rows = []
    for number, twin in enumerate(found, 1):
        for part in SHOWN:
            predicted, measured = twin.predicted.parts[part], twin.measured.parts[part]
            if max(predicted, measured) < 0.01 * twin.measured.step_s:
                continue
            off = f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""
            rows.append((number, part, format_seconds(predicted), format_seconds(measured), off))
    right = "no., predicted, measured, off"
    return table("no., work, predicted, measured, off", rows, right=right)


def _data(twin: AloneTwin) -> dict[str, Any]:
    return {
        "model": twin.config.model.name,
        "layout": plain(twin.config.layout),
        "sequence": twin.config.length,
        "sequences": twin.config.sequences,
        "predicted": _side(twin.predicted),
        "measured": _side(twin.measured),
        "steps_s": list(twin.steps_s),
        "step_error": twin.step_error,
        "memory_error": twin.memory_error,
        "agrees": twin.agrees,
    }


def _side(side: Side) -> dict[str, Any]:
    return {"step_s": side.step_s, "memory_bytes": side.memory_bytes, "work_s": dict(side.parts)}


WITHIN = f"a step is {100 * STEP_SHARE:g} %% off or memory {100 * MEMORY_SHARE:g} %%"
