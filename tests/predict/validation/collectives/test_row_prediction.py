"""What rows measured under any name gets a prediction, with what it assumes."""

from typing import Any

import pytest

from meshwright.predict.network import predict_collective
from meshwright.predict.validation.collectives import (
    ScoredCollective,
    read_system,
    score_collective,
)
from meshwright.predict.validation.collectives.row_prediction import normalize_op

ROW: dict[str, Any] = {
    "system": "a cluster",
    "gpu": "H100 80GB HBM3",
    "nodes": 2,
    "gpus": 16,
    "gpus_per_node": 8,
    "intra": "NVLink4 (H100/H200 NVSwitch)",
    "inter": "32x100Gb/s EFA",
    "size_bytes": 1 << 26,
    "time_us": 1000.0,
}


def scored(**changes: object) -> ScoredCollective:
    return score_collective({**ROW, **changes})


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("all_reduce", "all_reduce"),
        ("AllReduce", "all_reduce"),
        ("all_reduce_perf", "all_reduce"),
        ("allgather", "all_gather"),
        ("reducescatter", "reduce_scatter"),
        ("alltoall", "all_to_all"),
        ("alltoall_perf", "all_to_all"),
        ("sendrecv", "send_recv"),
        ("bcast", "broadcast"),
        ("gossip", None),
    ],
)
def test_collectives_are_known_by_their_many_spellings(name: str, op: str | None) -> None:
    assert normalize_op(name) == op


@pytest.mark.parametrize("name", ["allreduce", "alltoall", "sendrecv", "broadcast"])
def test_a_spelling_is_predicted_as_the_collective_it_means(name: str) -> None:
    op = normalize_op(name)
    assert op is not None
    expected = predict_collective(read_system(ROW).placement, op, ROW["size_bytes"]).seconds
    answer = scored(collective=name)
    assert answer.predicted_us == pytest.approx(expected * 1e6)
    assert answer.collective == op
    assert answer.assumed == ()


def test_bandwidth_stands_in_for_a_time() -> None:
    size = ROW["size_bytes"]
    timed = scored(collective="all_reduce")
    bus = scored(collective="all_reduce", time_us=None, busbw_GBps=size * 1.875 / 1000e3)
    plain = scored(collective="all_reduce", time_us=None, algbw_GBps=size / 1000e3)
    assert bus.error == pytest.approx(timed.error)
    assert plain.error == pytest.approx(timed.error)


@pytest.mark.parametrize("name", ["ep_dispatch", "ep_dispatch_bf16", "ep_combine", "ep_combine_ll"])
def test_experts_exchange_is_predicted_as_deepeps_benchmark_where_nothing_is_said(
    name: str,
) -> None:
    answer = scored(collective=name, size_bytes=None)
    assert answer.predicted_us is not None
    assert answer.error is not None
    assert any("DeepEP's benchmark" in text for text in answer.assumed)


def test_experts_exchange_takes_what_the_note_says() -> None:
    note = "{} tokens/batch, hidden 7168, top-4 groups, top-8 experts, FP8 dispatch, BF16 combine"
    full = scored(collective="ep_dispatch", note=note.format(4096))
    half = scored(collective="ep_dispatch", note=note.format(2048))
    assert full.assumed == half.assumed == ()
    assert full.predicted_us is not None
    assert half.predicted_us is not None
    assert half.predicted_us < full.predicted_us
    combined = scored(collective="ep_combine", note=note.format(4096)).predicted_us
    assert combined is not None
    assert full.predicted_us < combined < 2 * full.predicted_us


def test_experts_bandwidth_counts_the_bytes_that_their_kernels_count() -> None:
    # UCCL-EP on one p5en node prints both: 500 µs and 320 GB/s.
    node = {"nodes": 1, "gpus": 8, "collective": "ep_dispatch", "time_us": None}
    answer = scored(**node, ep_bandwidth_GBps=320.0, ep_bandwidth_domain="NVLink")
    assert answer.measured_us == pytest.approx(500, rel=0.03)


def test_raw_rdma_is_bound_by_the_card_and_by_posting() -> None:
    def rate(size: int) -> float:
        answer = scored(
            collective="rdma_all_to_all", size_bytes=size, time_us=None, throughput_GBps=10.0
        )
        assert answer.predicted_us is not None
        assert answer.measured_us == pytest.approx(size / 10e3)
        return size / answer.predicted_us / 1e3

    assert rate(8192) < rate(65536) < rate(1 << 22) <= 50.0


def test_unknown_operation_says_which_are_known() -> None:
    assert "all_reduce" in (scored(collective="gossip").skipped or "")
