"""A cause is told for what follows from it, and stands before it."""

import pytest

from meshwright.observe.findings import RankContext, find_inefficiencies
from tests.observe.analyze.traces import Row, call, collective, host, kernel, timeline
from validation.findings.clean_jobs import clean_job


def waiting(begin: int, *later: Row) -> RankContext:
    """A kernel until 1010, .item() that waits for it from `begin` on, then late launches."""
    return RankContext(
        timeline(
            call(0, 1, flow_out=1), kernel(10, 1010, flow_in=1),
            host(begin - 5, 1015, "aten::item"),
            host(begin, 1010, "cudaStreamSynchronize", "cuda_runtime"),
            call(1100, 1101, flow_out=2), kernel(1110, 1210, flow_in=2),
            call(1310, 1311, flow_out=3), kernel(1320, 1420, flow_in=3),
            *later,
        )
    )  # fmt: skip


def test_a_wait_has_the_gaps_that_it_makes_later() -> None:
    rank = waiting(20)
    assert rank.host_waits.cost_ns.tolist() == [100]
    assert rank.gaps_after_waits.cost_ns.tolist() == [110]
    assert rank.late_ns_by_cause("rest") == 0


def test_a_wait_is_not_blamed_for_more_than_it_took() -> None:
    rank = waiting(1010 - 150)
    assert rank.gaps_after_waits.cost_ns.tolist() == [50]
    assert rank.late_ns_by_cause("rest") == 60
    assert waiting(1010 - 60).gaps_after_waits.cost_ns.sum() == 0


def test_a_host_that_is_ahead_again_is_late_for_another_reason() -> None:
    rank = waiting(
        1010 - 400,
        call(1400, 1401, flow_out=4), kernel(1420, 1900, flow_in=4),
        call(1402, 1403, flow_out=5), kernel(1900, 2000, flow_in=5),
        call(2060, 2061, flow_out=6), kernel(2070, 2100, flow_in=6),
    )  # fmt: skip
    assert rank.gaps_after_waits.cost_ns.tolist() == [110]
    assert rank.late_ns_by_cause("rest") == 70


def test_what_follows_from_a_straggler_stands_behind_it() -> None:
    found = find_inefficiencies(
        clean_job(ranks=4, pause=lambda rank, _: 10_000_000 if rank == 3 else 0)
    )
    names = [one.name for one in found]
    exposed = found[names.index("exposed-all-reduce")]
    assert exposed.explained_by == "straggler-host-bound"
    assert names.index("straggler-host-bound") == names.index("exposed-all-reduce") - 1
    assert not found[0].explained_by


@pytest.mark.parametrize("name", ["load", "get_batch", "## load_batch ##", "fetch next batch"])
def test_annotations_around_loading_tell_of_a_stall(name: str) -> None:
    part = timeline(
        call(0, 1, flow_out=1), kernel(10, 100, flow_in=1),
        host(5, 500, name, "user_annotation"),
        call(500, 501, flow_out=2), kernel(510, 600, flow_in=2),
    )  # fmt: skip
    assert "data-loader-stall" in {one.name for one in find_inefficiencies([part])}


@pytest.fixture
def late() -> tuple[Row, ...]:
    """Two launches, the second of which comes late, then many in time."""
    return (
        call(0, 1, flow_out=1), kernel(10, 100, flow_in=1),
        call(500, 501, flow_out=2), kernel(510, 600, flow_in=2),
        *(call(502, 503, flow_out=3 + at) for at in range(20)),
        *(kernel(600 + 100 * at, 700 + 100 * at, flow_in=3 + at) for at in range(20)),
    )  # fmt: skip


def test_the_remedy_is_not_what_was_done_already(late: tuple[Row, ...]) -> None:
    region = host(0, 700, "Torch-Compiled Region: 0/0")
    step = host(400, 700, "Optimizer.step#AdamW.step", "user_annotation")
    assert find_inefficiencies([timeline(*late)])[0].remedy.startswith("torch.compile(model)")
    assert "reduce-overhead" in find_inefficiencies([timeline(*late, region)])[0].remedy
    assert "optimizer.step" in find_inefficiencies([timeline(*late, step)])[0].remedy


def test_an_evaluation_is_a_pause_of_a_training_only(late: tuple[Row, ...]) -> None:
    pause = host(90, 490, "evaluate", "user_annotation")
    for extra, name in (((), "host-bound"), ((host(0, 1, "MmBackward0"),), "checkpoint-stall")):
        assert find_inefficiencies([timeline(*late, pause, *extra)])[0].name == name


def test_few_kernels_get_no_advice(late: tuple[Row, ...]) -> None:
    (found,) = find_inefficiencies([timeline(*late[:4])])
    assert found.name == "host-bound"
    assert found.remedy.startswith("only 2 kernels")


def test_advice_suits_what_the_run_is(late: tuple[Row, ...]) -> None:
    exchange = collective(2600, 3000)
    for extra, said in (
        ((host(0, 1000, "autograd::engine::evaluate_function: MmBackward0"),), "DDP:"),
        ((host(0, 1, "MmBackward0"), host(0, 1, "DistributedDataParallel.forward")), "no_sync"),
        ((host(0, 1, "MmBackward0"), host(0, 1, "megatron/core/x.py(1): f")), "--overlap-grad"),
        ((), "replicas"),
        ((host(0, 1000, "vllm/v1/engine/core.py(10): step"),), "--disable-custom-all-reduce"),
        ((host(0, 1000, "sglang/srt/managers/scheduler.py(1): run"),), "--tp-size"),
    ):
        found = {one.name: one for one in find_inefficiencies([timeline(*late, exchange, *extra)])}
        assert said in found["exposed-all-reduce"].remedy


def test_a_wait_in_a_gap_that_had_begun_has_its_part_of_it() -> None:
    rank = RankContext(
        timeline(
            call(0, 1, flow_out=1), kernel(10, 100, flow_in=1),
            host(200, 460, "aten::copy_"),
            host(210, 450, "hipMemcpyWithStream", "cuda_runtime"),
            call(500, 501, flow_out=2), kernel(510, 600, flow_in=2),
        )
    )  # fmt: skip
    assert rank.host_waits.cost_ns.tolist() == [240]
    assert rank.late_ns_by_cause("waiting") == 240
    assert rank.late_ns_by_cause("rest") == 410 - 240
    assert {one.name for one in find_inefficiencies([rank.rank_timeline])} == {
        "blocking-copy",
        "host-bound",
    }


def test_what_a_thread_does_that_launches_nothing_holds_up_nobody() -> None:
    rows = (
        call(0, 1, flow_out=1), kernel(10, 100, flow_in=1),
        call(500, 501, flow_out=2), kernel(510, 600, flow_in=2),
    )  # fmt: skip
    for lane, waiting in (("thread 1", 410), ("thread 2", 0)):
        wait = host(90, 490, "cudaEventSynchronize", "cuda_runtime", lane=lane)
        assert RankContext(timeline(*rows, wait)).late_ns_by_cause("waiting") == waiting


def test_late_gaps_of_an_unfused_optimizer_are_told_once() -> None:
    rows: list[Row] = []
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    for at in range(60):
        begin = 1000 * at
        rows += [
            call(begin, begin + 10, flow_out=at),
            kernel(begin + 20, begin + 520, name, flow_in=at),
        ]
    rows.append(host(0, 60_000, "Optimizer.step#SGD.step", "user_annotation"))
    rank = RankContext(timeline(*rows))
    assert rank.late_ns_by_cause("updating") == 59 * 500
    assert rank.late_ns_by_cause("rest") == rank.late_ns_by_cause("launching") == 0
    (found,) = find_inefficiencies([rank.rank_timeline])
    assert found.name == "unfused-optimizer"
    assert found.remedy == "torch.optim.SGD(params, fused=True)"
    assert found.gpu_share == pytest.approx(2 / 3)


def test_what_runs_at_once_is_counted_once() -> None:
    both = [collective(100, 200, lane=f"stream {at}") for at in (8, 9)]
    also = collective(100, 300, "ncclDevKernel_AllGather", lane="stream 10")
    rank = RankContext(timeline(kernel(0, 100), *both, also, kernel(300, 400)))
    assert rank.exposed_ns_by_kind == {"all_gather": 200, "all_reduce": 0}
    assert sum(one.gpu_share or 0 for one in find_inefficiencies([rank.rank_timeline])) <= 1


def test_a_test_of_links_has_nothing_to_hide_behind() -> None:
    assert find_inefficiencies([timeline(collective(0, 100))]) == ()
