"""Exchanges between ranks: started here, checked, and counted as nccl-tests does."""

import time
from pathlib import Path

import pytest

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.bench_family import BenchTarget, Size
from meshwright.observe.bench.communication import (
    COLLECTIVE_EXCHANGES,
    P2P_EXCHANGES,
    CommunicationFamily,
    compute_bus_bandwidth,
)
from meshwright.observe.bench.suite import run_bench
from meshwright.observe.hardware.machine import Machine

torch = pytest.importorskip("torch", reason="ranks exchange through torch")

from meshwright.run.parallel.exchange_timing import TIMED_OPS  # noqa: E402

SIZES: dict[Size, tuple[int, ...]] = {"quick": (1 << 10, 1 << 14), "full": (1 << 10,)}
HERE = Machine(device="a processor")


def few(family: CommunicationFamily, *ops: str) -> CommunicationFamily:
    return CommunicationFamily(
        name=family.name,
        title="",
        ops=ops or family.ops,
        gpu_sizes_bytes=SIZES,
        cpu_sizes_bytes=SIZES,
        typical_s=family.typical_s,
    )


def test_every_operation_that_is_asked_for_is_known() -> None:
    assert {*COLLECTIVE_EXCHANGES.ops, *P2P_EXCHANGES.ops} == set(TIMED_OPS)


def test_one_rank_alone_exchanges_nothing() -> None:
    family = COLLECTIVE_EXCHANGES.build_family(1, "gloo")
    assert family.run_all is not None
    assert family.cases("full", False) == ()
    assert list(family.run_all((), BenchTarget(torch.device("cpu")), time.monotonic() + 9)) == []


def test_ranks_and_backend_tell_cases_apart() -> None:
    keys = {
        case.key
        for ranks, backend in ((2, "gloo"), (4, "gloo"), (2, "nccl"))
        for case in few(COLLECTIVE_EXCHANGES).build_family(ranks, backend).cases("full", False)  # type: ignore[arg-type]
    }
    assert len(keys) == 3 * len(COLLECTIVE_EXCHANGES.ops)


@pytest.mark.slow
def test_three_ranks_carry_out_all_of_them(tmp_path: Path) -> None:
    families = [few(one).build_family(3, "gloo") for one in (COLLECTIVE_EXCHANGES, P2P_EXCHANGES)]
    path = tmp_path / "rows.jsonl"
    place = BenchTarget(torch.device("cpu"))
    found = run_bench(families, place, HERE, size="quick", path=path, budget_s=100)
    assert found.failed_cases == ()
    assert len(found.rows) == 2 * len(TIMED_OPS)
    assert all(row.num_samples >= 5 for row in found.rows)
    # All is there: a second run starts no ranks.
    again = run_bench(families, place, HERE, size="quick", path=path, budget_s=0)
    assert len(again.rows) == len(found.rows)


@pytest.mark.slow
def test_ranks_that_fail_are_a_fault_of_the_case() -> None:
    family = few(COLLECTIVE_EXCHANGES, "no_such_operation").build_family(2, "gloo")
    found = run_bench([family], BenchTarget(torch.device("cpu")), HERE, budget_s=60)
    assert found.rows == ()
    assert [key.split("/")[1] for key, _ in found.failed_cases] == ["no_such_operation"]


def test_bus_bandwidth_counts_what_links_carry() -> None:
    [case, *_] = COLLECTIVE_EXCHANGES.build_family(4, "gloo").cases("full", False)
    row = BenchRow(case=case, median_s=0.5, p10_s=0.5, p90_s=0.5, num_samples=1, bytes=1000.0)
    assert case.name == "all_reduce"
    assert compute_bus_bandwidth(row) == pytest.approx(2000 * 2 * 3 / 4)
