"""What is said of NCCL's choice: true at every size, and complete."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import (
    NcclOp,
    Placement,
    build_strided_placement,
    predict_collective,
)
from meshwright.predict.network.explain.explanation import (
    NcclExplanation,
    NcclSizeExplanation,
    explain_choice,
    explain_size,
)
from meshwright.predict.network.explain.explanation_text import (
    format_explanation,
    format_size_explanation,
    format_table,
)
from meshwright.predict.network.nccl_constants import ALGORITHMS, PROTOCOLS
from meshwright.predict.network.tuner.tuner_csv import TUNED_OPS
from meshwright.spec.catalog import get_cluster

H100 = get_cluster("h100-superpod")
A100 = get_cluster("dgx-a100-80g")
NODE = build_strided_placement(H100, 0, 8, sharers=1)
RAIL = build_strided_placement(H100, 0, 16, 8, sharers=1)
FOUR_NODES = build_strided_placement(H100, 0, 32, sharers=1)
TWO_A100_NODES = build_strided_placement(A100, 0, 16, sharers=1)

places = st.sampled_from(
    [NODE, RAIL, FOUR_NODES, TWO_A100_NODES, build_strided_placement(H100, 0, 2)]
)
operations: st.SearchStrategy[NcclOp] = st.sampled_from(TUNED_OPS)
versions = st.sampled_from(["2.19", "2.27", "2.30"])


def reason(found: NcclExplanation, algorithm: str) -> str:
    (why,) = [item.reason for item in found.unavailable if item.algorithm == algorithm]
    return why


@given(place=places, op=operations, nccl=versions, nbytes=st.integers(0, 1 << 36))
def test_the_segment_of_a_size_names_what_a_call_takes(
    place: Placement, op: NcclOp, nccl: str, nbytes: int
) -> None:
    found = explain_choice(place, op, nccl=nccl)
    fitting = [
        segment
        for segment in found.segments
        if segment.start_bytes <= nbytes
        and (segment.end_bytes is None or nbytes <= segment.end_bytes)
    ]
    assert len(fitting) == 1
    cost = predict_collective(place, op, nbytes, nccl=nccl)
    assert (fitting[0].algorithm, fitting[0].protocol) == (cost.algorithm, cost.protocol)
    few, many = fitting[0].channels
    assert few <= cost.channels <= many or nbytes > 16 << 30


@given(place=places, op=operations, nccl=versions)
@settings(max_examples=40)
def test_segments_follow_each_other_from_nothing_to_any_size(
    place: Placement, op: NcclOp, nccl: str
) -> None:
    segments = explain_choice(place, op, nccl=nccl).segments
    assert segments[0].start_bytes == 0
    assert segments[-1].end_bytes is None
    for left, right in pairwise(segments):
        assert left.end_bytes == right.start_bytes - 1


@given(place=places, op=operations, nccl=versions)
@settings(max_examples=40)
def test_no_runner_up_beats_the_winner_at_the_ends_of_a_segment(
    place: Placement, op: NcclOp, nccl: str
) -> None:
    for segment in explain_choice(place, op, nccl=nccl).segments:
        for duel in segment.margins:
            assert duel.margin >= -1e-6
            assert duel.winner.latency_us + duel.winner.stream_us == pytest.approx(
                duel.winner.nccl_us
            )


@given(place=places, op=operations, nbytes=st.integers(0, 1 << 36))
def test_the_table_of_a_size_has_every_algorithm_and_protocol_once(
    place: Placement, op: NcclOp, nbytes: int
) -> None:
    found = explain_size(place, op, nbytes)
    priced = {(item.algorithm, item.protocol) for item in found.candidates}
    for algorithm in ALGORITHMS:
        for protocol in PROTOCOLS:
            reasons = [
                item
                for item in found.unavailable
                if item.algorithm == algorithm and item.protocol in ("", protocol)
            ]
            assert ((algorithm, protocol) in priced) + len(reasons) == 1


@given(nbytes=st.integers(1, 1 << 34))
def test_the_winners_prediction_is_that_of_a_call(nbytes: int) -> None:
    found = explain_size(NODE, "all_gather", nbytes)
    seconds = predict_collective(NODE, "all_gather", nbytes).seconds
    # A call also never takes less than a smaller one, so it may stand a little above.
    assert found.candidates[0].predicted_us <= seconds * 1e6 * (1 + 1e-9)
    assert found.fastest.predicted_us <= found.candidates[0].predicted_us


def test_h100_node_takes_ring_ll_then_nvls_by_bandwidth() -> None:
    low, high = explain_choice(NODE, "all_reduce").segments
    assert (low.algorithm, low.protocol, low.channels) == ("ring", "ll", (1, 24))
    assert (high.algorithm, high.protocol, high.channels) == ("nvls", "simple", (16, 16))
    assert high.margins[0].deciding_term == "bandwidth"
    assert low.margins[0].deciding_term == "latency"


def test_a_cap_is_named_where_it_holds_and_only_there() -> None:
    low, high = explain_choice(NODE, "all_reduce").segments
    assert low.estimate is not None
    assert high.estimate is not None
    assert low.estimate.cap == "ll_max"
    assert low.estimate.gbps < low.estimate.uncapped_gbps
    assert high.estimate.cap == ""
    assert high.estimate.gbps == high.estimate.uncapped_gbps


def test_latency_is_the_sum_of_its_hops() -> None:
    for segment in explain_choice(FOUR_NODES, "all_reduce").segments:
        parts = segment.estimate
        assert parts is not None
        hops = parts.intra_hops * parts.intra_hop_us + parts.inter_hops * parts.inter_hop_us
        plateau = 1.4 if segment.algorithm == "ring" and segment.protocol == "simple" else 1.0
        assert segment.margins[1].winner.latency_us == pytest.approx(
            (parts.base_us + hops) * plateau
        )


@pytest.mark.parametrize(
    ("place", "op", "algorithm", "why"),
    [
        (NODE, "all_gather", "tree", "Tree serves all_reduce only"),
        (TWO_A100_NODES, "all_reduce", "nvls", "needs NVSwitch and sm_90, and the GPUs are sm_80"),
        (FOUR_NODES, "all_gather", "pat", "needs one GPU per node, and the group has 8"),
        (NODE, "all_reduce", "pat", "all_gather and reduce_scatter only"),
        (FOUR_NODES, "all_reduce", "collnet_direct", "CollNet is off"),
        (FOUR_NODES, "all_reduce", "nvls", "needs CollNet, which is off"),
        (NODE, "all_reduce", "nvls_tree", "the group is in one"),
        (RAIL, "all_reduce", "nvls_tree", "three GPUs per node"),
    ],
)
def test_what_is_missing_says_why(place: Placement, op: NcclOp, algorithm: str, why: str) -> None:
    assert why in reason(explain_choice(place, op), algorithm)


def test_collnet_makes_its_algorithms_candidates() -> None:
    found = explain_size(FOUR_NODES, "all_reduce", 1 << 30, collnet=True)
    names = {item.algorithm for item in found.candidates}
    assert {"collnet_direct", "collnet_chain", "nvls"} <= names


def test_collnet_on_a_fabric_that_does_not_reduce_is_remarked() -> None:
    place = build_strided_placement(get_cluster("aws-p5"), 0, 16, sharers=1)
    assert not place.links.has_in_network_fabric
    assert any(
        "without reductions" in note
        for note in explain_choice(place, "all_reduce", collnet=True).notes
    )


def test_what_only_leaves_out_says_so() -> None:
    found = explain_choice(NODE, "all_reduce", only=("ring",))
    assert {segment.algorithm for segment in found.segments} == {"ring"}
    assert reason(found, "tree") == "only ring may be used"


def test_a_restriction_to_what_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="Tree serves all_reduce only") as caught:
        explain_choice(NODE, "broadcast", only=("tree",))
    assert "add ring" in str(caught.value)


def test_every_mistake_of_a_question_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        explain_size(NODE, "allreduce", -1, only=("rings",))  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3


def test_point_to_point_kernels_have_channels_but_no_choice() -> None:
    found = explain_choice(NODE, "all_to_all")
    assert {segment.algorithm for segment in found.segments} == {"pairwise"}
    assert "no choice" in format_explanation(found)[0]
    with pytest.raises(InputError, match="no algorithms"):
        explain_size(NODE, "all_to_all", 1024)


def test_a_group_of_one_sends_nothing() -> None:
    alone = build_strided_placement(H100, 0, 1)
    assert "sends nothing" in format_explanation(explain_choice(alone, "all_reduce"))[0]
    with pytest.raises(InputError, match="group of one"):
        explain_size(alone, "all_reduce", 1024)


def test_sentences_tell_sizes_reasons_and_what_is_missing() -> None:
    summary, ring, nvls, missing = format_explanation(explain_choice(NODE, "all_reduce"))
    assert "picks Ring/LL up to 1.1 MiB on 1 to 24 channels, then NVLS/Simple" in summary
    assert "14 hops inside a node of 0.6 µs" in ring
    assert "held by its cap on LL" in ring
    assert "bandwidth decides, bytes take 4.3 µs against 14.3 µs" in nvls
    assert "At 16 GiB" in nvls
    assert "PAT: PAT serves all_gather and reduce_scatter only" in missing


def test_a_step_of_the_tree_factor_is_named_where_it_moves_the_choice() -> None:
    lines = format_explanation(explain_choice(TWO_A100_NODES, "all_reduce"))
    assert any("factor on tree bandwidth changes at 4 MiB" in line for line in lines)
    assert any(line.startswith("Tree/LL128 from 4 MiB") for line in lines)


def foreseen(times_us: dict[str, float]) -> NcclSizeExplanation:
    """NCCL's table at 2 MiB on a node with predictions of our own making, 100 µs for the rest."""
    found = explain_size(NODE, "all_reduce", 2 << 20)
    return msgspec.structs.replace(
        found,
        candidates=tuple(
            msgspec.structs.replace(item, predicted_us=times_us.get(item.title, 100.0))
            for item in found.candidates
        ),
    )


def test_size_sentences_say_where_the_prediction_disagrees() -> None:
    picked, predicted, _ = format_size_explanation(foreseen({"NVLS/Simple": 50.0, "Ring/LL": 40.0}))
    assert "picks NVLS/Simple on 16 channels for 2 MiB" in picked
    assert "50.0 µs for it and 40.0 µs (20% less) for Ring/LL: a tuner file can" in predicted
    _, agreed, _ = format_size_explanation(foreseen({"NVLS/Simple": 50.0}))
    assert agreed == "We predict 50.0 µs, the least of all."


def test_the_table_marks_both_winners_and_explains_gaps() -> None:
    heading, first, *rest = format_table(foreseen({"NVLS/Simple": 50.0, "Ring/LL": 40.0}))
    assert heading[0] == "choice"
    assert first[0] == "NVLS/Simple"
    assert first[-1] == "NCCL's choice"
    assert [row[0] for row in rest if row[-1] == "predicted fastest"] == ["Ring/LL"]
    assert all(len(row) == len(heading) for row in rest)
    assert any(row[0] == "NVLS/LL" and "Simple alone" in row[-1] for row in rest)
