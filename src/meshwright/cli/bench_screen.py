"""How `mw bench` looks: one screen of what was measured, its health, a burn-in."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.answer import Answer, Note, Table, View, facts, table
from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.device import known_device
from meshwright.observe.bench.burn_in import Stretch, faults
from meshwright.observe.bench.case import Machine, Row
from meshwright.observe.bench.health import Check, alarms, check
from meshwright.observe.bench.suite import Bench
from meshwright.observe.bench.summary import Line, Meanwhile, lines, meanwhile
from meshwright.spec.catalog import gpu as catalog_gpu
from meshwright.spec.cluster import Gpu
from meshwright.spec.units import format_count, format_flops, format_rate, format_seconds

if TYPE_CHECKING:
    import torch

_SHOWN_FAULTS = 5


def answer_of(
    bench: Bench,
    *,
    health: bool,
    others: Mapping[str, float],
    took_s: float | None = None,
    out: str = "",
    gpu: "torch.device | None" = None,
    remarks: Sequence[str] = (),
) -> Answer:
    """Return the screen of a bench; exit code 1 where health was asked for and is not there."""
    known = device_of(bench.machine)
    found, watched = lines(bench.rows, known), meanwhile(bench.rows)
    views: list[View] = [facts(_head(bench, known, took_s)), _table(found)]
    if watched:
        views.append(_meanwhile(watched))
    data: dict[str, Any] = {
        "machine": msgspec.to_builtins(bench.machine),
        "lines": [{**line._asdict(), "share": line.share} for line in found],
        "meanwhile": [one._asdict() for one in watched],
        "rows": [msgspec.to_builtins(row) for row in bench.rows],
        "failed": [{"case": key, "fault": fault} for key, fault in bench.failed],
        "unable": list(bench.unable),
        "late": list(bench.late),
    }
    code = 0
    if health:
        require_kind(bench.machine, others)
        code, told, more = _health(bench, known, others, gpu)
        views += more
        data["health"] = told
    views += [Note(f"{key}: {fault}") for key, fault in bench.failed[:_SHOWN_FAULTS]]
    if len(bench.failed) > _SHOWN_FAULTS:
        views.append(Note(f"{len(bench.failed) - _SHOWN_FAULTS} more cases failed; --json has all"))
    if bench.unable:
        some = ", ".join(dict.fromkeys(key.split("/")[0] for key in bench.unable))
        views.append(Note(f"{len(bench.unable)} cases cannot be done here, of {some}"))
    if bench.late:
        some = ", ".join(dict.fromkeys(key.split("/")[0] for key in bench.late))
        how = "add --resume to go on" if out else "keep rows with -o FILE, and --resume goes on"
        views.append(Note(f"no time was left for {len(bench.late)} cases of {some}: {how}"))
    views += [Note(remark) for remark in remarks]
    if out:
        views.append(Note(f"rows are in {out}: mw calibrate {out}"))
    quiet = tuple(f"{line.family} {line.what}\t{line.best:.6g}\t{line.unit}" for line in found)
    return Answer("bench/1", data, tuple(views), quiet, code)


def device_of(machine: Machine) -> Gpu | None:
    """Return the device of a machine, where the catalog has it; a processor has no entry."""
    known = catalog_gpu(machine.gpu) if machine.gpu else known_device(machine.device)
    return known if known is not None and known.kind == "gpu" else None


def require_kind(machine: Machine, others: Mapping[str, float]) -> None:
    """Refuse to judge the health of a device that there is nothing to compare with."""
    if not others and device_of(machine) is None:
        what = f"nothing is known of how fast {machine.device} should be"
        fix = "compare with rows of a sound one: --against FILE"
        raise InputError([Problem("--health", what, fix)])


def _head(bench: Bench, known: Gpu | None, took_s: float | None) -> dict[str, object]:
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


def _amount(line: Line, value: float) -> str:
    if line.unit == "seconds":
        return format_seconds(value)
    if line.unit == "flops":
        return f"{format_flops(value)}/s"
    if line.unit == "bytes":
        return format_rate(value)
    return f"{format_count(value)} {line.unit}/s"


def _table(found: Sequence[Line]) -> Table:
    rows = [
        (
            line.family,
            line.what,
            _amount(line, line.best),
            "" if line.share is None else f"{line.share:.0%}",
            _amount(line, line.middle) if line.cases > 1 else "",
            format_seconds(line.shortest_s)
            if line.shortest_s is not None and line.unit != "seconds"
            else "",
            line.cases,
            f"{line.spread:.0%}",
        )
        for line in found
    ]
    names = ("family", "what", "best", "of peak", "middle", "shortest", "cases", "spread")
    said = [at for at, name in enumerate(names) if not rows or any(row[at] != "" for row in rows)]
    columns = ", ".join(names[at] for at in said)
    shown = [[row[at] for at in said] for row in rows]
    right = ", ".join(names[2:])
    return table(columns, shown, "what this machine does", right=right, wide="what")


def _meanwhile(found: Sequence[Meanwhile]) -> Table:
    def number(value: float | None, unit: str) -> str:
        return "" if value is None else f"{value:,.0f} {unit}"

    rows = [
        (one.family, number(one.clock_mhz, "MHz"), number(one.power_w, "W"),
         number(one.temperature_c, "°C"), ", ".join(one.throttle))
        for one in found
    ]  # fmt: skip
    return table(
        "family, clock, power, hottest, held back by", rows, "the device meanwhile",
        right="clock, power, hottest", wide="held back by",
    )  # fmt: skip


def _health(
    bench: Bench, known: Gpu | None, others: Mapping[str, float], gpu: "torch.device | None"
) -> tuple[int, dict[str, Any], list[View]]:
    from meshwright.observe.bench.nvml import Gpu as Watched

    whose, checks, remarks = _checks(bench.rows, known, others)
    said = alarms(bench.rows, None if gpu is None else Watched(gpu))
    sick = [one for one in checks if not one.sound]
    rows = [
        (one.what, f"{one.speed:.0%}", f"{1 - one.allowed:.0%}", one.rows,
         "yes" if one.sound else "NO", "" if one.sound else one.worst)
        for one in checks
    ]  # fmt: skip
    views: list[View] = []
    if checks:
        title = f"health: speed over that of {whose}"
        views.append(
            table("what, speed, at least, cases, sound, furthest below", rows, title,
                  right="speed, at least, cases", wide="furthest below")
        )  # fmt: skip
    remarks += [one.words(whose) for one in sick] + list(said)
    if checks and not sick and not said:
        remarks.append("nothing is slower than it should be")
    views += [Note(remark) for remark in remarks]
    told = {
        "against": whose,
        "sound": not sick and not said and bool(checks),
        "checks": [{**one._asdict(), "sound": one.sound} for one in checks],
        "alarms": list(said),
    }
    # Nothing to compare with is no health either.
    return 0 if told["sound"] else 1, told, views


def _checks(
    rows: Sequence[Row], known: Gpu | None, others: Mapping[str, float]
) -> tuple[str, tuple[Check, ...], list[str]]:
    if others:
        found = check(rows, others)
        lacking = [] if found else ["no case was measured there and here"]
        return "the rows given", found, lacking
    assert known is not None, "refused before"
    from meshwright.observe.calibrate.expected import expected_of

    expected = expected_of(rows, known)
    whose = known.title if expected.basis == "measured" else f"{known.title} ({expected.basis})"
    found = check(rows, expected.seconds, expected.doubts)
    lacking = [] if found else ["no case was measured that the catalog expects something of"]
    return whose, found, lacking


def burn_in_answer(machine: Machine, found: Sequence[Stretch], *, shared: bool) -> Answer:
    """Return the screen of a burn-in; exit code 1 where the device failed it."""
    wrong = faults(found, shared=shared)
    fine = "no bit was wrong" + ("" if shared else ", and the pace held")
    rows = [
        (
            f"{one.began_s:,.0f} s",
            f"{one.products:,}",
            f"{format_flops(one.flops_per_s)}/s",
            one.wrong,
            *_seen(one),
        )
        for one in _some(found)
    ]
    products = sum(one.products for one in found)
    views: list[View] = [
        facts({"device": machine.device, "products": f"{products:,}, each compared bit by bit"}),
        table(
            "after, products, pace, wrong, clock, power, hottest, held back by",
            rows,
            "products under load",
            right="after, products, pace, wrong, clock, power, hottest",
        ),
        *(Note(fault) for fault in wrong or (fine,)),
    ]
    data = {
        "machine": msgspec.to_builtins(machine),
        "sound": not wrong,
        "faults": list(wrong),
        "stretches": [
            {**one._asdict(), "telemetry": msgspec.to_builtins(one.telemetry)} for one in found
        ],
    }
    return Answer("bench.burn_in/1", data, tuple(views), tuple(wrong), 1 if wrong else 0)


def _some(found: Sequence[Stretch]) -> Sequence[Stretch]:
    """Return at most some twenty stretches, evenly spread, and all that had wrong bits."""
    every = max(1, len(found) // 20)
    return [one for number, one in enumerate(found) if number % every == 0 or one.wrong]


def _seen(one: Stretch) -> tuple[str, str, str, str]:
    seen = one.telemetry
    if seen is None:
        return ("", "", "", "")
    clock = "" if seen.clock_mhz is None else f"{seen.clock_mhz:,.0f} MHz"
    power = "" if seen.power_w is None else f"{seen.power_w:,.0f} W"
    heat = "" if seen.temperature_c is None else f"{seen.temperature_c:.0f} °C"
    return clock, power, heat, ", ".join(seen.throttle)
