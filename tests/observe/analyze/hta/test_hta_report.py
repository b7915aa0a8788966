"""HTA 0.5's printed figures on real traces, to 1 µs and 0.01 points.

HTA sorts equal times in an order that depends on the processor: on one trace it prints 15942 µs on
one machine and 15943 µs on another. Queue lengths, which are counted at every change, move by a few
thousandths for the same reason.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.analyze.hta.hta_report import HtaReport, build_hta_report
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline

pytestmark = pytest.mark.real

SETS = {
    "nanogpt8": [f"modded-nanogpt/8rank-h100-2025-12-11/rank-{rank}" for rank in range(8)],
    "hta_sampled2": [f"hta/trace_filter/sampled_rank-{rank}" for rank in range(2)],
    "v100x2_resnext": ["hta/df_index_resolver/df_index_resolver"],
    "a100_recsys_ctl": ["hta/trace_diff/control/control"],
    "a100_recsys_rank0of16": ["hta/negative_queue_length_values_check/rank0"],
    "a100_nccl_meta": ["hta/nccl_parser_config/nccl_data"],
    "simple_add": ["hta/critical_path/simple_add/benchmark_result_493459_1694039959_trace"],
    "alexnet": ["hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace"],
    "b200_vllm": ["tracelens/b200/eager_trace"],
    "h100_owlv2": ["tracelens/h100/google_owlv2-large-patch14-ensemble__1016001"],
    "nano_current": ["modded-nanogpt/ab-2025-10-31/current"],
    "nano_hook": ["modded-nanogpt/ab-2025-10-31/hook"],
    "mi300_xdit_sd35": ["tracelens/inference/xdit_sd_3.5/profile_trace_rank_0"],
}
POINTS = 0.0101  # Hundredths, and room for their binary form.


class Case:
    """A set of traces: what HTA printed, and what we make of it."""

    def __init__(self, printed: dict[str, Any], ours: HtaReport) -> None:
        self.printed = printed
        self.ours = ours

    def pairs(self, name: str, rows: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Rows of ours beside HTA's, which have to be as many."""
        assert len(rows) == len(self.printed[name])
        return zip(rows, self.printed[name], strict=True)


@pytest.fixture(scope="module", params=sorted(SETS))
def case(request: pytest.FixtureRequest, shared: Path) -> Case:
    """Each set, read once."""
    text = (shared / "validation" / "hta_figures_dev.json").read_text(encoding="utf-8")
    paths = [shared / "traces" / f"{name}.json.gz" for name in SETS[request.param]]
    ours = build_hta_report(Timeline.concat(read_kineto(path, detail="full") for path in paths))
    return Case(json.loads(text)["sets"][request.param]["figures"], ours)


def test_temporal_breakdown(case: Case) -> None:
    names = ("idle", "compute", "non_compute")
    for ours, printed in case.pairs("temporal_breakdown", case.ours.temporal_breakdown):
        assert ours.kernel_us == printed["kernel_time(us)"]
        for name in names:
            part = getattr(ours, f"{name}_us")
            assert part == pytest.approx(printed[f"{name}_time(us)"], abs=1)
            assert ours.percent(part) == pytest.approx(printed[f"{name}_time_pctg"], abs=POINTS)


def test_overlap(case: Case) -> None:
    values = list(case.ours.overlap_percent.values())
    for ours, printed in case.pairs("comm_comp_overlap", values):
        if ours is None:
            assert printed["comp_comm_overlap_pctg"] is None
        else:
            assert ours == pytest.approx(printed["comp_comm_overlap_pctg"], abs=POINTS)


def test_idle_breakdown(case: Case) -> None:
    for ours, printed in case.pairs("idle_time_breakdown", case.ours.idle_breakdown):
        assert (ours.stream, ours.idle_category) == (printed["stream"], printed["idle_category"])
        assert ours.idle_us == pytest.approx(printed["idle_time"], abs=1)
        if ours.ratio is None:
            assert printed["idle_time_ratio"] is None
        else:
            assert ours.ratio == pytest.approx(printed["idle_time_ratio"], abs=POINTS)


def test_kernel_types(case: Case) -> None:
    # A sort that ran for no time at all is listed or not as the sort of equal times falls.
    ours = {row.kernel_type: row for row in case.ours.kernel_types if row.sum_us}
    printed = {row["kernel_type"]: row for row in case.printed["kernel_type"] if row["sum"]}
    assert list(ours) == list(printed)
    for name, row in ours.items():
        assert row.sum_us == pytest.approx(printed[name]["sum"], abs=1)
        assert row.percent == pytest.approx(printed[name]["percentage"], abs=0.101)


def test_kernel_breakdown(case: Case) -> None:
    first = min(row.rank for row in case.ours.kernel_breakdown)
    rows = [row for row in case.ours.kernel_breakdown if row.rank == first]
    for ours, printed in case.pairs("kernel_breakdown_rank0", rows):
        assert (ours.name, ours.kernel_type) == (printed["name"], printed["kernel_type"])
        assert (ours.sum_us, ours.max_us, ours.min_us) == (
            printed["sum (us)"],
            printed["max (us)"],
            printed["min (us)"],
        )
        assert ours.mean_us == pytest.approx(printed["mean (us)"])
        assert ours.std == pytest.approx(printed["stddev"])


def test_queue_lengths(case: Case) -> None:
    for ours, printed in case.pairs("queue_length", case.ours.queue_lengths):
        for value, theirs in zip(ours.length, printed.values(), strict=True):
            assert value == pytest.approx(theirs, abs=0.01)


def test_memory_bandwidth(case: Case) -> None:
    for ours, printed in case.pairs("memory_bw", case.ours.memory_bandwidth):
        for value, theirs in zip(ours.gb_per_s, printed.values(), strict=True):
            assert value == (None if theirs is None else pytest.approx(theirs))
