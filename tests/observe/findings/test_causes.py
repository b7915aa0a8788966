"""A cause is told for what follows from it, and stands before it."""

import pytest

from meshwright.observe.findings import Rank, find
from tests.observe.analyze.traces import Row, call, host, kernel, timeline
from validation.findings.clean_jobs import clean_job


def waiting(begin: int, *later: Row) -> Rank:
    """A kernel until 1010, .item() that waits for it from `begin` on, then late launches."""
    return Rank(
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
    assert rank.waits.cost_ns.tolist() == [100]
    assert rank.aftermath.cost_ns.tolist() == [110]
    assert rank.claimed_ns("rest") == 0


def test_a_wait_is_not_blamed_for_more_than_it_took() -> None:
    rank = waiting(1010 - 150)
    assert rank.aftermath.cost_ns.tolist() == [50]
    assert rank.claimed_ns("rest") == 60
    assert waiting(1010 - 60).aftermath.cost_ns.sum() == 0


def test_a_host_that_is_ahead_again_is_late_for_another_reason() -> None:
    rank = waiting(
        1010 - 400,
        call(1400, 1401, flow_out=4), kernel(1420, 1900, flow_in=4),
        call(1402, 1403, flow_out=5), kernel(1900, 2000, flow_in=5),
        call(2060, 2061, flow_out=6), kernel(2070, 2100, flow_in=6),
    )  # fmt: skip
    assert rank.aftermath.cost_ns.tolist() == [110]
    assert rank.claimed_ns("rest") == 70


def test_what_follows_from_a_straggler_stands_behind_it() -> None:
    found = find(clean_job(ranks=4, pause=lambda rank, _: 10_000_000 if rank == 3 else 0))
    names = [one.name for one in found]
    exposed = found[names.index("exposed-all-reduce")]
    assert exposed.follows == "straggler-late-host"
    assert names.index("straggler-late-host") == names.index("exposed-all-reduce") - 1
    assert not found[0].follows


@pytest.mark.parametrize("name", ["load", "get_batch", "## load_batch ##", "fetch next batch"])
def test_annotations_around_loading_tell_of_a_stall(name: str) -> None:
    part = timeline(
        call(0, 1, flow_out=1), kernel(10, 100, flow_in=1),
        host(5, 500, name, "user_annotation"),
        call(500, 501, flow_out=2), kernel(510, 600, flow_in=2),
    )  # fmt: skip
    assert "data-loader-stall" in {one.name for one in find([part])}


def test_the_remedy_is_not_what_was_done_already() -> None:
    rows = (
        call(0, 1, flow_out=1), kernel(10, 100, flow_in=1),
        call(500, 501, flow_out=2), kernel(510, 600, flow_in=2),
    )  # fmt: skip
    region = host(0, 700, "Torch-Compiled Region: 0/0")
    step = host(400, 700, "Optimizer.step#AdamW.step", "user_annotation")
    assert find([timeline(*rows)])[0].remedy.startswith("torch.compile(model)")
    assert "reduce-overhead" in find([timeline(*rows, region)])[0].remedy
    assert "optimizer.step" in find([timeline(*rows, step)])[0].remedy
