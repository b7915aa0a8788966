"""The bench goes through its cases, keeps every row, and goes on where it was stopped."""

from pathlib import Path

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size, prepare_nothing
from meshwright.observe.bench.families import FAMILIES, list_families
from meshwright.observe.bench.kernels.gemm import GEMM_PASSES
from meshwright.observe.bench.suite import TIME_BUDGET_S, read_bench, run_bench
from meshwright.observe.bench.timing import TimedWork
from meshwright.observe.calibrate.bandwidth_fit import LAUNCHES, LAYERS
from meshwright.observe.hardware.machine import Machine
from meshwright.predict.cost.curves import MEMORY_OPS

torch = pytest.importorskip("torch", reason="the bench measures with torch")

HERE = Machine(device="a processor", torch="2")


def family(number: int, done: list[str], *, broken: int | None = None) -> BenchFamily:
    def cases(_size: Size, _on_gpu: bool) -> tuple[BenchCase, ...]:
        return tuple(BenchCase(family="sums", name="sum", sizes={"n": n}) for n in range(number))

    def work(case: BenchCase, _place: BenchTarget) -> TimedWork:
        if case.size("n") == broken:
            raise RuntimeError("no room\nat all")
        done.append(case.key)
        return TimedWork((lambda: sum(range(100)),), flops=100.0)

    return BenchFamily("sums", "sums", cases, work)


def bench(number: int, done: list[str], path: Path, **more: int) -> tuple[int, int]:
    place = BenchTarget(torch.device("cpu"))
    found = run_bench([family(number, done, **more)], place, HERE, size="quick", path=path)
    return len(found.rows), len(found.failed_cases)


def test_rows_are_kept_and_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    path, done = tmp_path / "rows.jsonl", list[str]()
    assert bench(2, done, path) == (2, 0)
    assert bench(3, done, path) == (3, 0)
    assert len(done) == 3
    assert [row.case.size("n") for row in read_bench(path).rows] == [0, 1, 2]


def test_a_row_that_was_cut_while_written_is_measured_again(tmp_path: Path) -> None:
    path, done = tmp_path / "rows.jsonl", list[str]()
    bench(2, done, path)
    path.write_bytes(path.read_bytes()[:-20])
    assert bench(2, done, path) == (2, 0)
    assert len(done) == 3
    assert len(read_bench(path).rows) == 2


def test_a_case_that_breaks_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    assert bench(3, [], tmp_path / "rows.jsonl", broken=1) == (2, 1)


def test_rows_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bench(1, [], path)
    other = Machine(device="another processor")
    with pytest.raises(InputError, match="different machine"):
        run_bench([family(1, [])], BenchTarget(torch.device("cpu")), other, path=path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("hello\n", encoding="utf-8")
    with pytest.raises(InputError, match="mw bench"):
        read_bench(path)


def test_rows_of_an_older_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(msgspec.json.encode(HERE) + b"\n")
    with pytest.raises(InputError, match=r"bench.rows/1.*measure again"):
        read_bench(path)


def test_what_a_quick_family_leaves_goes_to_one_that_was_late() -> None:
    order = list[str]()
    hasty = family(2, order)._replace(typical_s={"quick": 1e-6, "full": 1e-6})
    other = family(1, order)._replace(name="others", cases=others)
    found = run_bench([hasty, other], BenchTarget(torch.device("cpu")), HERE, budget_s=20)
    assert found.cases_not_reached == ()
    assert len(order) == 3
    assert order[-1].startswith("sums/")
    assert (
        len(
            run_bench([hasty], BenchTarget(torch.device("cpu")), HERE, budget_s=0).cases_not_reached
        )
        == 2
    )


def others(_size: Size, _on_gpu: bool) -> tuple[BenchCase, ...]:
    return (BenchCase(family="others", name="sum", sizes={"n": 0}),)


def test_what_cannot_be_done_here_is_no_fault_and_not_late() -> None:
    unable = family(2, [])._replace(prepare=prepare_nothing)
    found = run_bench([unable], BenchTarget(torch.device("cpu")), HERE, budget_s=30)
    assert (found.rows, found.failed_cases, found.cases_not_reached) == ((), (), ())
    assert len(found.unsupported_cases) == 2


def test_a_quick_bench_of_a_gpu_has_one_of_everything_a_calibration_reads() -> None:
    quick = [case for family in FAMILIES for case in family.cases("quick", True)]
    assert {case.name for case in quick if case.family == "memory_bound"} == set(MEMORY_OPS)
    launched = {
        (case.name, case.sizes.get("kind")) for case in quick if case.family == "launch_overhead"
    }
    assert {(name, None) for name in LAUNCHES} | set(LAYERS) == launched
    pinned = {case.name for case in quick if case.sizes.get("memory") == "pinned"}
    assert pinned == {"host_to_device", "device_to_host", "both_ways"}
    for family, names in (("attention", ("forward", "backward")), ("gemm", GEMM_PASSES)):
        assert set(names) <= {case.name for case in quick if case.family == family}


def test_families_of_a_quick_bench_fit_into_its_minute() -> None:
    every = list_families(ranks=2, backend="gloo", folder=Path())
    sizes: tuple[Size, ...] = ("quick", "full")
    for size in sizes:
        assert sum(family.typical_s[size] for family in every) <= TIME_BUDGET_S[size]
