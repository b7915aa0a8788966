"""What is found is ranked, told once for all ranks, and carries evidence, cost and remedy."""

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.observe.findings import (
    RankContext,
    detect_on_rank,
    find_inefficiencies,
    list_patterns,
    merge_ranks,
)
from meshwright.observe.findings.frameworks import FRAMEWORK_REMEDIES
from meshwright.timeline.readers.trace_folder import iter_timelines
from meshwright.timeline.timeline import Timeline
from validation.findings.clean_jobs import clean_job
from validation.findings.faults import planted


def test_a_clean_job_shows_nothing() -> None:
    assert find_inefficiencies(clean_job(ranks=4, steps=6)) == ()
    assert find_inefficiencies(clean_job(ranks=1, steps=24)) == ()


def test_no_timeline_and_an_empty_one_show_nothing() -> None:
    assert find_inefficiencies([]) == ()
    assert find_inefficiencies([Timeline.empty()]) == ()


def test_the_costliest_comes_first() -> None:
    part, _ = planted(clean_job()[0], "dtype-casts", 2, 1)
    part, _ = planted(part, "data-loader-stall", 20, 0)
    found = find_inefficiencies([part])
    assert [one.name for one in found] == ["data-loader-stall", "dtype-casts"]
    assert found[0].gpu_share is not None
    assert found[1].gpu_share is not None
    assert found[0].gpu_share > found[1].gpu_share


def test_a_finding_says_all_that_it_needs() -> None:
    part, _ = planted(clean_job()[0], "data-loader-stall", 10, 0)
    (finding,) = find_inefficiencies([part])
    assert finding.ranks == (0,)
    assert "num_workers" in finding.remedy
    assert "DataLoader" in " ".join(finding.evidence)
    assert all(rank == 0 and start < end for rank, start, end in finding.spans)
    steps = RankContext(part).num_steps
    assert steps is not None
    assert finding.cost_ms_per_step is not None
    assert finding.gpu_share is not None
    whole_ms = RankContext(part).window_ns / 1e6
    assert finding.cost_ms_per_step * steps == pytest.approx(finding.gpu_share * whole_ms)


def test_what_several_ranks_show_is_told_once_with_the_worst_as_evidence() -> None:
    parts = clean_job(ranks=2)
    first, _ = planted(parts[0], "dtype-casts", 2, 0)
    second, _ = planted(parts[1], "dtype-casts", 4, 0)
    (found,) = [one for one in find_inefficiencies([first, second]) if one.name == "dtype-casts"]
    assert found.ranks == (0, 1)
    assert found.evidence[0].startswith("rank 1:")


def test_timelines_are_read_once_and_one_after_another() -> None:
    parts = clean_job(ranks=3)
    taken = []

    def stream() -> Iterator[Timeline]:
        for part in parts:
            taken.append(part.ranks[0])
            yield part

    assert find_inefficiencies(stream()) == ()
    assert taken == [0, 1, 2]


def test_ranks_may_be_examined_in_other_processes() -> None:
    parts = clean_job(ranks=4, pause=lambda rank, _: 10_000_000 if rank == 2 else 0)
    apart = [pickle.loads(pickle.dumps(detect_on_rank(RankContext(part)))) for part in parts]
    assert merge_ranks(apart) == find_inefficiencies(parts)


def test_names_are_unlike_and_every_pattern_is_documented() -> None:
    known = list_patterns()
    assert len({one.name for one in known}) == len(known) >= 30
    page = Path(__file__).resolve().parents[4] / "docs" / "analyze" / "findings.md"
    text = page.read_text(encoding="utf-8")
    assert [one.name for one in known if f"`{one.name}`" not in text] == []
    assert all(one.remedy and one.rule and one.cost_basis for one in known)
    assert {name for own in FRAMEWORK_REMEDIES.values() for name in own} <= {
        one.name for one in known
    }


@pytest.mark.real
def test_findings_of_eight_ranks_cost_little(shared: Path) -> None:
    parts = list(iter_timelines(shared / "traces/modded-nanogpt/8rank-h100-2025-12-11"))
    find_inefficiencies(parts[:1])
    begun = time.process_time()
    found = find_inefficiencies(parts)
    # With all analyses they use; the analyses alone are about 0.3 cpu-s.
    assert time.process_time() - begun < 1.0
    assert found[0].name == "straggler-host-bound"
    assert found[0].ranks == (1,)
