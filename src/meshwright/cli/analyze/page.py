"""The report of `mw analyze --html`: one file with charts, tables and a timeline to zoom into.

It needs nothing from outside. Figures stand in it as JSON; `render/script.js` draws them. How much
is drawn is bounded, whatever the trace: bins and the longest spans of a few ranks.
"""

import base64
import json
from html import escape
from typing import Any

import numpy as np

from meshwright import __version__
from meshwright.cli.analyze.data import overview_to_data
from meshwright.cli.analyze.screen import compute_finding_cost_ms, render_header, suggest_commands
from meshwright.cli.render.html import read_asset, render_fields, render_page
from meshwright.observe.analyze.device_time.kernel_names import shorten_name
from meshwright.observe.analyze.timeline_strip import TimelineStrip
from meshwright.observe.overview import RunOverview

_SECTIONS = """
<section id="findings-part"><h2>Findings</h2>
<p class="note">What costs most comes first, then what follows from it. The cost is what a step
would save at most, and its part of all devices' time.</p>
<div id="findings"></div></section>
<section><h2>Where the time of each rank's device goes</h2>
<div class="tools" id="readings"></div><div class="legend" id="bars-legend"></div>
<div class="bars" id="bars"></div></section>
<section id="steps-part"><h2>Step times on the host</h2><div id="steps"></div></section>
<section id="timeline-part"><h2>Timeline</h2>
<p class="note">Drag to move, double-click or Ctrl + wheel to zoom. {timeline}</p>
<div class="tools"><button id="zoom-in">+</button><button id="zoom-out">−</button>
<button id="go-left">◂</button><button id="go-right">▸</button><button id="zoom-all">all</button>
<span class="note" id="timeline-now"></span></div>
<div class="legend"><span><i style="background:var(--compute)"></i>compute</span>
<span><i style="background:var(--communication)"></i>communication</span>
<span><i style="background:var(--copies)"></i>copies</span>
<span><i style="background:var(--warn)"></i>findings</span></div>
<canvas id="timeline"></canvas></section>
<section><h2>Kernels</h2>
<div class="tools"><input type="search" id="kernel-filter" placeholder="name contains …">
<span class="note">{kernels}</span></div><div class="wide-table" id="kernels"></div></section>
<section id="regions-part"><h2>Annotated regions</h2>
<p class="note">Device time by the annotation (record_function, NVTX) around the launch; a region
holds those inside it. Host is how long the launching thread was in it.</p>
<div class="wide-table" id="regions"></div></section>
<section id="collectives-part"><h2>Collectives</h2>
<p class="note">Matched across ranks. Transfer is what the last to arrive spends in it, arrival wait
what the others spend before; expected is our model's figure for this GPU's usual cluster.</p>
<div class="wide-table" id="collectives"></div></section>
<section id="arrivals-part"><h2>Who comes late</h2><div class="wide-table" id="arrivals"></div>
</section>
"""


def render_report(found: RunOverview, reached: str = "") -> str:
    """Return the whole file; `reached` is how a calibration sees the products."""
    notes = [*found.damaged, *sorted({note for one in found.ranks for note in one.notes})]
    notes += [f"next: {line}" for line in suggest_commands(found)[:1]]
    tail = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    sections = _SECTIONS.format(timeline=escape(_about(found)), kernels=escape(_rest(found)))
    return render_page(
        f"Profile of {found.path}",
        f'<p class="note">mw analyze, meshwright {__version__}</p>\n'
        f"{render_fields(render_header(found, reached).items())}\n<noscript>The charts need "
        f"JavaScript.</noscript>\n"
        f'{sections}\n{tail}\n<div id="tip"></div>\n'
        f'<script type="application/json" id="data">{_embedded(found)}</script>',
        f"\n{read_asset('script.js')}",
    )


def _embedded(found: RunOverview) -> str:
    """The figures as JSON that cannot end the element it stands in."""
    names: dict[str, int] = {}
    data: dict[str, Any] = overview_to_data(found)
    for kernel in data["kernels"]:
        kernel["short"] = shorten_name(kernel["name"], 90)
    for order, region in enumerate(data["regions"]):
        region["order"] = order
        region["top"] = ", ".join(shorten_name(one["name"], 40) for one in region["kernels"][:3])
    origins = _origins(found)
    data["strips"] = [_strip(strip, found, origins[strip.rank], names) for strip in found.strips]
    data["findings"] = _moved(data["findings"], origins)
    data["names"] = list(names)
    data["shorts"] = [shorten_name(name, 60) for name in names]
    data["per"] = "step" if any(one.num_steps for one in found.ranks) else "trace"
    for told, one in zip(data["findings"] or (), found.findings or (), strict=True):
        told["ms"] = compute_finding_cost_ms(found, one)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _origins(found: RunOverview) -> dict[int, int]:
    """What the first moment of all is on the clock of each rank."""
    clocks = found.rank_comparison.clocks if found.rank_comparison is not None else None
    ahead = {
        strip.rank: int(clocks.offset_at(strip.rank, np.array(strip.start_ns))) if clocks else 0
        for strip in found.strips
    }
    first = min((strip.start_ns - ahead[strip.rank] for strip in found.strips), default=0)
    return {rank: first + own for rank, own in ahead.items()}


def _strip(
    strip: TimelineStrip, found: RunOverview, origin_ns: int, names: dict[str, int]
) -> dict[str, Any]:
    """One rank's picture; times in µs since the first, so that they stay exact in JavaScript."""
    own = next(one for one in found.ranks if one.rank == strip.rank)
    return {
        "rank": strip.rank,
        "start": (strip.start_ns - origin_ns) / 1e3,
        "end": (strip.end_ns - origin_ns) / 1e3,
        "lanes": [
            {"label": lane.label, "bins": base64.b64encode(lane.bins).decode()}
            for lane in strip.lanes
        ],
        "spans": [
            [
                span.lane,
                (span.start_ns - origin_ns) / 1e3,
                span.duration_ns / 1e3,
                span.kind,
                names.setdefault(span.name, len(names)),
            ]
            for span in strip.spans
        ],
        "steps": [
            [step.number, (step.start_ns - origin_ns) / 1e3, (step.end_ns - origin_ns) / 1e3]
            for step in own.steps.steps
        ],
    }


def _moved(
    findings: list[dict[str, Any]] | None, origins: dict[int, int]
) -> list[dict[str, Any]] | None:
    """Findings with places of the ranks that are drawn, in the times of their pictures."""
    if findings is None:
        return None
    return [
        {
            **one,
            "spans": [
                [rank, (start - origins[rank]) / 1e3, (end - origins[rank]) / 1e3]
                for rank, start, end in one["spans"]
                if rank in origins
            ],
        }
        for one in findings
    ]


def _about(found: RunOverview) -> str:
    shown, total = len(found.strips), len(found.ranks)
    spans = sum(strip.num_spans for strip in found.strips)
    drawn = sum(len(strip.spans) for strip in found.strips)
    ranks = (
        f"{shown} of {total} ranks: those that findings point at, then the first. "
        if shown < total
        else ""
    )
    if drawn >= spans:
        return ranks
    return (
        f"{ranks}Of {spans:,} spans the {drawn:,} longest are drawn by themselves; the others show"
        " as shades, darker where a stream is fuller."
    )


def _rest(found: RunOverview) -> str:
    rest = sum(one.num_kernels - len(one.kernels) for one in found.ranks)
    if not rest:
        return ""
    lost = sum(one.per_step_ms(one.other_kernels_ns) for one in found.ranks) / len(found.ranks)
    return f"The shortest are left out: {lost:.2f} ms per step and rank."
