"""Every fault that is planted is found, with its cost, and nothing else is."""

import pytest

from meshwright.observe.findings import RankContext, find_inefficiencies, list_patterns
from meshwright.observe.findings.job.job_registry import CROSS_RANK_PATTERNS, RANK_PATTERNS
from meshwright.timeline.timeline import Timeline
from validation.findings.clean_jobs import clean_job
from validation.findings.faults import FAULTS, planted
from validation.findings.scores import score
from validation.findings.trials import job_trials

LEAST_TOLD = 0.5
MOST_TOLD = 1.5


@pytest.fixture(scope="module")
def short() -> Timeline:
    return clean_job(steps=6, seed=3)[0]


@pytest.fixture(scope="module")
def long() -> Timeline:
    return clean_job(steps=24, seed=4)[0]


def test_there_is_a_fault_for_every_pattern_of_a_rank() -> None:
    assert set(FAULTS) == set(RANK_PATTERNS)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_found_with_its_cost(name: str, short: Timeline, long: Timeline) -> None:
    base = long if FAULTS[name].least_steps else short
    part, cost_ns = planted(base, name, 3.0, seed=5)
    found = {one.name: one for one in find_inefficiencies([part])}
    assert name in found
    assert set(found) - {name} <= set(FAULTS[name].also)
    told = found[name].gpu_share
    if told is None:
        assert name == "memory-fragmentation"
        return
    assert LEAST_TOLD < told / (cost_ns / RankContext(part).window_ns) < MOST_TOLD


@pytest.mark.parametrize(
    "name", ["data-loader-stall", "dtype-casts", "exposed-all-gather", "item-sync"]
)
def test_half_of_what_is_told_stays_untold(name: str, short: Timeline) -> None:
    part, _ = planted(short, name, 0.5, seed=6)
    assert name not in {one.name for one in find_inefficiencies([part])}


def test_faults_that_only_several_ranks_show_are_found() -> None:
    trials = list(job_trials([11]))
    for name in CROSS_RANK_PATTERNS:
        counted = score(trials, name)
        assert counted.missed == 0, name
        assert counted.false == 0, name
        assert counted.true >= 1, name


def test_the_families_hold_every_pattern() -> None:
    assert {one.name for one in list_patterns()} == {*RANK_PATTERNS, *CROSS_RANK_PATTERNS}
