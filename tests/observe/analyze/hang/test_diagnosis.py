"""Hangs: the ranks at fault are named, those that only wait are not."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from meshwright.observe.analyze.hang import DumpDiagnosis, diagnose_hang
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import DumpSet, parse_dump
from tests.observe.analyze.hang.simulated_job import FAULTS, hangs, tally
from tests.timeline.readers.small_dumps import STACK, dump, entry


def _diagnose(dumps: Mapping[int, Any], damaged: Mapping[int, str] | None = None) -> DumpDiagnosis:
    read = tuple(parse_dump(data, f"d_{rank}", rank, 10**6) for rank, data in sorted(dumps.items()))
    return diagnose_hang(DumpSet(read, damaged or {}, ()))


def _named(verdict: DumpDiagnosis) -> dict[int, str]:
    return {each.rank: each.kind for each in verdict.culprits}


def test_a_rank_that_never_enqueued_what_all_wait_for_is_the_culprit() -> None:
    waiting = {rank: dump([entry(7, frames=STACK)]) for rank in (0, 1, 3)}
    verdict = _diagnose({**waiting, 2: dump([entry(6, state="completed")])})
    assert _named(verdict) == {2: "stopped"}
    assert verdict.waiting_ranks == (0, 1, 3)
    assert verdict.blocked_operations[0].missing_ranks == (2,)
    assert verdict.culprits[0].source_line == "/jobs/mine/model.py:12 forward"


def test_an_empty_dump_is_evidence() -> None:
    nothing = {"version": "2.9", "entries": [], "pg_config": dump([])["pg_config"]}
    verdict = _diagnose({0: dump([entry(7)]), 1: dump([entry(7)]), 2: nothing, 3: dump([entry(7)])})
    assert _named(verdict) == {2: "stopped"}
    assert "lists no operation" in verdict.culprits[0].reason


def test_a_missing_dump_is_evidence() -> None:
    verdict = _diagnose({rank: dump([entry(7)]) for rank in (0, 1, 3)})
    assert _named(verdict) == {2: "no dump"}
    assert verdict.ranks_without_dump == (2,)


def test_a_broken_dump_is_evidence_and_the_fault_is_shown() -> None:
    verdict = _diagnose({rank: dump([entry(7)]) for rank in (0, 1, 3)}, {2: "it breaks off"})
    assert "it breaks off" in verdict.culprits[0].reason


def test_a_rank_that_still_waits_for_what_others_saw_end_has_a_failed_gpu() -> None:
    healthy = {rank: dump([entry(9)]) for rank in (0, 1, 3)}
    verdict = _diagnose({**healthy, 2: dump([entry(6), entry(7), entry(8), entry(9)])})
    assert _named(verdict) == {2: "gpu"}


@pytest.mark.parametrize(
    "change",
    [{"input_sizes": [[4, 3]]}, {"input_dtypes": ["Half"]}, {"profiling_name": "nccl:broadcast"}],
)
def test_the_rank_that_entered_otherwise_than_the_rest_is_the_culprit(change: Any) -> None:
    waiting = {rank: dump([entry(7)]) for rank in (0, 1, 3)}
    verdict = _diagnose({**waiting, 2: dump([entry(7, **change)])})
    assert _named(verdict) == {2: "mismatch"}


def test_uneven_rows_of_an_all_to_all_are_no_mismatch() -> None:
    name = "nccl:all_to_all"
    dumps = {
        rank: dump([entry(7, profiling_name=name, input_sizes=[[rank + 1, 8]])])
        for rank in range(4)
    }
    assert {each.kind for each in _diagnose(dumps).culprits} == {"together"}


def test_two_collectives_in_another_order_than_the_rest_name_the_rank() -> None:
    gather = {"profiling_name": "nccl:_all_gather_base"}
    usual = {rank: dump([entry(7), entry(8, **gather)]) for rank in (0, 1, 3)}
    odd = [entry(7, **gather), entry(8)]
    assert _named(_diagnose({**usual, 2: dump(odd)})) == {2: "order"}


def test_a_wait_through_another_group_is_a_consequence() -> None:
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "1": {"name": "1", "desc": "TENSOR", "ranks": "[0, 1]"},
        "2": {"name": "2", "desc": "DATA", "ranks": "[1, 2]"},
    }
    tensor = entry(5, process_group=("1", "TENSOR"), pg_id=1)
    data = entry(3, process_group=("2", "DATA"), pg_id=2)

    def of(rank: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
        mine = {key: row for key, row in config.items() if str(rank) in row["ranks"]}
        return dump(entries, pg_config=mine, pg_status={})

    verdict = _diagnose({0: of(0, [tensor]), 1: of(1, [data]), 2: of(2, [])})
    assert _named(verdict) == {2: "stopped"}
    assert verdict.culprits[0].num_waiting == 2
    assert [stall.is_consequence for stall in verdict.blocked_operations] == [False, True]


def test_dumps_without_unfinished_work_show_no_hang() -> None:
    verdict = _diagnose({rank: dump([entry(7, state="completed")]) for rank in range(4)})
    assert verdict.culprits == ()
    assert verdict.blocked_operations == ()


def test_a_collective_that_all_are_in_names_them_together_and_says_possible() -> None:
    verdict = _diagnose({rank: dump([entry(7)]) for rank in range(4)})
    assert {each.confidence for each in verdict.culprits} == {"possible"}
    assert len(verdict.culprits) == 4


def _score(seeds: range, *, delete: bool = False) -> dict[str, Counter[str]]:
    """Count simulated hangs by fault: exactly named, rightly, wrongly and not named ranks."""
    scores: dict[str, Counter[str]] = {}
    for case, dumps in hangs(seeds, delete=delete):
        score = scores.setdefault(" + ".join(sorted(case.faults)), Counter())
        tally(score, set(_named(_diagnose(dumps))), case)
    return scores


def _sum(scores: Mapping[str, Counter[str]], name: str) -> int:
    return sum(score[name] for score in scores.values())


def test_simulated_jobs_name_the_planted_ranks() -> None:
    scores = _score(range(300))
    # Without timing, a GPU that hangs inside a kernel looks like all its peers: judged apart.
    untimed = scores.pop("gpu hangs, untimed")
    assert untimed["missed"] == 0
    assert set(FAULTS) - scores.keys() == {"gpu hangs, untimed"}
    assert _sum(scores, "exact") > 0.93 * _sum(scores, "cases")
    assert _sum(scores, "missed") < 0.05 * _sum(scores, "right")
    assert _sum(scores, "wrong") < 0.05 * _sum(scores, "right")


def test_simulated_jobs_name_the_planted_ranks_without_a_culprits_dump() -> None:
    scores = _score(range(300), delete=True)
    assert _sum(scores, "missed") < 0.05 * _sum(scores, "right")
    scores.pop("gpu hangs, untimed")
    assert _sum(scores, "exact") > 0.9 * _sum(scores, "cases")
