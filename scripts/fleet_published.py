"""Writes docs/guide/fleet-published.md: published statistics of GPU clusters beside ours.

    python -m scripts.fleet_published TRACES PUBLISHED

`TRACES` is a folder of public cluster traces, `PUBLISHED` the JSON of what was published
of them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.cli.validate.fleet import summarize_rows
from meshwright.fleet.validation import StatisticComparison, compare_statistics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "fleet-published.md"
SHOWN = (
    "philly.philly_sia_csv.",
    "philly.philly_node_sequence.",
    "helios.gpu_hours_total",
    "helios.cluster_summary_published.total.avg_",
    "helios.cluster_summary_published.total.complete_",
    "helios.earth_vc_may2020_data.vc6YE.",
    "helios.earth_vc_may2020_data.vcpDC.",
    "acme.cluster_summary_published.Seren.complete_rate_gpu_time",
    "acme.cluster_summary_published.Kalos.complete_rate_gpu_time",
    "acme.util_quantiles_from_pickles.Seren.gpu_util_pct.",
    "acme.util_quantiles_from_pickles.Kalos.gpu_util_pct.",
    "acme.util_quantiles_from_pickles.Seren.gpu_power_w.share",
    "acme.util_quantiles_from_pickles.Kalos.gpu_power_w.share",
    "alibaba_v2023.facts.",
    "alibaba_v2023.fgd_expected_results.final_alloc_pct_at_130.openb_pod_list_default.",
    "alibaba_v2026_genai.idle_held.",
    "alibaba_v2026_spot.nodes.gpus",
    "muri.physical_64gpu_400jobs.Muri-L.",
    "muri.physical_64gpu_400jobs.tiresias.",
    "muri.reference_replay_ours.results.trace1.fifo_hol.",
    "muri.reference_replay_ours.results.trace4.srsf_preempt.",
    "reliability.llama3_54d.per_",
    "reliability.meta_rsc.mttf_h.",
    "said:",
)
"""Which statistics the page shows one by one; the command shows all."""
WORDS = {
    "acme": "Acme (Seren, Kalos)",
    "helios": "Helios",
    "philly": "Philly",
    "alibaba_v2020": "Alibaba 2020 (PAI)",
    "alibaba_v2023": "Alibaba 2023",
    "alibaba_v2025": "Alibaba 2025",
    "alibaba_v2026_genai": "Alibaba 2026, image generation",
    "alibaba_v2026_spot": "Alibaba 2026, spot GPUs",
    "muri": "Muri",
    "sia_published": "Sia",
    "reliability": "studies of failures",
}


def page(rows: list[StatisticComparison]) -> str:
    """Return the page."""
    summed = summarize_rows(rows)
    overall = summed["overall"]
    judged = overall["agree"] + overall["differ"]
    lines = [
        "# Published statistics of clusters",
        "",
        "How far readers and measures of `fleet` can be trusted shows where others have",
        "published what they found in the same data. Here every statistic of eleven public traces",
        "stands beside ours, computed by the functions that serve your own fleet: windows, levels,",
        "curves, peers, failures and jobs of `fleet.statistics`. Some were printed by papers",
        "or released with the traces; the others are counts and quantiles of the released files,",
        "made by a separate program.",
        "",
        f"Of {overall['rows']:,} figures {judged:,} are of data and a definition that we have too:",
        f"**{overall['agree']:,} of them agree** within 1 %, or to the digits printed.",
        f"{overall['implied']:,} of these are implied: no trace is at hand, but other published",
        "figures determine them, and the sums hold. Besides,",
        f"{overall['other']:,} are shown beside figures of other data, and {overall['absent']:,}",
        "were not computed, for the reasons below.",
        "",
        "| source | agree | implied | differ | other data | not computed | worst of agreeing |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *_sources(rows, summed["by_source"]),
        "",
        "`mw validate fleet --traces FOLDER --published FILE --simulate --json` prints every row",
        "with its definition and the file that it was computed from.",
        "",
        "## What differs, and why",
        "",
        "| statistic | published | ours | difference | why |",
        "| --- | ---: | ---: | ---: | --- |",
        *(f"{_cells(row)} {row.reason} |" for row in rows if row.agrees is False),
        "",
        "## Of other data",
        "",
        "| statistic | published | ours | difference | why |",
        "| --- | ---: | ---: | ---: | --- |",
        *(
            f"{_cells(row)} {row.reason} |"
            for row in rows
            if row.agrees is None and row.ours is not None
        ),
        "",
        "## Not computed",
        "",
        "| figures | why |",
        "| ---: | --- |",
        *(f"| {count:,} | {why} |" for why, count in summed["absent"].items()),
        "",
        "Lists of jobs are read where they are at hand: Acme's and Helios' tables, Philly's JSON,",
        "and PAI's tables of jobs, tasks and instances.",
        "",
        "## Some that agree",
        "",
        "| statistic | published | ours | difference | how |",
        "| --- | ---: | ---: | ---: | --- |",
        *(
            f"{_cells(row)} {row.method} |"
            for row in rows
            if row.agrees and row.name.startswith(SHOWN)
        ),
        "",
    ]
    return "\n".join(lines)


_COUNTS = ("agree", "implied", "differ", "other", "absent")


def _sources(rows: list[StatisticComparison], counted: dict[str, dict[str, int]]) -> Iterator[str]:
    for source, part in counted.items():
        prefix = "said:" if source == "papers' text" else f"{source}."
        apart = [
            abs(row.difference)
            for row in rows
            if row.agrees and row.name.startswith(prefix) and row.difference is not None
            and not row.reason
        ]  # fmt: skip
        most = f"{max(apart):.2%}" if apart else "–"
        numbers = " | ".join(str(part[name]) for name in _COUNTS)
        yield f"| {WORDS.get(source, source)} | {numbers} | {most} |"


def _cells(row: StatisticComparison) -> str:
    apart = f"{row.difference:+.2%}" if row.difference is not None else "–"
    return f"| `{row.name}` | {row.published:,.6g} | {row.ours:,.6g} | {apart} |"


if __name__ == "__main__":
    PAGE.write_text(
        page(compare_statistics(Path(sys.argv[2]), Path(sys.argv[1]), simulated=True)),
        encoding="utf-8",
    )
