"""The orders equal those of PyTorch and Megatron-Core, where these are installed."""

from typing import Any

import pytest

from meshwright.policy.pipeline import PipelineAction, PipelineSchedule, build_schedule

Plain = list[list[str]]


def ours(schedule: PipelineSchedule) -> Plain:
    """Each rank's actions in PyTorch's short form, overlapped pairs in brackets."""
    lanes: Plain = []
    for lane in schedule.actions:
        written: list[str] = []
        for action in lane:
            text = f"{action.chunk}{action.op}{action.microbatch}"
            if action.is_concurrent:
                written[-1] = f"({written[-1]};{text})OVERLAP_F_B"
            else:
                written.append(text)
        lanes.append(written)
    return lanes


def theirs(cls: Any, ranks: int, microbatches: int, local: int) -> Plain:
    """What a PyTorch schedule would run, without making its stages and process group."""
    schedule = cls.__new__(cls)
    schedule.pp_group_size = ranks
    schedule._n_microbatches = microbatches
    schedule.n_local_stages = local
    schedule._num_stages = schedule.num_stages = ranks * local
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    lanes = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[str(action) for action in lane if action is not None] for lane in lanes]


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 10), (8, 16), (4, 3)])
@pytest.mark.parametrize("local", [2, 3])
def test_interleaved_is_pytorchs(
    torch_schedules: Any, ranks: int, microbatches: int, local: int
) -> None:
    peer = theirs(torch_schedules.ScheduleInterleaved1F1B, ranks, microbatches, local)
    assert ours(build_schedule("interleaved", ranks, microbatches, virtual_stages=local)) == peer


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16), (4, 12)])
def test_zb_h1_is_pytorchs_zero_bubble_with_one_stage_per_rank(
    torch_schedules: Any, ranks: int, microbatches: int
) -> None:
    peer = theirs(torch_schedules.ScheduleInterleavedZeroBubble, ranks, microbatches, 1)
    assert ours(build_schedule("zb-h1", ranks, microbatches)) == peer


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (4, 5), (8, 20)])
def test_zb_v_is_pytorchs_but_for_which_weights_wait(
    torch_schedules: Any, ranks: int, microbatches: int
) -> None:
    # PyTorch drains one chunk's weights before the other's; here the longest-waiting go first.
    peer = theirs(torch_schedules.ScheduleZBVZeroBubble, ranks, microbatches, 2)
    mine = ours(build_schedule("zb-v", ranks, microbatches))
    for own, other in zip(mine, peer, strict=True):
        assert sorted(own) == sorted(other)
        assert [t for t in own if "W" not in t] == [t for t in other if "W" not in t]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 7), (4, 8), (4, 11), (8, 16)])
def test_dualpipe_v_is_pytorchs(torch_schedules: Any, ranks: int, microbatches: int) -> None:
    peer = theirs(torch_schedules.ScheduleDualPipeV, ranks, microbatches, 2)
    assert ours(build_schedule("dualpipe-v", ranks, microbatches)) == peer


@pytest.mark.parametrize(("ranks", "microbatches", "group"), [(4, 8, 4), (4, 12, 6), (3, 11, 4)])
@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaved_follows_megatrons_table(
    ranks: int, microbatches: int, group: int, virtual: int
) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(microbatches, virtual, group)
    schedule = build_schedule(
        "interleaved", ranks, microbatches, virtual_stages=virtual, group=group
    )
    for rank, lane in enumerate(schedule.actions):
        forwards = [action for action in lane if action.op == "F"]
        backwards = [action for action in lane if action.op == "B"]
        assert forwards == [PipelineAction("F", turn * ranks + rank, mb) for mb, turn in table]
        last = virtual - 1
        assert backwards == [
            PipelineAction("B", (last - turn) * ranks + rank, mb) for mb, turn in table
        ]
