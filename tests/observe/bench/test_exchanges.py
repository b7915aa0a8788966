"""Exchanges between ranks: started here, checked, and counted as nccl-tests does."""

import time
from pathlib import Path

import pytest

from meshwright.observe.bench.case import Machine, Row
from meshwright.observe.bench.collectives import COLLECTIVES, bus_bytes_per_s
from meshwright.observe.bench.exchanges import Exchanges
from meshwright.observe.bench.family import Place, Size
from meshwright.observe.bench.messages import MESSAGES
from meshwright.observe.bench.suite import measure

torch = pytest.importorskip("torch", reason="ranks exchange through torch")

from meshwright.run.parallel.exchange_calls import OPS  # noqa: E402

SIZES: dict[Size, tuple[int, ...]] = {"quick": (1 << 10, 1 << 14), "full": (1 << 10,)}
HERE = Machine(device="a processor")


def few(family: Exchanges, *ops: str) -> Exchanges:
    return Exchanges(
        name=family.name,
        title="",
        ops=ops or family.ops,
        on_gpu=SIZES,
        on_host=SIZES,
        usual_s=family.usual_s,
    )


def test_every_operation_that_is_asked_for_is_known() -> None:
    assert {*COLLECTIVES.ops, *MESSAGES.ops} == set(OPS)


def test_one_rank_alone_exchanges_nothing() -> None:
    family = COLLECTIVES.family(1, "gloo")
    assert family.sweep is not None
    assert family.cases("full", False) == ()
    assert list(family.sweep((), Place(torch.device("cpu")), time.monotonic() + 9)) == []


def test_ranks_and_backend_tell_cases_apart() -> None:
    keys = {
        case.key
        for ranks, backend in ((2, "gloo"), (4, "gloo"), (2, "nccl"))
        for case in few(COLLECTIVES).family(ranks, backend).cases("full", False)  # type: ignore[arg-type]
    }
    assert len(keys) == 3 * len(COLLECTIVES.ops)


@pytest.mark.slow
def test_three_ranks_carry_out_all_of_them(tmp_path: Path) -> None:
    families = [few(one).family(3, "gloo") for one in (COLLECTIVES, MESSAGES)]
    path = tmp_path / "rows.jsonl"
    place = Place(torch.device("cpu"))
    found = measure(families, place, HERE, size="quick", path=path, budget_s=100)
    assert found.failed == ()
    assert len(found.rows) == 2 * len(OPS)
    assert all(row.samples >= 5 for row in found.rows)
    # All is there: a second run starts no ranks.
    again = measure(families, place, HERE, size="quick", path=path, budget_s=0)
    assert len(again.rows) == len(found.rows)


@pytest.mark.slow
def test_ranks_that_fail_are_a_fault_of_the_case() -> None:
    family = few(COLLECTIVES, "no_such_operation").family(2, "gloo")
    found = measure([family], Place(torch.device("cpu")), HERE, budget_s=60)
    assert found.rows == ()
    assert [key.split("/")[1] for key, _ in found.failed] == ["no_such_operation"]


def test_bus_bandwidth_counts_what_links_carry() -> None:
    [case, *_] = COLLECTIVES.family(4, "gloo").cases("full", False)
    row = Row(case=case, seconds=0.5, low_s=0.5, high_s=0.5, samples=1, bytes=1000.0)
    assert case.name == "all_reduce"
    assert bus_bytes_per_s(row) == pytest.approx(2000 * 2 * 3 / 4)
