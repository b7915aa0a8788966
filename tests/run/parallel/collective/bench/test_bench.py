"""A sweep over sizes, as nccl-tests does it."""

import importlib.util
import shutil

import pytest

from meshwright.errors import InputError, MissingDependency
from meshwright.policy.collective import build_algorithm
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.run.parallel.collective.bench.bench import TORCH_NATIVE, run_collective_bench
from meshwright.run.parallel.collective.bench.bench_row import MessageSizeSweep


def test_sweep_has_a_row_per_size_algorithm_and_way_and_no_wrong_elements() -> None:
    sweep = MessageSizeSweep(min_bytes=1 << 10, max_bytes=1 << 14, step_factor=4, iterations=2)
    rows = run_collective_bench(
        [build_algorithm("ring", "all_reduce", 2), build_algorithm("two_shot", "all_reduce", 2)],
        sweep,
    )
    assert len(rows) == 3 * 3 * 2
    assert {row.algorithm for row in rows} == {TORCH_NATIVE, "ring", "two_shot"}
    assert {row.wrong for row in rows} == {0}
    for row in rows:
        assert row.algbw_gbps == pytest.approx(row.size_bytes / row.time_us / 1e3)
        assert row.busbw_gbps == pytest.approx(row.algbw_gbps)  # 2(n − 1)/n is 1 for two ranks


def test_size_is_the_larger_of_what_a_rank_gives_and_gets() -> None:
    sweep = MessageSizeSweep(min_bytes=1200, max_bytes=1200, iterations=1, baseline=False)
    rows = run_collective_bench([build_algorithm("direct", "gather", 3, root=2)], sweep)
    assert [row.size_bytes for row in rows] == [1200, 1200]
    assert rows[0].busbw_gbps == pytest.approx(rows[0].algbw_gbps * 2 / 3)
    assert {row.wrong for row in rows} == {0}


def test_unlike_collectives_are_not_measured_together() -> None:
    mixed = [build_algorithm("ring", "all_reduce", 2), build_algorithm("ring", "all_gather", 2)]
    with pytest.raises(InputError, match="one operation at a time"):
        run_collective_bench(mixed, MessageSizeSweep())


def test_gpus_need_a_launcher() -> None:
    with pytest.raises(MissingDependency):
        run_collective_bench(
            [build_algorithm("ring", "all_reduce", 2)], MessageSizeSweep(backend="nccl")
        )


def test_impossible_sweep_is_refused() -> None:
    with pytest.raises(InputError, match="factor"):
        MessageSizeSweep(step_factor=1)
    with pytest.raises(InputError, match="dtype"):
        MessageSizeSweep(dtype="float31")


@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun (apt install openmpi-bin) and mpi4py",
)
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce_scatter", "gather"])
def test_mpi_is_measured_and_checked_alike(op: CollectiveOp) -> None:
    sweep = MessageSizeSweep(min_bytes=1 << 10, max_bytes=1 << 12, iterations=2, backend="mpi")
    rows = run_collective_bench(
        [build_algorithm("ring" if op != "gather" else "direct", op, 2)], sweep
    )
    assert [row.transport for row in rows] == ["mpi", "mpi"]
    assert {row.wrong for row in rows} == {0}


def test_mpi_refuses_what_it_has_not() -> None:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        with pytest.raises(MissingDependency, match="mpi4py"):
            run_collective_bench(
                [build_algorithm("ring", "all_reduce", 2)], MessageSizeSweep(backend="mpi")
            )
    else:
        with pytest.raises(InputError, match="bfloat16"):
            run_collective_bench(
                [build_algorithm("ring", "all_reduce", 2)],
                MessageSizeSweep(backend="mpi", dtype="bfloat16"),
            )
