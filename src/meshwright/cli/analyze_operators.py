"""What `mw analyze` says of execution traces: what ran, on which shapes; they have no times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.answer import Answer, Note, Text, View, facts, table
from meshwright.cli.kept_parts import read_kept
from meshwright.observe.analyze.kernel_names import short_name
from meshwright.observe.analyze.operators import Operators, count_operators
from meshwright.timeline.readers.execution_trace import Graph, read_execution_trace

_MOST = 10
_MOST_PRODUCTS = 8
_WITHOUT = "it says what ran in which order and on which shapes, not when"


def read_graphs(files: Sequence[Path]) -> tuple[list[Graph], list[str]]:
    """The traces, and what is wrong with those that break off."""
    return read_kept(files, read_execution_trace, Graph)


def operators(graphs: Sequence[Graph], damaged: Sequence[str]) -> Answer:
    """Answer with operators by count, products by FLOPs, and collectives."""
    found = count_operators(graphs)
    return Answer(
        "analyze.operators/1",
        _data(found, damaged),
        (*_screen(found), *(Note(line) for line in (*found.notes, *damaged))),
        quiet=tuple(f"{one.name}\t{one.calls}" for one in found.operators),
        code=1 if damaged else 0,
    )


def _screen(found: Operators) -> list[View]:
    hosts = [one for one in found.operators if one.on_host]
    kernels = [one for one in found.operators if not one.on_host]
    number = f"{found.num_traces} traces, " if found.num_traces > 1 else ""
    durations = (
        "none of the starts: durations of nodes, which lie one inside another"
        if found.has_durations
        else f"none: {_WITHOUT}"
    )
    head = {
        "execution trace": f"{number}{found.num_nodes:,} nodes, {', '.join(found.schemas)}",
        "times": durations,
        "operators": f"{sum(one.calls for one in hosts):,} calls of {len(hosts):,} operators",
        "kernels": f"{sum(one.calls for one in kernels):,}" if kernels else "",
        "products": _products_line(found),
    }
    views: list[View] = [facts(head)]
    for title, those in (("operators by calls", hosts), ("kernels by runs", kernels)):
        if not those:
            continue
        timed = ["ms in all"] if found.has_durations else []
        rows = [
            (
                one.name if one.on_host else short_name(one.name, 48),
                f"{one.calls:,}",
                *([f"{(one.duration_us or 0) / 1e3:,.2f}"] if timed else []),
                f"{one.shapes[0][0]} ({one.shapes[0][1]:,})" if one.shapes else "",
                len(one.shapes) or "",
            )
            for one in (those[:_MOST] if title.startswith("op") else those[: _MOST // 2])
        ]
        columns = ", ".join(["name", "calls", *timed, "commonest shapes (calls)", "different"])
        views.append(
            table(
                columns, rows, f"{title} (of {len(those)})",
                right=", ".join(["calls", *timed, "different"]), wide="commonest shapes (calls)",
            )
        )  # fmt: skip
    if found.products:
        views.append(_products(found))
    if found.collectives:
        views.append(_collectives(found))
    else:
        views.append(Text("collectives: none"))
    views.append(
        Text("next: record the same run with torch.profiler, mw analyze TRACE tells its times")
    )
    return views


def _products_line(found: Operators) -> str:
    missing = sum(found.uncounted.values())
    said = f"{found.flops / 1e12:,.4g} TFLOP in {sum(one.calls for one in found.products):,} calls"
    parts = [said if found.products else "none whose shapes tell their FLOPs", *found.assumed]
    if missing:
        parts.append(f"{missing:,} calls more do not say enough")
    return "; ".join(parts)


def _products(found: Operators) -> View:
    rows = [
        (
            one.name, one.dtype, one.shape, f"{one.calls:,}", f"{one.flops / 1e9:,.2f}",
            f"{100 * one.flops / found.flops:.1f} %" if found.flops else "",
        )
        for one in found.products[:_MOST_PRODUCTS]
    ]  # fmt: skip
    return table(
        "product, type, shapes, calls, GFLOP, of all",
        rows,
        f"products by FLOPs (of {len(found.products)})",
        right="calls, GFLOP, of all",
        wide="shapes",
    )


def _collectives(found: Operators) -> View:
    rows = [
        (
            one.collective,
            one.group,
            one.group_size if one.group_size > 0 else "",
            one.dtype,
            f"{one.calls:,}",
            f"{one.bytes:,}" + (f" ({one.unsized:,} calls say none)" if one.unsized else ""),
        )
        for one in found.collectives[:_MOST]
    ]
    return table(
        "collective, group, ranks, type, calls, bytes in all",
        rows,
        f"collectives (of {len(found.collectives)} kinds)",
        right="ranks, calls, bytes in all",
    )


def _data(found: Operators, damaged: Sequence[str]) -> dict[str, Any]:
    return {
        "traces": found.num_traces,
        "schemas": list(found.schemas),
        "nodes": found.num_nodes,
        "has_times": False,
        "has_durations": found.has_durations,
        "flops": found.flops,
        "operators": [
            {
                **one._asdict(),
                "shapes": [{"shapes": text, "calls": calls} for text, calls in one.shapes],
            }
            for one in found.operators
        ],
        "products": [one._asdict() for one in found.products],
        "uncounted": dict(found.uncounted),
        "assumed": list(found.assumed),
        "collectives": [
            {**one._asdict(), "group_size": one.group_size if one.group_size > 0 else None}
            for one in found.collectives
        ],
        "notes": list(found.notes),
        "damaged": list(damaged),
    }
