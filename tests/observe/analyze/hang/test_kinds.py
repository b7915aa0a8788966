"""Hangs of every kind we know of, each as small as can be: who is named, and for what."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from tests.observe.analyze.hang.small_jobs import SmallJob

PAIRS = {"1": ("TENSOR", (0, 1)), "2": ("TENSOR", (2, 3))}
BOTH = {**PAIRS, "3": ("DATA", (0, 2)), "4": ("DATA", (1, 3))}
CHAIN = {"1": ("PIPELINE", (0, 1, 2, 3))}


def _job(world: int = 4, groups: Any = None) -> SmallJob:
    return SmallJob(world, groups).collective("all_reduce", done=True)


# Disagreements


NAMES = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "_all_gather_base", "all_to_all",
    "gather", "scatter",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_another_number_format(name: str) -> None:
    odd: Any = {"input_dtypes": ["Half"], "output_dtypes": ["Half"]}
    job = _job().collective(name, ranks=(0, 1, 3)).collective(name, ranks=(2,), **odd)
    assert job.culprits() == {2: "mismatch"}


def test_a_smaller_message_that_ended_on_its_rank_only() -> None:
    job = _job().collective("all_reduce", ranks=(0, 1, 3))
    job.collective("all_reduce", ranks=(2,), done=True, input_sizes=[[4]], output_sizes=[[4]])
    job.collective("barrier", ranks=(2,))
    assert job.culprits() == {2: "mismatch"}


def test_a_skipped_collective_shifts_the_rest() -> None:
    job = _job().collective("all_reduce", ranks=(0, 1, 3))
    job.collective("_all_gather_base").collective("barrier")
    assert set(job.culprits()) == {2}


def test_two_in_the_other_order_in_one_group() -> None:
    job = _job().collective("all_reduce", ranks=(0, 1, 3)).collective("_all_gather_base")
    job.collective("all_reduce", ranks=(2,))
    assert job.culprits() == {2: "order"}


def test_two_in_the_other_order_in_two_groups() -> None:
    same = {"1": ("DATA", (0, 1, 2, 3)), "2": ("EXPERT", (0, 1, 2, 3))}
    job = _job(groups=same).collective("all_reduce", "2", ranks=(2,))
    job.collective("all_reduce", "1").collective("all_reduce", "2", ranks=(0, 1, 3))
    assert job.culprits() == {2: "order"}


def test_one_rank_in_a_collective_of_another_group() -> None:
    job = _job(groups=PAIRS).collective("all_reduce", ranks=(0, 2, 3))
    job.collective("all_reduce", "1", ranks=(1,))
    assert set(job.culprits()) == {1}


def test_one_rank_left_out_the_collective_of_its_small_group() -> None:
    job = _job(groups=PAIRS).collective("all_reduce", "2", done=True)
    job.collective("all_reduce", "1", ranks=(1,)).collective("all_reduce", ranks=(0, 2, 3))
    assert set(job.culprits()) == {0}


def test_one_rank_runs_a_step_more_than_all_others() -> None:
    job = _job().collective("all_reduce", ranks=(3,))
    assert set(job.culprits()) == {3}


# Hosts


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_never_came(rank: int) -> None:
    job = _job().collective("all_reduce", ranks=set(range(4)) - {rank})
    assert job.culprits() == {rank: "stopped"}
    assert job.culprits(without=[rank]) == {rank: "no dump"}


def test_a_rank_that_stopped_between_its_own_groups() -> None:
    job = _job(groups=BOTH)
    for name in "12":
        job.collective("all_reduce", name, done=True)
    job.collective("all_reduce", "3").collective("all_reduce", "4", ranks=(1,))
    job.groups["3"] = BOTH["3"]
    assert set(job.culprits()) >= {3}


def test_two_ranks_that_never_came() -> None:
    job = _job(8).collective("all_reduce", ranks=set(range(8)) - {2, 5})
    assert job.culprits() == {2: "stopped", 5: "stopped"}


def test_a_rank_that_stopped_is_named_whatever_dumps_are_lost() -> None:
    job = _job(16).collective("all_reduce", ranks=set(range(16)) - {9})
    for lost in [(0,), (1, 2, 3), (4, 5, 6, 7, 8)]:
        assert job.culprits(without=lost)[9] == "stopped"
        assert set(job.culprits(without=lost)) <= {9, *lost}
    assert set(job.culprits(without=(0, 1, 2, 3, 4))) == {9}


# Point to point


def test_crossed_receives() -> None:
    job = _job(groups=CHAIN).receive(0, 1, "1").receive(1, 0, "1")
    job.collective("all_reduce", ranks=(2, 3))
    assert job.culprits() == {0: "crossed", 1: "crossed"}


def test_crossed_sends() -> None:
    job = _job(groups=CHAIN).send(0, 1, "1").send(1, 0, "1")
    job.receive(0, 1, "1").receive(1, 0, "1").collective("all_reduce", ranks=(2, 3))
    assert job.culprits() == {0: "crossed", 1: "crossed"}


def test_a_circle_of_three_receives() -> None:
    job = _job(groups=CHAIN)
    for rank in range(3):
        job.receive(rank, (rank + 1) % 3, "1")
    job.collective("all_reduce", ranks=(3,))
    assert set(job.culprits()) == {0, 1, 2}


def test_a_send_to_the_wrong_peer() -> None:
    job = _job(groups=CHAIN).send(0, 2, "1").receive(1, 0, "1")
    assert set(job.culprits()) == {0}


def test_a_stage_that_stopped_holds_up_both_sides() -> None:
    job = _job(groups=CHAIN).send(0, 1, "1", done=True).receive(1, 0, "1", done=True)
    job.send(0, 1, "1").receive(2, 1, "1").receive(3, 2, "1")
    assert set(job.culprits()) == {1}


def test_a_batch_of_sends_and_receives_that_ended_is_not_pending() -> None:
    job = _job(groups=CHAIN)
    for rank, peer in ((0, 1), (1, 0)):
        job.send(rank, peer, "1").receive(rank, peer, "1")
        for each in job.entries[rank][-2:]:
            each["p2p_seq_id"] = 1
        job._add(rank, "1", "nccl:coalesced", True, is_p2p=True, p2p_seq_id=1)
    job.collective("all_reduce", ranks=(0, 1, 2))
    assert job.culprits() == {3: "stopped"}


def test_one_rank_is_missing_from_a_batch() -> None:
    job = _job(groups=CHAIN)
    for rank, peer in ((0, 1), (2, 1)):
        job.send(rank, peer, "1").receive(rank, peer, "1")
        for each in job.entries[rank][-2:]:
            each["p2p_seq_id"] = 1
        job._add(rank, "1", "nccl:coalesced", False, is_p2p=True, p2p_seq_id=1)
    assert set(job.culprits()) == {1}


# Coalesced collectives


def _coalesced(job: SmallJob, rank: int, sizes: list[int], *, done: bool) -> None:
    for size in sizes:
        shape = [[size]]
        job._add(rank, "0", "nccl:_all_gather_base", False, collective_seq_id=2, input_sizes=shape,
                 output_sizes=shape)  # fmt: skip
    job._add(rank, "0", "nccl:coalesced", done, collective_seq_id=2, input_sizes=[])


def test_coalesced_collectives_take_the_state_of_their_group() -> None:
    job = _job()
    for rank in range(4):
        _coalesced(job, rank, [4, 8], done=True)
    job._counts.update({(rank, "0", False): 2 for rank in range(4)})
    job.collective("all_reduce", ranks=(0, 1, 3))
    assert job.culprits() == {2: "stopped"}


def test_another_size_inside_a_coalesced_group() -> None:
    job = _job()
    for rank in range(4):
        _coalesced(job, rank, [4, 6 if rank == 1 else 8], done=False)
    assert job.culprits() == {1: "mismatch"}


# Groups and rings


def test_groups_of_the_same_ranks_are_kept_apart() -> None:
    same = {"1": ("DATA", (0, 1, 2, 3)), "2": ("EXPERT", (0, 1, 2, 3))}
    job = _job(groups=same).collective("all_reduce", "1", ranks=(0, 1, 3))
    job.collective("all_reduce", "2", done=True)
    assert job.culprits() == {2: "stopped"}


def test_rings_that_begin_at_different_places() -> None:
    job = _job()
    for _ in range(6):
        job.collective("all_reduce", done=True)
    job.collective("all_reduce", ranks=(0, 1, 2))
    job.entries[0] = job.entries[0][-1:]
    job.entries[1] = job.entries[1][-3:]
    job.entries[3] = job.entries[3][-2:]
    assert job.culprits() == {3: "stopped"}


def test_retired_work_of_gloo_is_over() -> None:
    job = _job()
    for rank in range(4):
        job._add(rank, "0", "gloo:all_reduce", False, collective_seq_id=2, retired=True)
    job._counts.update({(rank, "0", False): 2 for rank in range(4)})
    job.collective("all_reduce", ranks=(0, 1, 2))
    assert job.culprits() == {3: "stopped"}


def test_a_lost_mark_between_ended_collectives_is_no_hang() -> None:
    # As gloo wrote it in a job that went on: one entry between others was never retired.
    job = _job().collective("all_reduce", done=(0, 1, 3)).collective("all_reduce", done=True)
    assert job.culprits() == {}
    job.collective("all_reduce", ranks=(0, 1, 3))
    assert job.culprits() == {2: "stopped"}


def test_nccl_work_retired_by_an_error_is_no_witness() -> None:
    job = _job().collective("all_reduce", ranks=(0, 1, 2))
    job.collective("all_reduce", ranks=(3,), retired=True)
    assert set(job.culprits()) == {3}


# Versions of the format


def _of_2_1(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Write an entry as PyTorch 2.1 did: a number for the group, times in µs, no record."""
    return {
        "pg_id": entry["pg_id"], "seq_id": entry["collective_seq_id"] or entry["p2p_seq_id"],
        "profiling_name": entry["profiling_name"], "state": entry["state"],
        "time_created_us": entry["time_created_ns"] // 1000, "frames": [],
        "input_sizes": entry["input_sizes"], "output_sizes": entry["output_sizes"],
    }  # fmt: skip


_LATER = ("input_dtypes", "output_dtypes", "timeout_ms", "retired", "thread_name", "is_p2p")


def _versions(dump: dict[str, Any]) -> dict[str, bytes]:
    old = [_of_2_1(entry) for entry in dump["entries"]]
    without = [{k: v for k, v in e.items() if k not in _LATER} for e in dump["entries"]]
    named = [{**e, "pg_name": e["process_group"][0]} for e in without]
    for entry in named:
        del entry["process_group"]
    status = {
        str(e["pg_id"]): {"last_enqueued_collective": e["collective_seq_id"],
                          "last_started_collective": -1, "last_completed_collective": 1}
        for e in dump["entries"]
    }  # fmt: skip
    active = [e for e in dump["entries"] if e["state"] != "completed"]
    return {
        "entries alone": pickle.dumps(old, 2),
        "1.5": pickle.dumps({"version": "1.5", "entries": old}, 2),
        "2.1": pickle.dumps(dump | {"version": "2.1", "entries": named}, 2),
        "2.3": pickle.dumps(dump | {"version": "2.3", "entries": without}, 2),
        "2.4": pickle.dumps(dump | {"version": "2.4", "pg_status": status}, 4),
        "2.7, only active": pickle.dumps(
            dump | {"version": "2.7", "entries": active, "pg_status": status}
        ),
        "2.9, JSON": json.dumps(dump).encode(),
        "2.10": pickle.dumps(dump | {"version": "2.10", "comm_lib_version": "2.27.5"}),
        "3.0, fields unknown": pickle.dumps(dump | {"version": "3.0", "news": [{"a": 1}]}),
    }


@pytest.mark.parametrize("version", list(_versions(SmallJob(2).dump(0))))
def test_every_version_of_the_format_names_the_same_rank(tmp_path: Path, version: str) -> None:
    job = _job().collective("all_reduce", ranks=(0, 1, 3))
    for rank in range(4):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(_versions(job.dump(rank))[version])
    (tmp_path / "settings_rank_0.json").write_text('{"lr": 1}')
    found = diagnose_hang(read_flight_recorder([tmp_path]))
    assert [each.rank for each in found.culprits] == [2]
