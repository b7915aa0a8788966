"""The one screen of `mw analyze`: the bar, the steps, the kernels, the findings, what next."""

import shlex
import statistics
from collections.abc import Callable, Sequence

from meshwright.cli.render.step_bars import draw_stacked_bar
from meshwright.cli.result import TextView, View, make_fields, make_table
from meshwright.observe.analyze.collectives.stragglers import RankStragglerStats
from meshwright.observe.analyze.device_time.breakdown import RankBreakdown
from meshwright.observe.analyze.device_time.kernel_names import shorten_name
from meshwright.observe.analyze.rank_summary import RankSummary, has_collectives
from meshwright.observe.analyze.spans.device_split import SHARED_PROCESS_NOTE
from meshwright.observe.finding import Finding
from meshwright.observe.overview import RunOverview
from meshwright.timeline.readers.capture_choice import CAPTURE_NOTE_PREFIX

WIDTH = 40

MAX_RANKS = 8
"""More ranks than this are told by the least, the median and the most, and the extremes."""

MAX_KERNELS = 5

MAX_FINDINGS = 5

MIN_COUNTED_SHARE = 0.01
"""Of compute time; where products of known shapes are less, MFU would only say that."""

TIME_SEGMENTS: tuple[tuple[str, str, Callable[[RankBreakdown], int]], ...] = (
    ("█", "compute", lambda parts: parts.compute_ns),
    ("▒", "communication", lambda parts: parts.exposed_communication_ns),
    ("░", "copies", lambda parts: parts.exposed_memory_copy_ns),
    ("·", "idle", lambda parts: parts.idle_ns),
)
"""Mark, name and figure of the parts of a device's time; communication and copies as exposed."""

_CAUSES = {
    "compute": "its kernels are slower",
    "work": "it has more to compute",
    "data": "its host waits for data",
    "host": "its host is late",
}

_FINDINGS = {
    "straggler-slow-kernels": "compute",
    "straggler-more-work": "work",
    "straggler-data-wait": "data",
    "straggler-host-bound": "host",
}


def render_overview(found: RunOverview, reached: str = "") -> tuple[View, ...]:
    """All of it, at most about forty lines; `reached` is how a calibration sees the products."""
    views: list[View] = [make_fields(render_header(found, reached))]
    if any(one.breakdown.window_ns for one in found.ranks):
        views.append(_breakdown(found.ranks))
    if found.kernels:
        views.append(_kernels(found))
    views += _findings(found)
    views.append(TextView("\n".join(f"next: {line}" for line in suggest_commands(found))))
    return tuple(views)


def render_header(found: RunOverview, reached: str = "") -> dict[str, str]:
    """What stands above everything: name and value."""
    ranks = found.ranks
    device = "/".join(sorted({one.device for one in ranks if one.device}))
    profiler = "/".join(sorted({one.profiler for one in ranks}))
    spans = sum(one.num_spans for one in ranks)
    count = f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0].rank}"
    head = {
        "trace": f"{count}, {spans:,} spans, {profiler}" + (f", {device}" if device else ""),
        **_capture(ranks),
        **_devices(ranks),
        "steps": _steps(ranks),
        **_counted(ranks),
        "overlap": _overlap(ranks),
    }
    shares = [one.mfu.mfu for one in ranks if one.mfu.mfu is not None]
    if shares and _counts_products(ranks):
        counted = statistics.median(one.mfu.counted_share for one in ranks)
        head["MFU"] = (
            f"≥ {_spread([100 * share for share in shares])} of peak"
            f" (GEMMs only; {100 * counted:.0f} % of kernel time)"
            + "".join(
                f"; {text}" for text in sorted({t for one in ranks for t in one.mfu.assumptions})
            )
        )
    if reached:
        head["of measured"] = reached
    if (line := format_straggler(found)) is not None:
        head["stragglers"] = line
    if (line := _path(ranks)) is not None:
        head["critical path"] = line
    return head


def _counts_products(ranks: Sequence[RankSummary]) -> bool:
    """Whether shapes tell the FLOPs of a part of compute that is worth a figure."""
    return any(
        one.mfu.mfu is not None and one.mfu.counted_share >= MIN_COUNTED_SHARE for one in ranks
    )


def _capture(ranks: Sequence[RankSummary]) -> dict[str, str]:
    """Which of several captures is shown, if there are several."""
    notes = [note for one in ranks for note in one.notes if note.startswith(CAPTURE_NOTE_PREFIX)]
    if not notes:
        return {}
    of, _, name = notes[0].removeprefix(CAPTURE_NOTE_PREFIX).partition(", ")
    file = name.partition(": the others")[0]
    return {"capture": f"{of} ({file}); --capture 1 shows the first, mw diff compares two files"}


def _devices(ranks: Sequence[RankSummary]) -> dict[str, str]:
    """Which rank is which device, where a process drives several."""
    notes = [note for one in ranks for note in one.notes if note.startswith(SHARED_PROCESS_NOTE)]
    return {"devices": "; ".join(dict.fromkeys(notes))} if notes else {}


def _steps(ranks: Sequence[RankSummary]) -> str:
    lengths = [step.duration_ns / 1e6 for one in ranks for step in one.steps.steps]
    if not lengths:
        return "none marked: figures are of the whole trace"
    each = {len(one.steps.steps) for one in ranks}
    number = f"{min(each)}" if len(each) == 1 else f"{min(each)} to {max(each)}"
    on = " on each rank" if len(ranks) > 1 else ""
    text = f"{number}{on}, median {statistics.median(lengths):.1f} ms"
    return text + (f" ({min(lengths):.1f} to {max(lengths):.1f})" if len(lengths) > 1 else "")


def _counted(ranks: Sequence[RankSummary]) -> dict[str, str]:
    """What is of the recorded window, and what of whole steps."""
    each = sorted({one.num_steps for one in ranks})
    if not each[-1]:
        return {}
    number = f"{each[0]} to {each[-1]}" if len(each) > 1 else f"{each[0]}"
    whole = f"{number} whole step{'s' if each[-1] > 1 else ''}"
    if all(one.breakdown == one.complete_steps_breakdown for one in ranks):
        return {"counted": f"{whole}, in all figures"}
    return {"counted": f"time and overlap: the recorded window; figures per step: {whole}"}


def _overlap(ranks: Sequence[RankSummary]) -> str:
    shares = [
        100 * one.overlap.overlap_share for one in ranks if one.overlap.overlap_share is not None
    ]
    if not shares:
        return "no communication"
    return f"{_spread(shares)} of communication is hidden behind compute"


def _spread(percents: Sequence[float]) -> str:
    middle, low, high = statistics.median(percents), min(percents), max(percents)
    return f"{middle:.1f} %" + (f" ({low:.1f} to {high:.1f})" if high - low >= 0.1 else "")


def format_straggler(found: RunOverview) -> str | None:
    """Who holds up whom, in one line; None for a single rank."""
    if found.rank_comparison is None:
        return None
    late = found.rank_comparison.stragglers
    links = "".join(
        f"; links of ranks {', '.join(map(str, link.ranks))} are {link.slowdown:.1f}× slower"
        for link in late.slow_links
    )
    if not late.ranks:
        return "no collective is shared between these ranks"
    if not late.straggler_ranks:
        lost = sum(one.avoidable_wait_ns for one in late.ranks) / 1e6
        if late.pattern == "none":
            return f"none: ranks wait {lost:.1f} ms for the last one{links}"
        return f"{late.pattern}: they change from step to step, {lost:.1f} ms in all{links}"
    worst = late.ranks[0]
    if late.single_straggler is None:
        return (
            f"ranks {', '.join(map(str, late.straggler_ranks))} together: "
            f"{worst.avoidable_wait_with_group_ns / 1e6:.1f} ms of"
            f" {late.span_ns / 1e6:.1f} behind the "
            f"others{_cause(found, worst, late.straggler_ranks)}{links}"
        )
    return (
        f"rank {worst.rank} comes {worst.avoidable_wait_ns / 1e6:.1f} ms after all others, summed "
        f"over"
        f" {late.span_ns / 1e6:.1f} ms; together they wait {worst.caused_wait_ns / 1e6:.1f} ms for "
        f"it"
        f"{_cause(found, worst, late.straggler_ranks)}"
        f"{links}"
    )


def _cause(found: RunOverview, worst: RankStragglerStats, late: tuple[int, ...]) -> str:
    """Why it is late: as the finding says, which compares whole steps, else by its arrivals."""
    told = (one.name for one in found.findings or () if one.ranks == late)
    cause = next((_FINDINGS[name] for name in told if name in _FINDINGS), worst.cause)
    said = _CAUSES.get(cause)
    return f"; {said}" if said else ""


def _path(ranks: Sequence[RankSummary]) -> str | None:
    own = next((one for one in ranks if one.critical_path), None)
    if own is None or own.critical_path is None or not own.critical_path.total_ns:
        return None
    path = own.critical_path
    where = f"rank {own.rank}" + (f", step {path.step}" if path.step is not None else "")
    causes = ", ".join(
        f"{cause} {100 * ns / path.total_ns:.0f} %"
        for cause, ns in list(path.ns_by_cause.items())[:3]
    )
    gains = "; ".join(f"{_short_gain(text)} -{100 * share:.0f} %" for text, share in path.gains[:2])
    return f"{causes} ({where})" + (f"; {gains}" if gains else "")


def _short_gain(text: str) -> str:
    """`if kernel NAME were …` with its name made short."""
    words = text.split(" ")
    if words[1:2] != ["kernel"] or "were" not in words:
        return text
    at = len(words) - 1 - words[::-1].index("were")
    name = shorten_name(" ".join(words[2:at]), 40)
    return " ".join([*words[:2], name, *words[at:]])


def _breakdown(ranks: Sequence[RankSummary]) -> View:
    shown = [(f"{one.rank}", one.breakdown) for one in ranks]
    rows = [_row(label, parts) for label, parts in shown]
    if len(ranks) > MAX_RANKS:
        by_busy = sorted(shown, key=lambda item: item[1].share(item[1].compute_ns))
        middle = by_busy[len(by_busy) // 2]
        rows = [
            _row(f"{by_busy[0][0]} least compute", by_busy[0][1]),
            _row(f"{middle[0]} median", middle[1]),
            _row(f"{by_busy[-1][0]} most compute", by_busy[-1][1]),
            *(_line(name, pick, ranks) for name, pick in _EDGES),
        ]
    legend = "  ".join(f"{mark} {name}" for mark, name, _ in TIME_SEGMENTS)
    columns = "rank, where the time goes, window ms, compute, communication, copies, idle"
    return make_table(
        columns,
        rows,
        f"device time: {legend} (communication and copies: what nothing hides)",
        right="window ms, compute, communication, copies, idle",
        bars="where the time goes",
    )


_EDGES: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (
    ("least", min),
    ("median", statistics.median),
    ("most", max),
)


def _row(label: str, parts: RankBreakdown) -> tuple[str, ...]:
    whole = parts.window_ns or 1
    bar = draw_stacked_bar(((mark, of(parts)) for mark, _, of in TIME_SEGMENTS), whole, WIDTH)
    shares = (f"{100 * parts.share(of(parts)):.1f} %" for _, _, of in TIME_SEGMENTS)
    return label, bar if parts.window_ns else "no device work", _ms(parts.window_ns), *shares


def _line(
    name: str, pick: Callable[[Sequence[float]], float], ranks: Sequence[RankSummary]
) -> tuple[str, ...]:
    """One figure of all ranks for each column: not of one rank, so it has no bar."""
    windows = pick([one.breakdown.window_ns for one in ranks])
    shares = (
        f"{100 * pick([one.breakdown.share(of(one.breakdown)) for one in ranks]):.1f} %"
        for _, _, of in TIME_SEGMENTS
    )
    return name, f"of {len(ranks)} ranks", _ms(windows), *shares


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f}"


def _kernels(found: RunOverview) -> View:
    per = _per(found)
    rows = [
        (
            shorten_name(kernel.name, 56),
            f"{kernel.ms_per_step:.2f}",
            f"{100 * kernel.share:.1f} %",
            f"{kernel.calls_per_step:.0f}" if kernel.calls_per_step >= 1 else "<1",
            f"{100 * kernel.peak_share:.0f} %" if kernel.peak_share is not None else "",
        )
        for kernel in found.kernels[:MAX_KERNELS]
    ]
    return make_table(
        f"kernel, ms per {per}, of busy time, calls, of peak",
        rows,
        f"top kernels (of {len(found.kernels)})",
        right=f"ms per {per}, of busy time, calls, of peak",
    )


def _findings(found: RunOverview) -> list[View]:
    if found.findings is None:
        return []
    if not found.findings:
        works = any(one.breakdown.window_ns for one in found.ranks)
        none = "none of the known patterns shows" if works else "none can be told of no device work"
        return [TextView(f"findings: {none}")]
    per = _per(found)
    rows = []
    for one in found.findings[:MAX_FINDINGS]:
        ms = compute_finding_cost_ms(found, one)
        cost = f"{ms:.2f}" if ms is not None else ""
        share = f"{100 * one.gpu_share:.1f} %" if one.gpu_share is not None else ""
        # What follows from the finding above is marked: mending that one comes first.
        title = f"↳ {one.title}" if one.explained_by else one.title
        rows.append((cost, share, title, _clause(one.remedy)))
    more = len(found.findings) - MAX_FINDINGS
    title = "findings" + (f" (the first {MAX_FINDINGS}; {more} more in --html)" if more > 0 else "")
    return [
        make_table(
            f"ms per {per}, of GPU time, finding, remedy",
            rows,
            title,
            right=f"ms per {per}, of GPU time",
            wide="finding, remedy",
        )
    ]


def _per(found: RunOverview) -> str:
    return "step" if any(one.num_steps for one in found.ranks) else "trace"


def compute_finding_cost_ms(found: RunOverview, one: Finding) -> float | None:
    """What a finding costs in a step, or in the whole trace where it tells no steps."""
    if one.cost_ms_per_step is not None or one.gpu_share is None:
        return one.cost_ms_per_step
    windows = [rank.complete_steps_breakdown.window_ns for rank in found.ranks]
    return one.gpu_share * sum(windows) / len(windows) / 1e6


def _clause(remedy: str) -> str:
    """The first of a remedy's clauses, for the screen; the report has all."""
    return remedy.split("; ", maxsplit=1)[0]


def suggest_commands(found: RunOverview) -> tuple[str, ...]:
    """The commands that tell most about what this run shows."""
    ranks, path = found.ranks, shlex.quote(found.path)
    totals = [sum(of(one.breakdown) for one in ranks) for _, _, of in TIME_SEGMENTS]
    whole = sum(totals)
    behind = (
        found.rank_comparison.stragglers.straggler_ranks
        if found.rank_comparison is not None
        else ()
    )
    steps = []
    if not whole and found.damaged:
        steps.append("copy the trace again or record it again: it breaks off before its kernels")
    elif not whole:
        steps.append("record with ProfilerActivity.CUDA: this trace has no device work")
    elif behind:
        steps.append(f"mw analyze {path} --ranks {behind[0]} (a rank that others wait for)")
    elif totals[3] > 0.3 * whole:
        steps.append(f"mw analyze {path} --perfetto marked.json.gz (see what the device waits for)")
    elif totals[1] > 0.1 * whole and len(ranks) == 1 and has_collectives(ranks[0]):
        steps.append("mw analyze FOLDER with all ranks (waiting and transfer are told apart)")
    elif _counts_products(ranks):
        steps.append(f"mw roofline {path} (which kernels are slow for what they do)")
    else:
        steps.append(f"mw analyze {path} --perfetto marked.json.gz (see findings in their place)")
        if all(one.profiler == "kineto" and one.device for one in ranks):
            steps.append("record with record_shapes=True (then mw roofline tells slow kernels)")
    if whole:
        steps.append(f"mw analyze {path} --html report.html (charts, all findings with evidence)")
    return tuple(steps)
