"""What NCCL would run, simulated, beside the closed form of its cost."""

import statistics

import pytest

from meshwright.predict.collective import predict_nccl, simulate_nccl, simulate_nccl_us
from meshwright.predict.network import NcclOp, build_strided_placement, predict_collective
from meshwright.spec.catalog import get_cluster

SYSTEMS = ("h100-superpod", "dgx-a100-80g", "meta-llama3")


def differences(op: NcclOp, only: tuple[str, ...] | None) -> list[float]:
    found = []
    for name in SYSTEMS:
        for gpus in (8, 16, 64):
            place = build_strided_placement(get_cluster(name).with_gpus(gpus), 0, gpus, sharers=1)
            for power in (13, 18, 22, 26, 30):
                priced = predict_collective(place, op, 1 << power, only=only)
                found.append(
                    simulate_nccl_us(place, op, 1 << power, only=only) / priced.seconds / 1e6
                )
    return [ratio - 1 for ratio in found]


@pytest.mark.parametrize(
    ("op", "only", "most"),
    [
        ("all_reduce", ("ring",), 0.10),
        ("all_gather", ("ring",), 0.10),
        ("reduce_scatter", ("ring",), 0.10),
        ("all_to_all", None, 0.10),
        ("all_reduce", ("tree",), 0.25),
    ],
)
def test_it_agrees_with_the_closed_form(
    op: NcclOp, only: tuple[str, ...] | None, most: float
) -> None:
    assert statistics.median(map(abs, differences(op, only))) < most


def test_nccl_s_choice_is_simulated() -> None:
    system = get_cluster("h100-superpod").with_gpus(64)
    small, large = (predict_nccl(system, "all_reduce", size) for size in (1 << 13, 1 << 30))
    assert small.seconds < large.seconds
    assert small.costs != large.costs
    assert large.busbw_bytes_per_s > 2e11


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "send_recv"])
def test_more_bytes_take_longer(op: NcclOp) -> None:
    place = build_strided_placement(get_cluster("h100-superpod").with_gpus(32), 0, 32, sharers=1)
    times = [simulate_nccl_us(place, op, 1 << power) for power in (10, 16, 22, 28)]
    assert times == sorted(times)


def test_one_unit_stands_for_all_units_of_a_large_exchange() -> None:
    place = build_strided_placement(get_cluster("h100-superpod").with_gpus(128), 0, 128, sharers=1)
    for nbytes in (1 << 16, 1 << 26):
        whole = simulate_nccl(place, "all_to_all", nbytes).seconds * 1e6
        assert simulate_nccl_us(place, "all_to_all", nbytes) == pytest.approx(whole, rel=0.02)


def test_a_group_of_one_takes_no_time() -> None:
    place = build_strided_placement(get_cluster("h100-superpod").with_gpus(8), 0, 1, sharers=1)
    assert simulate_nccl_us(place, "all_reduce", 1e6) == 0.0
