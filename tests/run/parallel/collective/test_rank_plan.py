"""Plans of ranks, carried out one task at a time in any allowed order, by plain lists."""

import random

import pytest
import torch

from meshwright.policy.collective import build_algorithm
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.switch_lowering import lower_switches
from meshwright.run.parallel.collective.bench.test_data import (
    make_expected_output,
    make_full_message,
    make_input_data,
)
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout
from meshwright.run.parallel.collective.rank_plan import RankPlan, make_rank_plan
from meshwright.run.parallel.collective.reduction import gather_frame, scatter_frame
from meshwright.run.parallel.collective.shm_transport import run_local_task


class Rank:
    """A rank without a process: its tensors, and how far its plan has come."""

    def __init__(
        self, collective: Collective, made: RankPlan, elements: int, in_place: bool
    ) -> None:
        cuts, rank = ChunkLayout(collective, elements), made.rank
        whole = make_full_message(collective, rank, elements, torch.float64)
        mine = whole if in_place else make_input_data(collective, rank, cuts, torch.float64)
        wanted = cuts.get_tensor_sizes(rank).output_elements
        out = torch.full((wanted or 0,), torch.nan, dtype=torch.float64)
        space = torch.full((made.workspace_elements,), torch.nan, dtype=torch.float64)
        self.tensors = [out if mine is None else mine, out, space]
        self.plan, self.over = made, set[int]()
        self.result = None if wanted is None else out
        if in_place and wanted is not None:
            start = 0 if wanted == elements else rank * wanted
            self.result = whole[start : start + wanted]

    def ready(self) -> list[int]:
        return [
            number
            for number, task in enumerate(self.plan.tasks)
            if number not in self.over and self.over.issuperset(task.dependencies)
        ]


def carry_out(ranks: list[Rank], seed: int) -> None:
    """Do any task that may be done, until none is left."""
    chance = random.Random(seed)
    lanes: dict[tuple[int, int], list[torch.Tensor]] = {}
    counts: dict[tuple[int, str, int], int] = {}
    while True:
        choices = []
        for rank in ranks:
            for number in rank.ready():
                task = rank.plan.tasks[number]
                sends = dict(
                    rank.plan.sends_by_peer if task.kind == "send" else rank.plan.receives_by_peer
                )
                turn = counts.get((rank.plan.rank, task.kind, task.peer), 0)
                if task.kind != "local" and sends[task.peer][turn] != number:
                    continue  # frames of a lane keep their order
                if task.kind == "receive" and not lanes.get((task.peer, rank.plan.rank)):
                    continue
                choices.append((rank, number))
        if not choices:
            break
        rank, number = chance.choice(choices)
        task = rank.plan.tasks[number]
        key = rank.plan.rank, task.kind, task.peer
        counts[key] = counts.get(key, 0) + 1
        if task.kind == "send":
            frame = torch.empty(task.num_elements, dtype=torch.float64)
            gather_frame(rank.tensors, frame, task.reads)
            lanes.setdefault((rank.plan.rank, task.peer), []).append(frame)
        elif task.kind == "receive":
            frame = lanes[task.peer, rank.plan.rank].pop(0)
            assert frame.numel() == task.num_elements
            scatter_frame(rank.tensors, frame, task.writes, task.bases, torch.add)
        else:
            run_local_task(rank.tensors, task, torch.add)
        rank.over.add(number)
    assert all(len(rank.over) == len(rank.plan.tasks) for rank in ranks), "somebody waits for ever"


CASES: list[tuple[str, CollectiveOp]] = [
    ("ring", "all_reduce"),
    ("double_tree", "all_reduce"),
    ("nvls", "all_reduce"),
    ("pat", "reduce_scatter"),
    ("bruck", "all_gather"),
    ("bruck", "all_to_all"),
    ("chain", "broadcast"),
    ("binary_tree", "reduce"),
    ("direct", "gather"),
    ("direct", "scatter"),
]


IN_PLACE = [(name, op, True) for name, op in CASES if op != "all_to_all"]


@pytest.mark.parametrize("frame", [3, 1000])
@pytest.mark.parametrize(
    ("name", "op", "in_place"), [*((name, op, False) for name, op in CASES), *IN_PLACE]
)
def test_any_order_that_the_plan_allows_gives_the_right_result(
    name: str, op: CollectiveOp, in_place: bool, frame: int
) -> None:
    collective = build_algorithm(name, op, 5, per_node=5, channels=2)
    plain = lower_switches(collective)
    for elements, seed in ((5, 1), (85, 2)):
        made = [
            make_rank_plan(plain, rank, elements, frame=frame, in_place=in_place)
            for rank in range(5)
        ]
        ranks = [Rank(plain, one, elements, in_place) for one in made]
        carry_out(ranks, seed)
        for rank in ranks:
            right = make_expected_output(
                plain, rank.plan.rank, ChunkLayout(plain, elements), torch.float64
            )
            assert (right is None) == (rank.result is None)
            if right is not None and rank.result is not None:
                assert rank.result.tolist() == right.tolist()


def test_long_chunks_are_cut_into_frames_that_do_not_wait_for_each_other() -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    made = make_rank_plan(ring, 0, 4000, frame=100, in_place=True)
    assert max(task.num_elements for task in made.tasks) <= 100
    second = next(task for task in made.tasks if task.kind == "send" and task.step == 1)
    assert len(second.dependencies) == 1, (
        "a frame goes on when that frame has come, not the whole chunk"
    )


def test_input_is_never_written_out_of_place() -> None:
    for name, op in CASES:
        collective = lower_switches(build_algorithm(name, op, 5, per_node=5))
        made = make_rank_plan(collective, 0, 50, frame=7, in_place=False)
        assert all(run.tensor != 0 for task in made.tasks for run in task.writes)
