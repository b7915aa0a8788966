"""Simulated collectives: textbook times, contention, pipelining, and an exact reference."""

import statistics
from itertools import pairwise

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, CollectiveBuilder, build_algorithm
from meshwright.policy.collective.phase_pipelining import pipeline_phases
from meshwright.predict.collective import MessageCosts, build_cluster_network, simulate_collective
from meshwright.predict.collective.sim_network import SimNetwork
from meshwright.spec.catalog import get_cluster
from meshwright.spec.cluster import Cluster, GraphVertex, LinkGraph
from meshwright.spec.cluster.link_graph import GraphLink
from tests.predict.collective.fluid import fluid_seconds

H100 = get_cluster("h100-superpod")


def line(ranks: int, rate: float = 1e9, latency_s: float = 0.0) -> LinkGraph:
    """GPUs in a row, each linked to the next in both directions."""
    names = [f"gpu{index}" for index in range(ranks)]
    links = [
        GraphLink(source=a, target=b, kind="nvlink", link_bytes_per_s=rate, latency_s=latency_s)
        for first, second in pairwise(names)
        for a, b in ((first, second), (second, first))
    ]
    vertices = tuple(GraphVertex(name=name, kind="gpu") for name in names)
    return LinkGraph(vertices=vertices, links=tuple(links))


def ring(ranks: int, rate: float = 1e9, latency_s: float = 0.0) -> LinkGraph:
    """The same, closed."""
    graph = line(ranks, rate, latency_s)
    ends = ((f"gpu{ranks - 1}", "gpu0"), ("gpu0", f"gpu{ranks - 1}"))
    more = tuple(
        GraphLink(source=a, target=b, kind="nvlink", link_bytes_per_s=rate, latency_s=latency_s)
        for a, b in ends
    )
    return LinkGraph(vertices=graph.vertices, links=graph.links + more)


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_a_ring_takes_the_textbook_time(ranks: int) -> None:
    nbytes, latency_s = 1e6, 1e-5
    result = simulate_collective(
        build_algorithm("ring", "all_reduce", ranks), ring(ranks, 1e9, latency_s), nbytes
    )
    steps = 2 * (ranks - 1)
    assert result.seconds == pytest.approx(steps * (latency_s + nbytes / ranks / 1e9))


def test_pieces_stream_through_a_chain() -> None:
    ranks, pieces, nbytes = 6, 20, 1e6
    chain = build_algorithm("chain", "broadcast", ranks, pieces=pieces)
    result = simulate_collective(chain, line(ranks), nbytes)
    assert result.seconds == pytest.approx((pieces + ranks - 2) * nbytes / pieces / 1e9)


def test_latency_does_not_keep_a_lane_busy_but_overhead_does() -> None:
    chain = build_algorithm("chain", "broadcast", 2, pieces=10)
    late = simulate_collective(chain, line(2, 1e9, 1e-4), 1e6)
    assert late.seconds == pytest.approx(1e6 / 1e9 + 1e-4)
    posted = simulate_collective(chain, line(2), 1e6, costs=MessageCosts.physical(overhead_s=1e-4))
    assert posted.seconds == pytest.approx(1e6 / 1e9 + 10 * 1e-4)


def test_moves_of_one_step_share_a_link() -> None:
    both = CollectiveBuilder("two", "gather", ranks=3, chunks=3)
    with both.step():
        both.copy(1, 0, chunk=1)
        both.copy(2, 0, chunk=2)
    result = simulate_collective(both.build(), line(3), 3e6)
    assert result.seconds == pytest.approx(2e6 / 1e9)
    assert result.bottleneck is not None
    assert result.bottleneck.link == "gpu1→gpu0"
    assert result.bottleneck.utilization == pytest.approx(1.0)


def test_a_move_waits_until_what_it_sends_is_there() -> None:
    relay = CollectiveBuilder("relay", "broadcast", ranks=3, chunks=1)
    with relay.step():
        relay.copy(0, 1, chunk=0)
    with relay.step():
        relay.copy(1, 2, chunk=0)
    result = simulate_collective(relay.build(), line(3), 1e6)
    assert result.seconds == pytest.approx(2e6 / 1e9)
    assert result.finish_s == pytest.approx((1e-3, 2e-3, 2e-3))


def test_a_late_move_does_not_hold_up_a_later_step_that_is_ready() -> None:
    # Step 1 sends chunk 0 of rank 2 onwards once it arrived over a slow link; step 2 could go at
    # once over the same fast link, which is idle until then.
    late = CollectiveBuilder("late", "all_gather", ranks=3, chunks=3)
    with late.step():
        late.copy(0, 1, chunk=0)
    with late.step():
        late.copy(1, 2, chunk=0)
    with late.step():
        late.copy(1, 2, chunk=1, channel=1)
    graph = line(3)
    slow = LinkGraph(
        vertices=graph.vertices,
        links=tuple(
            GraphLink(source=one.source, target=one.target, kind=one.kind, link_bytes_per_s=1e8)
            if one.target == "gpu1" and one.source == "gpu0"
            else one
            for one in graph.links
        ),
    )
    result = simulate_collective(late.build(), slow, 3e6)
    assert result.seconds == pytest.approx(1e6 / 1e8 + 1e6 / 1e9)


def test_slots_are_not_overwritten_before_they_are_read() -> None:
    swap = CollectiveBuilder("swap", "broadcast", ranks=3, chunks=1)
    with swap.step():
        swap.copy(0, 1, chunk=0)
    with swap.step():
        swap.copy(1, 2, chunk=0)
    with swap.step():
        swap.copy(0, 1, chunk=0, channel=1)
    result = simulate_collective(swap.build(), line(3), 1e6)
    # The second copy to rank 1 arrives at 2 ms, when rank 1 has just sent the first one on.
    assert result.finish_s[1] == pytest.approx(2e-3)


def test_every_link_carries_what_the_algorithm_sends() -> None:
    result = simulate_collective(build_algorithm("ring", "all_reduce", 4), ring(4), 4e6)
    loads = {load.link: load.carried_bytes for load in result.list_link_loads()}
    assert loads == pytest.approx({f"gpu{r}→gpu{(r + 1) % 4}": 6e6 for r in range(4)})
    assert result.busbw_bytes_per_s == pytest.approx(1e9)
    assert result.algbw_bytes_per_s == pytest.approx(4e6 / 6e-3)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_no_algorithm_beats_the_bound(op: str) -> None:
    system = H100.with_gpus(16)
    for channels in (1, 8):
        plain = build_algorithm("ring", op, 16, per_node=8, channels=channels)  # type: ignore[arg-type]
        result = simulate_collective(plain, system, 1e8)
        assert result.bound_s <= result.seconds * (1 + 1e-9)
        on_graph = simulate_collective(plain, system.build_link_graph(), 1e8)
        assert 0 < on_graph.bound_s <= on_graph.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("h100-superpod", 16),
        ("aws-p4d", 16),
        ("aws-p5", 16),
        ("meta-llama3", 24),
        ("azure-nd-mi300x-v5", 8),
    ],
)
def test_a_cluster_and_its_graph_give_the_same_time(name: str, gpus: int) -> None:
    system = get_cluster(name).with_gpus(gpus)
    for collective in (
        build_algorithm("ring", "all_reduce", gpus, per_node=min(8, gpus // 2)),
        build_algorithm("pairwise", "all_to_all", gpus),
        build_algorithm("double_tree", "all_reduce", gpus, per_node=min(8, gpus // 2)),
    ):
        a, b = (
            simulate_collective(collective, one, 1e7).seconds
            for one in (system, system.build_link_graph())
        )
        assert a == pytest.approx(b, rel=0.02)


def tiny() -> list[tuple[SimNetwork, Collective]]:
    cases = []
    for name, gpus in (("h100-superpod", 16), ("aws-p4d", 16), ("azure-nd-mi300x-v5", 8)):
        network = build_cluster_network(get_cluster(name).with_gpus(gpus))
        node = min(gpus, 8) if gpus > 8 else None
        for algorithm, op in (
            ("ring", "all_gather"),
            ("halving_doubling", "all_reduce"),
            ("bruck", "all_to_all"),
            ("two_level", "all_gather"),
            ("binomial", "broadcast"),
            ("pairwise", "all_to_all"),
            ("chain", "broadcast"),
        ):
            if algorithm == "two_level" and node is None:
                continue
            cases.append((network, build_algorithm(algorithm, op, gpus, per_node=node)))  # type: ignore[arg-type]
    return cases


def test_it_is_close_to_exact_max_min_fair_sharing() -> None:
    errors = []
    for network, collective in tiny():
        for nbytes in (1e4, 1e8):
            exact = fluid_seconds(collective, network, nbytes)
            errors.append(simulate_collective(collective, network, nbytes).seconds / exact - 1)
    assert statistics.median(map(abs, errors)) < 1e-6
    assert max(map(abs, errors)) < 0.15


def test_adding_up_even_steps_gives_what_carrying_them_out_gives() -> None:
    system, ring_64 = (
        H100.with_gpus(64),
        build_algorithm("ring", "all_reduce", 64, per_node=8, channels=8),
    )
    fast = simulate_collective(ring_64, system, 1e9)
    slow = simulate_collective(ring_64, system, 1e9, keep_moves=True)
    assert fast.seconds == pytest.approx(slow.seconds, rel=1e-3)
    assert fast.link_bytes == pytest.approx(slow.link_bytes, rel=1e-9)
    assert np.array(fast.finish_s) == pytest.approx(np.array(slow.finish_s), rel=1e-3)


def test_a_thousand_gpus_take_what_their_cards_need() -> None:
    # How long the simulation itself takes is measured in benchmarks/collective_proof.py.
    ring = build_algorithm("ring", "all_reduce", 1024, per_node=8, channels=8)
    found = simulate_collective(ring, H100.with_gpus(1024), 1e9)
    assert found.bottleneck is not None
    assert "nic" in found.bottleneck.link
    assert found.bound_s < found.seconds < 1.3 * found.bottleneck.busy_s


def test_parts_that_follow_each_other_hide_phases() -> None:
    system: Cluster = H100.with_gpus(32)
    whole = build_algorithm("two_level", "all_reduce", 32, per_node=8)
    one, eight = (
        simulate_collective(pipeline_phases(whole, parts), system, 1e9).seconds for parts in (1, 8)
    )
    assert eight < 0.8 * one


def test_a_group_may_lie_anywhere() -> None:
    collective = build_algorithm("ring", "all_reduce", 8)
    inside = simulate_collective(collective, H100.with_gpus(64), 1e8, members=range(8, 16))
    across = simulate_collective(collective, H100.with_gpus(64), 1e8, members=range(0, 64, 8))
    assert across.seconds > 5 * inside.seconds


def test_a_timeline_has_a_send_and_a_receive_for_every_move() -> None:
    collective = build_algorithm("ring", "all_reduce", 4)
    result = simulate_collective(collective, ring(4), 4e6, keep_moves=True)
    timeline = result.build_timeline()
    assert timeline.num_spans == 2 * collective.moves
    assert timeline.extent_ns == (0, round(result.seconds * 1e9))
    assert timeline.ranks == (0, 1, 2, 3)
    assert set(timeline.string_column("lane").values) >= {
        "send to 1, channel 0",
        "receive from 0, channel 0",
    }


def test_no_timeline_without_moves() -> None:
    result = simulate_collective(build_algorithm("ring", "all_reduce", 4), ring(4), 4e6)
    with pytest.raises(InputError, match="keep_moves=True"):
        result.build_timeline()


def test_bad_input_is_refused() -> None:
    collective = build_algorithm("ring", "all_reduce", 4)
    with pytest.raises(InputError, match="4 ranks on 3 GPUs"):
        simulate_collective(collective, line(3), 1e6)
    with pytest.raises(InputError, match="named twice"):
        simulate_collective(collective, ring(4), 1e6, members=[0, 1, 2, 2])
    with pytest.raises(InputError, match="is not a size"):
        simulate_collective(collective, ring(4), -1)
    with pytest.raises(InputError, match="no switch named 'nvswitch0'"):
        simulate_collective(build_algorithm("nvls", "all_reduce", 4), ring(4), 1e6)
