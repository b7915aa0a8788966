"""How `mw bench` looks: one screen of what was measured, its health, a burn-in."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.result import CommandResult, NoteView, TableView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.bench_summary import (
    BenchSummaryLine,
    FamilyTelemetry,
    summarize_rows,
    summarize_telemetry,
)
from meshwright.observe.bench.burn_in import BurnInInterval, find_burn_in_faults
from meshwright.observe.bench.health_check import HealthCheck, check_health, find_device_faults
from meshwright.observe.bench.suite import BenchResult
from meshwright.observe.hardware.catalog_device import (
    find_catalog_device,
)
from meshwright.observe.hardware.hardware_sample import format_throttle_reason
from meshwright.observe.hardware.machine import Machine
from meshwright.spec.catalog import get_gpu
from meshwright.spec.cluster import Gpu
from meshwright.spec.units import format_count, format_flops, format_rate, format_seconds

if TYPE_CHECKING:
    import torch

_SHOWN_FAULTS = 5


def make_result(
    bench: BenchResult,
    *,
    health: bool,
    others: Mapping[str, float],
    took_s: float | None = None,
    out: str = "",
    gpu: "torch.device | None" = None,
    remarks: Sequence[str] = (),
) -> CommandResult:
    """Return the screen of a bench; exit code 1 where health was asked for and is not there."""
    known = find_catalog_gpu(bench.machine)
    found, watched = summarize_rows(bench.rows, known), summarize_telemetry(bench.rows)
    views: list[View] = [make_fields(_head(bench, known, took_s)), _table(found)]
    if watched:
        views.append(_meanwhile(watched))
    data: dict[str, Any] = {
        "machine": msgspec.to_builtins(bench.machine),
        "lines": [{**line._asdict(), "share": line.share} for line in found],
        "telemetry": [one._asdict() for one in watched],
        "rows": [msgspec.to_builtins(row) for row in bench.rows],
        "failed_cases": [{"case": key, "error": fault} for key, fault in bench.failed_cases],
        "unsupported_cases": list(bench.unsupported_cases),
        "cases_not_reached": list(bench.cases_not_reached),
    }
    code = 0
    if health:
        require_known_device(bench.machine, others)
        code, told, more = _health(bench, known, others, gpu)
        views += more
        data["health"] = told
    views += [NoteView(f"{key}: {fault}") for key, fault in bench.failed_cases[:_SHOWN_FAULTS]]
    if len(bench.failed_cases) > _SHOWN_FAULTS:
        views.append(
            NoteView(f"{len(bench.failed_cases) - _SHOWN_FAULTS} more cases failed; --json has all")
        )
    if bench.unsupported_cases:
        some = ", ".join(dict.fromkeys(key.split("/")[0] for key in bench.unsupported_cases))
        views.append(
            NoteView(f"{len(bench.unsupported_cases)} cases cannot be done here, of {some}")
        )
    if bench.cases_not_reached:
        some = ", ".join(dict.fromkeys(key.split("/")[0] for key in bench.cases_not_reached))
        how = "add --resume to go on" if out else "keep rows with -o FILE, and --resume goes on"
        views.append(
            NoteView(f"no time was left for {len(bench.cases_not_reached)} cases of {some}: {how}")
        )
    views += [NoteView(remark) for remark in remarks]
    if out:
        views.append(NoteView(f"rows are in {out}: mw calibrate {out}"))
    quiet = tuple(f"{line.family} {line.operation}\t{line.best:.6g}\t{line.unit}" for line in found)
    return CommandResult("bench/2", data, tuple(views), quiet, code)


def find_catalog_gpu(machine: Machine) -> Gpu | None:
    """Return the device of a machine, where the catalog has it; a processor has no entry."""
    known = get_gpu(machine.gpu) if machine.gpu else find_catalog_device(machine.device)
    return known if known is not None and known.kind == "gpu" else None


def require_known_device(machine: Machine, others: Mapping[str, float]) -> None:
    """Refuse to judge the health of a device that there is nothing to compare with."""
    if not others and find_catalog_gpu(machine) is None:
        what = f"nothing is known of how fast {machine.device} should be"
        fix = "compare with rows of a sound one: --baseline FILE"
        raise InputError([Problem("--health-check", what, fix)])


def _head(bench: BenchResult, known: Gpu | None, took_s: float | None) -> dict[str, object]:
    machine = bench.machine
    software = [f"torch {machine.torch}" if machine.torch else ""]
    software += [f"CUDA {machine.cuda}" if machine.cuda else ""]
    software += [f"driver {machine.driver}" if machine.driver else ""]
    took = "" if took_s is None else f" in {format_seconds(took_s)}"
    return {
        "device": machine.device + (f" ({known.name})" if known else ""),
        "host": f"{machine.host}, {machine.cores} cores" if machine.host else "",
        "software": ", ".join(word for word in software if word),
        "cases": f"{len(bench.rows)}{took}",
    }


def _amount(line: BenchSummaryLine, value: float) -> str:
    if line.unit == "seconds":
        return format_seconds(value)
    if line.unit == "flops":
        return f"{format_flops(value)}/s"
    if line.unit == "bytes":
        return format_rate(value)
    return f"{format_count(value)} {line.unit}/s"


def _table(found: Sequence[BenchSummaryLine]) -> TableView:
    rows = [
        (
            line.family,
            line.operation,
            _amount(line, line.best),
            "" if line.share is None else f"{line.share:.0%}",
            _amount(line, line.median) if line.num_cases > 1 else "",
            format_seconds(line.shortest_s)
            if line.shortest_s is not None and line.unit != "seconds"
            else "",
            line.num_cases,
            f"{line.median_spread:.0%}",
        )
        for line in found
    ]
    names = ("family", "what", "best", "of peak", "middle", "shortest", "cases", "spread")
    said = [at for at, name in enumerate(names) if not rows or any(row[at] != "" for row in rows)]
    columns = ", ".join(names[at] for at in said)
    shown = [[row[at] for at in said] for row in rows]
    right = ", ".join(names[2:])
    return make_table(columns, shown, "what this machine does", right=right, wide="what")


def _meanwhile(found: Sequence[FamilyTelemetry]) -> TableView:
    def number(value: float | None, unit: str) -> str:
        return "" if value is None else f"{value:,.0f} {unit}"

    rows = [
        (one.family, number(one.clock_mhz, "MHz"), number(one.power_w, "W"),
         number(one.temperature_c, "°C"), _throttled(one.throttle_reasons))
        for one in found
    ]  # fmt: skip
    return make_table(
        "family, clock, power, hottest, throttle reasons", rows, "the device meanwhile",
        right="clock, power, hottest", wide="throttle reasons",
    )  # fmt: skip


def _health(
    bench: BenchResult, known: Gpu | None, others: Mapping[str, float], gpu: "torch.device | None"
) -> tuple[int, dict[str, Any], list[View]]:
    from meshwright.observe.hardware.nvml import NvmlDevice

    whose, checks, remarks = _checks(bench.rows, known, others)
    said = find_device_faults(bench.rows, None if gpu is None else NvmlDevice(gpu))
    sick = [one for one in checks if not one.passed]
    rows = [
        (one.row_group, f"{one.relative_speed:.0%}", f"{1 - one.tolerance:.0%}", one.num_rows,
         "yes" if one.passed else "NO", "" if one.passed else one.worst_case)
        for one in checks
    ]  # fmt: skip
    views: list[View] = []
    if checks:
        title = f"health: speed over that of {whose}"
        views.append(
            make_table("what, speed, at least, cases, sound, furthest below", rows, title,
                  right="speed, at least, cases", wide="furthest below")
        )  # fmt: skip
    remarks += [one.format_message(whose) for one in sick] + list(said)
    if checks and not sick and not said:
        remarks.append("nothing is slower than it should be")
    views += [NoteView(remark) for remark in remarks]
    told = {
        "baseline": whose,
        "passed": not sick and not said and bool(checks),
        "checks": [{**one._asdict(), "passed": one.passed} for one in checks],
        "device_faults": list(said),
    }
    # Nothing to compare with is no health either.
    return 0 if told["passed"] else 1, told, views


def _checks(
    rows: Sequence[BenchRow], known: Gpu | None, others: Mapping[str, float]
) -> tuple[str, tuple[HealthCheck, ...], list[str]]:
    if others:
        found = check_health(rows, others)
        lacking = [] if found else ["no case was measured there and here"]
        return "the rows given", found, lacking
    assert known is not None, "refused before"
    from meshwright.observe.calibrate.expected_times import predict_expected_times

    expected = predict_expected_times(rows, known)
    whose = known.title if expected.basis == "measured" else f"{known.title} ({expected.basis})"
    found = check_health(rows, expected.seconds, expected.uncertainty)
    lacking = [] if found else ["no case was measured that the catalog expects something of"]
    return whose, found, lacking


def make_burn_in_result(
    machine: Machine, found: Sequence[BurnInInterval], *, shared: bool
) -> CommandResult:
    """Return the screen of a burn-in; exit code 1 where the device failed it."""
    wrong = find_burn_in_faults(found, shared=shared)
    fine = "no bit was wrong" + ("" if shared else ", and the pace held")
    rows = [
        (
            f"{one.start_s:,.0f} s",
            f"{one.num_gemms:,}",
            f"{format_flops(one.flops_per_s)}/s",
            one.num_wrong_elements,
            *_seen(one),
        )
        for one in _some(found)
    ]
    products = sum(one.num_gemms for one in found)
    views: list[View] = [
        make_fields(
            {"device": machine.device, "products": f"{products:,}, each compared bit by bit"}
        ),
        make_table(
            "after, products, pace, wrong, clock, power, hottest, throttle reasons",
            rows,
            "products under load",
            right="after, products, pace, wrong, clock, power, hottest",
        ),
        *(NoteView(fault) for fault in wrong or (fine,)),
    ]
    data = {
        "machine": msgspec.to_builtins(machine),
        "passed": not wrong,
        "faults": list(wrong),
        "intervals": [
            {**one._asdict(), "telemetry": msgspec.to_builtins(one.telemetry)} for one in found
        ],
    }
    return CommandResult("bench.burn_in/2", data, tuple(views), tuple(wrong), 1 if wrong else 0)


def _some(found: Sequence[BurnInInterval]) -> Sequence[BurnInInterval]:
    """Return at most some twenty stretches, evenly spread, and all that had wrong bits."""
    every = max(1, len(found) // 20)
    return [
        one for number, one in enumerate(found) if number % every == 0 or one.num_wrong_elements
    ]


def _seen(one: BurnInInterval) -> tuple[str, str, str, str]:
    seen = one.telemetry
    if seen is None:
        return ("", "", "", "")
    clock = "" if seen.clock_mhz is None else f"{seen.clock_mhz:,.0f} MHz"
    power = "" if seen.power_w is None else f"{seen.power_w:,.0f} W"
    heat = "" if seen.temperature_c is None else f"{seen.temperature_c:.0f} °C"
    return clock, power, heat, _throttled(seen.throttle_reasons)


def _throttled(reasons: Sequence[str]) -> str:
    return ", ".join(map(format_throttle_reason, reasons))
