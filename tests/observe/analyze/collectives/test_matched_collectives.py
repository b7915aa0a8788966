"""Collectives are matched by group and order; waiting and transfer are told apart."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.observe.analyze.collectives.clock_alignment import align_ranks
from meshwright.observe.analyze.collectives.collective_calls import COLLECTIVE_OPS, op_of
from meshwright.observe.analyze.collectives.expected_bandwidth import (
    ExpectedCollective,
    find_catalog_cluster,
    infer_node_placement,
    predict_expected_collectives,
)
from meshwright.observe.analyze.collectives.matched_collectives import (
    MatchedCollectives,
    match_collectives,
    sum_by_size,
)
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import collective, steady_job, timeline_of


def test_waiting_ends_when_the_last_member_arrives() -> None:
    found = match_collectives(
        timeline_of([collective(0, 0, 110), collective(1, 30, 111), collective(2, 60, 112)])
    )
    assert found.wait_ns.tolist() == [60_000, 30_000, 0]
    assert found.transfer_ns.tolist() == [52_000]
    assert found.last_rank.tolist() == [2]
    assert found.first_rank.tolist() == [0]


def test_bus_bandwidth_has_the_factor_of_its_kind() -> None:
    # 1 MB in 100 µs is 10 GB/s; an all-reduce over 4 ranks moves 2·3/4 of it over each link.
    found = match_collectives(timeline_of([collective(rank, 0, 100) for rank in range(4)]))
    row = sum_by_size(found)[0]
    assert row.algorithm_bytes_per_s == pytest.approx(1e10)
    assert row.bus_bytes_per_s == pytest.approx(1.5e10)
    gathered = [collective(rank, 0, 100, collective="_allgather_base") for rank in range(4)]
    row = sum_by_size(match_collectives(timeline_of(gathered)))[0]
    assert row.bus_bytes_per_s == pytest.approx(0.75e10)


def test_groups_of_one_name_and_other_ranks_are_apart() -> None:
    def member(rank: int, ranks: str, end: float) -> dict[str, object]:
        extra = json.dumps({"Process Group Name": "tp", "Process Group Ranks": ranks})
        return collective(rank, 0, end, group="tp", extra=extra)

    found = match_collectives(
        timeline_of(
            [
                member(0, "[0, 1]", 10),
                member(1, "[0, 1]", 10),
                member(2, "[2, 3]", 30),
                member(3, "[2, 3]", 30),
            ]
        )
    )
    assert sorted(group.ranks for group in found.groups) == [(0, 1), (2, 3)]
    assert sorted(found.transfer_ns.tolist()) == [10_000, 30_000]


def test_a_profile_that_begins_later_is_laid_beside_the_others() -> None:
    whole = [collective(0, 1000 * n, 1000 * n + 100, bytes=64 * (n % 3 + 1)) for n in range(30)]
    late = [collective(1, 1000 * n, 1000 * n + 101, bytes=64 * (n % 3 + 1)) for n in range(4, 30)]
    found = match_collectives(timeline_of(whole + late))
    assert found.calls.op.size == 26
    assert found.num_unmatched == 4
    assert found.mismatches == ()
    assert np.all(found.transfer_ns <= 101_000)


def test_numbers_of_the_library_decide_where_there_are_some() -> None:
    def member(rank: int, number: int, at: float) -> dict[str, object]:
        extra = json.dumps({"Process Group Name": "dp", "Seq": number})
        return collective(rank, at, at + 10, extra=extra)

    rows = [member(0, number, 100 * number) for number in range(5)]
    rows += [member(1, number, 100 * number + 5000) for number in range(2, 5)]
    found = match_collectives(timeline_of(rows))
    first = found.calls.first_member
    assert (found.members.start_ns[first + 1] - found.members.start_ns[first]).tolist() == [
        5_000_000
    ] * 3


@pytest.mark.parametrize(
    ("change", "what"),
    [({"bytes": 7}, "size"), ({"collective": "broadcast"}, "kind")],
)
def test_ranks_that_do_not_do_the_same_are_named(change: dict[str, object], what: str) -> None:
    rows = [collective(rank, 1000 * n, 1000 * n + 10) for rank in range(3) for n in range(4)]
    rows[2 * 4 + 1] = collective(2, 1000, 1010, **change)
    found = match_collectives(timeline_of(rows))
    assert [(one.mismatch_type, one.ranks) for one in found.mismatches] == [(what, (2,))]


def test_sends_and_receives_are_no_collectives() -> None:
    rows = [
        collective(
            rank, 0, 10, collective="send" if rank else "recv", name="ncclDevKernel_SendRecv"
        )
        for rank in range(2)
    ]
    assert match_collectives(timeline_of(rows)).calls.op.size == 0


def test_names_of_libraries_become_one_word() -> None:
    for text, word in {
        "ncclDevKernel_AllGather_RING_LL(x)": "all_gather",
        "_reduce_scatter_base": "reduce_scatter",
        "ncclKernel_AllReduce_RING_LL_Sum_float": "all_reduce",
        "void vllm::cross_device_reduce_1stage<float>": "all_reduce",
        "alltoallv": "all_to_all",
        "ncclDevKernel_Broadcast_RING_LL": "broadcast",
    }.items():
        assert COLLECTIVE_OPS[op_of(text)] == word
    assert op_of("ncclDevKernel_SendRecv") == -1
    assert op_of("message pp 0>1") == -1  # as our own trainer records it


def test_a_simulated_step_shows_no_two_members_of_a_group() -> None:
    job = steady_job(ranks=2, steps=1)
    folded = Timeline.from_columns(
        {name: job.spans.column(name) for name in job.spans.column_names},
        source="simulated",
        metadata={"stages": "2"},
    )
    assert match_collectives(folded).calls.op.size == 0


@pytest.fixture(scope="module")
def eight_ranks(shared: Path) -> Timeline:
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    return Timeline.concat(read_kineto(folder / f"rank-{rank}.json.gz") for rank in range(8))


@pytest.fixture(scope="module")
def matched(eight_ranks: Timeline) -> MatchedCollectives:
    return match_collectives(eight_ranks)


@pytest.fixture(scope="module")
def truths(shared: Path) -> dict[str, list[dict[str, str]]]:
    path = shared / "validation" / "trace_truths_dev.json"
    found: dict[str, list[dict[str, str]]] = json.loads(path.read_text())["nanogpt8_stragglers"]
    return found


def test_eight_real_ranks_match_whole(
    matched: MatchedCollectives, truths: dict[str, dict[str, int]]
) -> None:
    whole = matched.calls.is_complete
    assert int(whole.sum()) == 76
    assert matched.mismatches == ()
    last = {str(rank): int((matched.last_rank[whole] == rank).sum()) for rank in range(8)}
    assert last == truths["own_last_arriver_of_76_matched_nccl_kernels"]


def test_waits_of_eight_real_ranks_are_those_of_tracelens(
    matched: MatchedCollectives, truths: dict[str, list[dict[str, str]]]
) -> None:
    named = [place for place, group in enumerate(matched.groups) if group.label == "0"]
    chosen = np.isin(matched.calls.group, named)
    members = matched.members
    for row in truths["tracelens_171dd74"]:
        own = chosen[members.call_index] & (members.rank == int(row["rank"]))
        total_us = matched.wait_ns[own].sum() / 1000
        assert total_us == pytest.approx(float(row["total_wait_time_us"]), abs=0.1)
        last = (matched.last_rank[chosen] == int(row["rank"])).sum()
        assert last == int(row["times_arrived_last"])


def test_bus_bandwidth_of_eight_real_ranks(
    matched: MatchedCollectives, truths: dict[str, list[dict[str, str]]]
) -> None:
    rows = {
        (row.op, row.bytes, row.num_calls, row.dtype[:1].lower()): row
        for row in sum_by_size(matched)
    }
    words = {"_reduce_scatter_base": "reduce_scatter", "_allgather_base": "all_gather"}
    for truth in truths["collective_busbw"]:
        size = round(float(truth["Full msg size (MB)"]) * 2**20)
        own = [
            row
            for row in rows.values()
            if (row.op, row.bytes) == (words[truth["Collective name"]], size)
        ]
        assert len(own) == 1
        # The truth calls 2**30 bytes a GB.
        found = own[0].bus_bytes_per_s / 2**30
        assert found == pytest.approx(float(truth["bus bw (GB/s)_median"]), rel=0.001)
        assert own[0].num_calls == int(truth["count"])


def test_large_transfers_reach_what_the_network_model_expects(
    eight_ranks: Timeline, matched: MatchedCollectives
) -> None:
    cluster = find_catalog_cluster(eight_ranks)
    assert cluster is not None
    assert cluster.gpu.name == "h100-80g-sxm"
    large = [
        one
        for one in predict_expected_collectives(sum_by_size(matched), cluster)
        if one.row.bytes > 50e6
    ]
    assert len(large) == 4
    for one in large:
        assert 0.75 < one.achieved_share < 1.1


_H100 = '{"name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936}'


def _on_devices(devices: dict[int, int], listed: int = 8) -> Timeline:
    """One collective of ranks, each on a device of its node, which has so many."""
    rows = [collective(rank, 0, 10, process=f"gpu {at}") for rank, at in devices.items()]
    return timeline_of(rows, devices=f"[{', '.join([_H100] * listed)}]")


@pytest.mark.parametrize(
    ("devices", "ranks", "inside"),
    [
        ({rank: rank for rank in range(8)}, range(8), True),
        ({rank: rank % 8 for rank in range(16)}, range(8, 16), True),
        ({rank: rank % 8 for rank in range(16)}, range(16), False),
        ({rank: rank % 8 for rank in range(16)}, (0, 8), False),
        ({rank: rank % 4 for rank in range(8)}, range(4), True),
        ({rank: rank % 4 for rank in range(8)}, range(8), False),
        ({0: 0, 1: 1}, (0, 1), True),
        ({0: 0, 1: 1}, range(8), False),  # Nodes may have two ranks as well as eight.
        ({0: 3, 1: 2}, (0, 1), False),  # An order of its own tells nothing.
    ],
)
def test_devices_tell_who_shares_a_node(
    devices: dict[int, int], ranks: tuple[int, ...], inside: bool
) -> None:
    assert infer_node_placement(_on_devices(devices)).is_intra_node(tuple(ranks)) is inside


def test_processes_that_see_one_device_tell_nothing_of_nodes() -> None:
    assert (
        infer_node_placement(_on_devices(dict.fromkeys(range(8), 0), listed=1)).ranks_per_node == ()
    )


def test_between_nodes_the_expected_speed_is_of_the_fabric_and_assumed() -> None:
    def rows_of(ranks: tuple[int, ...]) -> ExpectedCollective:
        extra = json.dumps({"Process Group Ranks": str(list(ranks))})
        said = {"bytes": 1 << 28, "extra": extra}
        job = timeline_of(
            [collective(rank, 0, 9000, process=f"gpu {rank % 8}", **said) for rank in ranks],
            devices=f"[{', '.join([_H100] * 8)}]",
        )
        cluster = find_catalog_cluster(job)
        assert cluster is not None
        return predict_expected_collectives(
            sum_by_size(match_collectives(job)), cluster, infer_node_placement(job)
        )[0]

    near, far = rows_of(tuple(range(8))), rows_of(tuple(range(0, 64, 8)))
    assert (near.is_fabric_assumed, far.is_fabric_assumed) == (False, True)
    assert far.bus_bytes_per_s < near.bus_bytes_per_s / 2


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 2080 Ti", ""), ("NVIDIA H100 NVL", ""),
        ("NVIDIA A100 80GB PCIe", "pcie"),
    ],
)  # fmt: skip
def test_the_cluster_is_one_with_that_very_gpu(name: str, cluster: str) -> None:
    found = find_catalog_cluster(
        timeline_of([collective(0, 0, 1)], devices=f'[{{"name": "{name}"}}]')
    )
    assert (cluster in found.gpu.name) if found is not None else not cluster


def _tp_pairs(more: str = "") -> list[Timeline]:
    """Four ranks in two groups of one name; the second pair takes three times as long."""
    extra = '{"Process Group Ranks": "[0, 1, ..., 3]"' + more + "}"
    return [
        timeline_of(
            [
                collective(
                    rank, 1000 * n, 1000 * n + (10 if rank < 2 else 30), group="tp", extra=extra
                )
                for n in range(4)
            ],
            distributed=json.dumps({"rank": rank, "pg_config": [{"pg_name": "tp", "ranks": ranks}]})
            if not more
            else "",
        )
        for rank, ranks in enumerate(([0, 1], [0, 1], [2, 3], [2, 3]))
    ]


def test_ranks_that_calls_cut_short_are_taken_from_the_list_of_groups() -> None:
    found = align_ranks(*_tp_pairs()).collectives
    assert sorted(group.ranks for group in found.groups) == [(0, 1), (2, 3)]
    assert sorted(found.transfer_ns.tolist()) == [10_000] * 4 + [30_000] * 4


def test_groups_of_one_name_that_cannot_be_told_apart_are_not_matched() -> None:
    parts = _tp_pairs(', "Group size": 2')
    found = match_collectives(Timeline.concat(parts))
    assert (found.calls.op.size, found.num_unmatched) == (0, 16)
    two = match_collectives(Timeline.concat(parts[:2]))
    assert two.calls.op.size == 4


def test_a_call_that_does_not_say_its_ranks_is_of_the_group_of_that_name() -> None:
    said = json.dumps({"Process Group Ranks": "[0, 1]"})
    rows = [
        collective(rank, 1000 * n, 1000 * n + 10, extra=said if n % 2 else None)
        for rank in range(2)
        for n in range(4)
    ]
    found = match_collectives(timeline_of(rows))
    assert [group.ranks for group in found.groups] == [(0, 1)]
    assert found.calls.op.size == 4


def test_groups_of_our_own_trainer_have_the_ranks_of_its_layout() -> None:
    layout = json.dumps({"tp": 2, "dp": 2})
    rows = [
        collective(rank, 1000 * n, 1000 * n + 10, group=group)
        for rank in range(4)
        for n, group in enumerate(("tp", "dp", "tp"))
    ]
    found = match_collectives(timeline_of(rows, layout=layout))
    assert sorted(group.ranks for group in found.groups) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert found.calls.is_complete.all()


def test_uneven_all_to_alls_match_and_count_as_their_largest() -> None:
    rows = [
        collective(
            rank, 1000 * n, 1000 * n + 10, collective="all_to_allv", bytes=1000 * (rank + 1) + n
        )
        for rank in range(4)
        for n in range(5)
    ]
    found = match_collectives(timeline_of(rows))
    assert found.mismatches == ()
    assert found.calls.bytes.tolist() == [4000 + n for n in range(5)]
