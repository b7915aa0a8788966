"""Copies: large ones first, bytes counted as they move, and never more than there is room for."""

import pytest

from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.kernels.memory_copies import (
    ACROSS,
    GIB,
    KIB,
    MIB,
    list_copy_cases,
    prepare_copy,
)
from meshwright.observe.bench.timing import HostTimer

torch = pytest.importorskip("torch", reason="the bench measures with torch")

HERE = BenchTarget(torch.device("cpu"))


def test_a_gpu_is_asked_for_copies_within_it_and_across_its_link() -> None:
    found = list_copy_cases("full", on_gpu=True)
    assert {case.name for case in found} == {"copy", "fill", *ACROSS}
    within = {case.size("bytes") for case in found if case.name == "copy"}
    assert (min(within), max(within)) == (64 * KIB, 4 * GIB)
    assert {case.text("memory") for case in found if case.name in ACROSS} == {"pinned", "pageable"}
    assert len({case.key for case in found}) == len(found)


def test_a_processor_has_no_link() -> None:
    assert {case.name for case in list_copy_cases("full", on_gpu=False)} == {"copy", "fill"}


@pytest.mark.parametrize(("name", "times"), [("copy", 2), ("fill", 1)])
def test_a_copy_reads_and_writes_and_a_fill_only_writes(name: str, times: int) -> None:
    case = next(one for one in list_copy_cases("full", on_gpu=False) if one.name == name)
    small = type(case)(family=case.family, name=name, sizes={"bytes": 64 * KIB})
    made = prepare_copy(small, HERE)
    assert made is not None
    assert made.bytes == times * 64 * KIB
    assert len(made.calls) == 512  # pieces of what no cache holds
    assert HostTimer(budget_s=0.0).time(made).median_s > 0


def test_what_would_fill_more_than_half_of_the_device_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * MIB, GIB))
    large = [one for one in list_copy_cases("full", on_gpu=True) if one.size("bytes") > 50 * MIB]
    assert len(large) > 5
    assert all(prepare_copy(one, BenchTarget(torch.device("cuda"))) is None for one in large)
