"""The right figures of real traces: nanoseconds, and only what is the device's."""

from pathlib import Path

import pytest

from meshwright import observe
from meshwright.observe.analyze.compute_efficiency.kernel_table import analyze_rank_kernels
from meshwright.observe.analyze.device_time.breakdown import analyze_rank_breakdown
from meshwright.observe.analyze.device_time.idle_time import analyze_rank_idle
from meshwright.observe.analyze.device_time.launches import analyze_rank_launches
from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, count_complete_steps
from meshwright.observe.analyze.spans.steps import find_rank_steps
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline

pytestmark = pytest.mark.real

NANOGPT = "modded-nanogpt/8rank-h100-2025-12-11/rank-"
AB = "modded-nanogpt/ab-2025-10-31/"


def _read(shared: Path, name: str) -> Timeline:
    return read_kineto(shared / "traces" / f"{name}.json.gz", detail="shapes")


@pytest.mark.parametrize(
    ("name", "figures", "overlap"),
    [
        (f"{NANOGPT}0", (10985, 98325, 28147, 137457), 11.59),
        (f"{NANOGPT}1", (28704, 87810, 12341, 128855), 18.10),
        (f"{NANOGPT}3", (4429, 117427, 46317, 168174), 11.37),
        (f"{NANOGPT}7", (3861, 114675, 36255, 154791), 8.96),
        (f"{AB}current", (4372, 225231, 13642, 243245), 29.53),
        (f"{AB}hook", (4387, 223673, 12803, 240863), 34.42),
        # Whole microseconds and no compiled operators: right and HTA's at once.
        ("hta/df_index_resolver/df_index_resolver", (643612, 496485, 256572, 1396669), 0.0),
        ("hta/trace_diff/control/control", (62119, 234760, 86525, 383404), 47.03),
        ("hta/trace_filter/sampled_rank-0", (321378, 106252, 172428, 600058), 11.81),
    ],
)
def test_breakdown_and_overlap(
    shared: Path, name: str, figures: tuple[int, ...], overlap: float
) -> None:
    part = _read(shared, name)
    (found,), (over,) = observe.breakdown(part), observe.overlap(part)
    rest_ns = found.exposed_communication_ns + found.exposed_memory_copy_ns
    parts = (found.idle_ns, found.compute_ns, rest_ns, found.window_ns)
    assert tuple(round(ns / 1000) for ns in parts) == figures
    assert over.overlap_share is not None
    assert round(100 * over.overlap_share, 2) == overlap


@pytest.mark.parametrize(
    ("name", "spans", "steps", "window_us"),
    [
        # Counted in the JSON itself: device events whose launch lies in the marks before the last.
        # The window has 2,790 and 3,727: a part of the last step, and nearly all of it.
        (f"{NANOGPT}0", 2558, 3, 126_365),
        (f"{AB}current", 2798, 3, 181_496),
        # Nothing trails: both cuts are one.
        ("hta/df_index_resolver/df_index_resolver", 17832, 4, 1_396_669),
        ("hta/trace_diff/control/control", 7875, 5, 383_404),
    ],
)
def test_whole_steps_are_counted(
    shared: Path, name: str, spans: int, steps: int, window_us: int
) -> None:
    part = _read(shared, name)
    found = analyze_rank_breakdown(part, AnalysisExtent.COMPLETE_STEPS)
    assert (found.num_spans, count_complete_steps(part)) == (spans, steps)
    assert round(found.window_ns / 1000) == window_us


def test_a_step_of_the_8_rank_job_takes_41_ms_and_varies(shared: Path) -> None:
    found = find_rank_steps(_read(shared, f"{NANOGPT}0"))
    assert [step.number for step in found.steps] == [10, 11, 12, 13]
    assert [round(step.duration_ns / 1e6) for step in found.steps] == [45, 43, 36, 41]


def test_a_loader_without_workers_is_what_the_device_waits_for(shared: Path) -> None:
    folder = "kineto-tb-plugin/resnet50_num_workers_"
    alone = analyze_rank_idle(_read(shared, f"{folder}0/worker0.1623143089861.pt.trace"))
    helped = analyze_rank_idle(_read(shared, f"{folder}4/worker0.1623212756351.pt.trace"))
    assert alone.data_wait_ns > 0.7 * alone.idle_ns
    assert helped.data_wait_ns < 0.02 * helped.idle_ns


def test_eager_inference_of_one_batch_is_launch_bound(shared: Path) -> None:
    part = _read(shared, "tracelens/b200/eager_trace")
    idle = analyze_rank_idle(part)
    assert idle.host_bound_ns > 0.9 * idle.idle_ns
    regions = analyze_rank_launches(part).launch_bound_regions
    assert sum(region.idle_ns for region in regions) > 0.7 * idle.idle_ns


def test_products_run_below_the_peak_of_the_device(shared: Path) -> None:
    found = analyze_rank_kernels(_read(shared, f"{NANOGPT}0"))
    shares = [kernel.peak_share for kernel in found.kernels if kernel.peak_share is not None]
    assert found.device == "h100-80g-sxm"
    assert 0.6 < max(shares) < 1.0
