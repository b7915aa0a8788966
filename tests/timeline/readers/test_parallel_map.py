"""A function over many files: in order, never far ahead, and on Ray where that is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.overview import TraceSelection, analyze_run
from meshwright.timeline.readers.parallel_map import _some_ahead, map_in_order

HAS_RAY = importlib.util.find_spec("ray") is not None


def test_answers_come_in_order_with_few_items_ahead() -> None:
    given: list[int] = []
    furthest = 0

    def give(item: int) -> int:
        given.append(item)
        return item * item

    for done, (item, answer) in enumerate(_some_ahead(give, lambda x: x, range(20), 3)):
        assert (item, answer) == (done, done * done)
        furthest = max(furthest, len(given) - done)
    assert furthest == 3


def _refused(item: int) -> None:
    raise InputError([Problem(str(item), "is refused", "give another")])


def test_a_reading_process_that_is_lost_is_told_without_a_traceback() -> None:
    with pytest.raises(MissingDependency, match="was killed") as caught:
        # as when memory runs out
        list(map_in_order(os._exit, [1, 2], num_workers=2, use_ray=False))
    assert "--num-workers" in caught.value.hint


@pytest.mark.slow
def test_what_a_process_refuses_is_refused_here_with_its_fix() -> None:
    with pytest.raises(InputError) as caught:
        list(map_in_order(_refused, [1, 2], num_workers=2, use_ray=False))
    assert caught.value.problems == (Problem("1", "is refused", "give another"),)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_it_is_said_how_to_get_it() -> None:
    with pytest.raises(MissingDependency, match="Ray is not installed") as caught:
        next(map_in_order(str, [1], num_workers=1, use_ray=True))
    assert "meshwright[ray]" in caught.value.hint
    assert "--num-workers" in caught.value.hint


def traces(folder: Path, ranks: int) -> Path:
    """Ranks that compute and reduce, each a little later than the one before."""
    for rank in range(ranks):
        events = [
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "dur": 40,
             "ts": 100 * step + 50 * (name != "gemm") + rank, "args": {"stream": 7, "device": 0}}
            for step in range(5)
            for name in ("gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        ]  # fmt: skip
        document = {"distributedInfo": {"rank": rank, "world_size": ranks}, "traceEvents": events}
        (folder / f"rank-{rank}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray of two CPUs on this machine."""
    ray = import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'meshwright[ray]'")
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_says_what_one_process_says(tmp_path: Path, cluster: Any) -> None:
    folder = traces(tmp_path, 6)
    here, there = analyze_run(folder), analyze_run(folder, use_ray=True)
    assert [one.breakdown for one in there.ranks] == [one.breakdown for one in here.ranks]
    assert there.rank_comparison == here.rank_comparison
    assert there.findings == here.findings


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'meshwright[ray]'")
@pytest.mark.filterwarnings("ignore")
def test_what_a_task_refuses_is_refused_here(tmp_path: Path, cluster: Any) -> None:
    with pytest.raises(InputError, match="has no step 99"):
        analyze_run(
            traces(tmp_path, 3), selection=TraceSelection(steps=frozenset({99})), use_ray=True
        )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'meshwright[ray]'")
def test_the_command_starts_a_ray_of_its_own_where_none_runs(tmp_path: Path) -> None:
    folder = traces(tmp_path, 3)
    command = [sys.executable, "-m", "meshwright", "analyze", str(folder), "--quiet", "--no-cache"]
    here, there = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True, cwd="/",
                       env=dict(os.environ)).stdout
        for more in ([], ["--ray"])
    )  # fmt: skip
    assert there == here
