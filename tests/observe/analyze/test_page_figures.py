"""The figures of real traces on the pages of the analyses are what the analyses give."""

from pathlib import Path

import pytest

from meshwright.observe.analyze.compute_efficiency.kernel_table import analyze_rank_kernels
from meshwright.observe.analyze.compute_efficiency.mfu import analyze_rank_mfu
from meshwright.observe.analyze.device_time.annotated_regions import analyze_rank_regions
from meshwright.observe.analyze.device_time.breakdown import RankBreakdown, analyze_rank_breakdown
from meshwright.observe.analyze.device_time.idle_time import analyze_rank_idle
from meshwright.observe.analyze.device_time.launches import analyze_rank_launches
from meshwright.observe.analyze.device_time.overlap import analyze_rank_overlap
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.steps import find_rank_steps
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline

pytestmark = pytest.mark.real

PAGES = Path(__file__).parents[3] / "docs" / "analyze"
MS = 1e6


def _read(shared: Path, name: str) -> Timeline:
    return read_kineto(shared / "traces" / f"{name}.json.gz", detail="shapes")


def _says(page: str, *figures: str) -> None:
    text = " ".join((PAGES / f"{page}.md").read_text(encoding="utf-8").split())
    assert [figure for figure in figures if figure not in text] == []


def test_figures_of_the_8_rank_job(shared: Path) -> None:
    part = _read(shared, "modded-nanogpt/8rank-h100-2025-12-11/rank-0")
    found, over = analyze_rank_breakdown(part), analyze_rank_overlap(part)
    whole = analyze_rank_breakdown(part, AnalysisExtent.COMPLETE_STEPS)

    def parts(one: RankBreakdown) -> dict[str, int]:
        return {
            "compute": one.compute_ns,
            "exposed communication": one.exposed_communication_ns,
            "exposed memory copy": one.exposed_memory_copy_ns,
            "idle": one.idle_ns,
        }

    rows = [
        f"{name} | {ns / MS:.3f} | {100 * found.share(ns):.1f} % | {own / MS:.3f} |"
        for (name, ns), own in zip(parts(found).items(), parts(whole).values(), strict=True)
    ]
    both = {one.collective: f"{one.exposed_ns / MS:.3f} ms" for one in found.communication}
    said = f"{both['all_gather']} are all-gather and {both['reduce_scatter']} reduce-scatter"
    _says("breakdown", f"{found.window_ns / MS:.3f} ms", said, *rows)
    _says("overlap", f"{over.communication_ns / MS:.3f} ms", f"{over.hidden_ns / MS:.3f} ms")
    marks = find_rank_steps(part).steps
    host = [f"{one.duration_ns / MS:.1f}" for one in marks]
    late = f"{(marks[2].device_end_ns - marks[2].end_ns) / MS:.0f} ms after the host"
    settled = f"{select_counted_spans(part).row.size} device spans in {whole.window_ns / MS:.1f} ms"
    in_window = f"{found.num_spans} spans here, in {found.window_ns / MS:.1f} ms"
    in_steps = f"{whole.num_spans} of three whole steps in {whole.window_ns / MS:.1f}"
    _says("hta", f"{in_window}, for {in_steps}")
    _says("steps", f"{', '.join(host[:3])} and {host[3]} ms", late, settled)


def test_figures_of_its_kernels(shared: Path) -> None:
    part = _read(shared, "modded-nanogpt/8rank-h100-2025-12-11/rank-0")
    (best,) = (one for one in analyze_rank_kernels(part).kernels if one.name.endswith("coopA_NNT"))
    use = analyze_rank_mfu(part)
    assert best.flops_per_s
    assert best.peak_share
    assert use.mfu
    _says(
        "kernels",
        f"{100 * best.share:.1f} % of the busy time",
        f"`{best.shape}` in {best.dtype} at {best.flops_per_s / 1e12:.0f} TFLOP/s",
        f"{100 * best.peak_share:.0f} % of an H100's peak",
        f"{100 * use.counted_share:.0f} % of the compute time, and MFU by them is "
        f"{100 * use.mfu:.0f} %",
    )


def test_figures_of_idle_devices(shared: Path) -> None:
    folder = "kineto-tb-plugin/resnet50_num_workers_"
    alone = analyze_rank_idle(_read(shared, f"{folder}0/worker0.1623143089861.pt.trace"))
    helped = analyze_rank_idle(_read(shared, f"{folder}4/worker0.1623212756351.pt.trace"))
    _says(
        "idle",
        f"{alone.idle_ns / MS:.0f} ms idle, {alone.data_wait_ns / MS:.0f} ms are data wait and "
        f"{alone.host_bound_ns / MS:.0f} ms host bound",
        f"{helped.idle_ns / MS:.0f} ms idle, {helped.data_wait_ns / MS:.0f} ms data wait, "
        f"{helped.host_bound_ns / MS:.0f} ms host bound",
    )


def test_figures_of_launches(shared: Path) -> None:
    found = analyze_rank_launches(_read(shared, "tracelens/b200/eager_trace"))
    (region,) = found.launch_bound_regions
    assert found.launch_delay is not None
    _says(
        "launches",
        f"{found.num_launches} launches, a median delay of "
        f"{found.launch_delay.median_ns / 1e3:.1f} µs",
        f"a mean queue of {found.stream_queues[0].mean_length:.1f}",
        f"{(region.end_ns - region.start_ns) / MS:.0f} ms with {region.num_kernels} kernels of "
        f"{region.mean_kernel_ns / 1e3:.1f} µs on average, idle for {region.idle_ns / MS:.0f} ms",
    )
    replay = analyze_rank_launches(_read(shared, "hta/df_index_resolver/df_index_resolver"))
    (graph,) = replay.graph_candidates
    _says("launches", f"{graph.num_launches} kernels in", f"{graph.idle_ns / MS:.0f} ms idle")


def test_figures_of_regions(shared: Path) -> None:
    part = _read(shared, "hta/trace_diff/control/control")
    found, number = analyze_rank_regions(part), count_complete_steps(part)
    each = {one.path: one.total_ns / MS / number for one in found.regions}
    inner = ("## forward ##", "## forward:all2all_global_emb ##")
    _says(
        "regions",
        f"{found.device_ns / MS / number:.1f} ms of device time per step",
        f"launches {each[('## backward ##',)]:.1f} ms",
        f"{each[inner[:1]]:.1f} ms, of which {each[inner]:.1f} ms",
    )
