"""Every operation of a group on real ranks, held against what it should give."""

from pathlib import Path

import torch
from torch import Tensor

from meshwright.run.parallel.algorithm_selection import AlgorithmsByGroup
from meshwright.run.parallel.autograd_collectives import (
    all_to_all,
    copy_to_region,
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
)
from meshwright.run.parallel.group_coordinator import GroupCoordinator, P2PMessage
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.spec.layout import Layout


def given(rank: int, *shape: int) -> Tensor:
    """Return what a rank brings, which every rank can compute."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def exchanged(group: GroupCoordinator) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, for each operation, what came out and what should have."""
    n, me = group.size, group.index
    all_given = [given(rank, 4 * n, 6) for rank in range(n)]
    mine, total = all_given[me], torch.stack(all_given).sum(0)
    rows = 4 * me, 4 * (me + 1)
    cut = [each[rows[0] : rows[1]] for each in all_given]
    sent, got = [rank + 1 for rank in range(n)], [me + 1] * n
    ragged = [given(rank, sum(sent), 2) for rank in range(n)]
    start = sum(sent[:me])
    gaps = mine.clone().t()
    return {
        "all_reduce": (group.all_reduce(mine.clone()), total),
        "all_reduce with gaps": (group.all_reduce(gaps), total.t()),
        "largest": (group.all_reduce(mine.clone(), "max"), torch.stack(all_given).amax(0)),
        "product": (group.all_reduce(mine.clone(), "product"), torch.stack(all_given).prod(0)),
        "all_gather": (group.all_gather(mine), torch.cat(all_given)),
        "all_gather of columns": (group.all_gather(mine, 1), torch.cat(all_given, 1)),
        "into memory": (
            group.start_all_gather(mine, into=torch.empty(4 * n * n * 6)).wait(),
            torch.cat(all_given),
        ),
        "reduce_scatter": (group.reduce_scatter(mine), total[rows[0] : rows[1]]),
        "reduce_scatter of columns": (
            group.reduce_scatter(mine.t().contiguous(), 1),
            total.t()[:, rows[0] : rows[1]],
        ),
        "all_to_all": (group.all_to_all(mine), torch.cat(cut)),
        "all_to_all of unequal parts": (
            group.all_to_all(ragged[me], sent, got),
            torch.cat([each[start : start + sent[me]] for each in ragged]),
        ),
        "broadcast": (group.broadcast(mine.clone(), 1), all_given[1]),
        "message": (_passed_on(group, mine), all_given[me - 1]),
    }


def _passed_on(group: GroupCoordinator, mine: Tensor) -> Tensor:
    """Send to the next rank, and get from the one before."""
    n, me, into = group.size, group.index, torch.empty_like(mine)
    messages = [P2PMessage(mine, (me + 1) % n, True), P2PMessage(into, (me - 1) % n, False)]
    for pending in group.batch_send_recv(messages):
        pending.wait()
    return into


def wrong(
    algorithms: AlgorithmsByGroup | None = None, folder: Path | None = None
) -> dict[str, float]:
    """Run every operation on a tensor-parallel group; return by how much some are off."""
    layout = Layout(tp=4, precision="fp32")
    recorder = None if folder is None else TimelineRecorder(folder, torch.distributed.get_rank())
    mesh = Mesh(layout, algorithms=algorithms, recorder=recorder)
    off = {
        name: float((found - right).abs().max())
        for _ in range(2)
        for name, (found, right) in exchanged(mesh["tp"]).items()
        if found.shape != right.shape or (found - right).abs().max() > 1e-5
    }
    mesh.world.barrier()
    if recorder is not None:
        with recorder.span("update", microbatch=3):
            pass
        recorder.close()
    return off


def lines_of_a_backward() -> list[tuple[str, str]]:
    """Return operation and function of each entry that a forward and a backward leave."""
    mesh = Mesh(Layout(tp=2, precision="fp32"))
    group, x = mesh["tp"], torch.ones(4, 4, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        return all_to_all(
            reduce_scatter_to_sequence_region(
                gather_from_sequence_region(copy_to_region(x, group), group, 0), group, 0
            ),
            group,
        ).sum()

    model(x).backward()  # type: ignore[no-untyped-call]
    return [
        (entry.op, "" if entry.call_site is None else entry.call_site.code.co_name)
        for entry in mesh.flight_recorder.records
    ]
