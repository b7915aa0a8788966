"""Where the host stops, from which line, and what the device does meanwhile."""

from meshwright.observe.analyze.device_time.host_stalls import analyze_rank_host_stalls
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import call, host, kernel, timeline


def test_a_sync_is_told_with_its_python_stack() -> None:
    found = analyze_rank_host_stalls(
        timeline(
            host(0, 100, "train.py(10): main", "python_function"),
            host(10, 60, "train.py(31): log", "python_function"),
            host(20, 50, "aten::item"),
            call(30, 40, "cudaStreamSynchronize"),
            call(70, 75, "cudaStreamSynchronize"),
            kernel(0, 35),
            kernel(80, 90),
        )
    )
    first, second = found.synchronizations
    assert first.stack == ("train.py(31): log", "train.py(10): main")
    assert (first.num_calls, first.total_ns, first.device_idle_ns) == (1, 10, 5)
    assert second.stack == ("train.py(10): main",)


def test_without_python_functions_operators_say_where() -> None:
    found = analyze_rank_host_stalls(
        timeline(
            *(
                host(n * 100, n * 100 + 90, f"ProfilerStep#{n}", "user_annotation")
                for n in (1, 2, 3)
            ),
            *(host(n * 100 + 5, n * 100 + 50, "aten::item") for n in (1, 2, 3)),
            *(call(n * 100 + 10, n * 100 + 40, "cudaStreamSynchronize") for n in (1, 2, 3)),
        )
    )
    (stall,) = found.synchronizations
    # The last step may be cut and is not counted.
    assert (stall.stack, stall.num_calls, stall.max_ns) == (("aten::item",), 2, 30)


def test_one_load_that_is_recorded_twice_is_told_once() -> None:
    found = analyze_rank_host_stalls(
        timeline(
            host(0, 50, "torch/utils/data/dataloader.py(701): __next__", "python_function"),
            host(5, 45, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        )
    )
    (load,) = found.data_loads
    assert load.total_ns == 50


def test_compilations_and_regions_compiled_again_are_told() -> None:
    found = analyze_rank_host_stalls(
        timeline(
            host(0, 900, "_compile.compile_inner (dynamo_timed)"),
            host(1000, 1100, "Torch-Compiled Region: 0/0", "user_annotation"),
            host(1200, 1300, "Torch-Compiled Region: 1/2", "user_annotation"),
        )
    )
    assert [stall.total_ns for stall in found.compilations] == [900]
    assert found.recompiled_regions == ("1/2",)


def test_a_rank_is_not_told_of_what_another_one_compiled_anew() -> None:
    region = host(0, 10, "Torch-Compiled Region: 1/2", "user_annotation")
    ranks = [timeline(host(0, 10, "aten::mm"), kernel(2, 8)), timeline(region, rank=1)]
    one, other = Timeline.concat(ranks).split_by_rank()
    assert analyze_rank_host_stalls(one).recompiled_regions == ()
    assert analyze_rank_host_stalls(other).recompiled_regions == ("1/2",)
