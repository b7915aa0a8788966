"""The same operations done by torch.distributed itself: what ours are measured against."""

import torch
import torch.distributed as dist

from meshwright.policy.collective.collective import Collective


def run_torch_collective(
    collective: Collective,
    group: dist.ProcessGroup,
    given: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    elements: int,
) -> None:
    """Carry out the operation of a collective, whatever its algorithm, with the group's own.

    `elements` is the size of one chunk for all_to_all_v. Operations that torch.distributed does
    only in place overwrite `out`, which holds the input then.
    """
    rank, ranks, root = dist.get_rank(group), collective.ranks, collective.root
    match collective.op, given, out:
        case "all_reduce", torch.Tensor(), torch.Tensor():
            dist.all_reduce(_moved(given, out), group=group)
        case "broadcast", _, torch.Tensor():
            dist.broadcast(_moved(given, out), group_src=root, group=group)
        case "reduce", torch.Tensor(), _:
            # Ranks without a result need a tensor too; torch leaves anything in it.
            into = _moved(given, torch.empty_like(given) if out is None else out)
            dist.reduce(into, group_dst=root, group=group)
        case "reduce_scatter", torch.Tensor(), torch.Tensor():
            dist.reduce_scatter_tensor(out, given, group=group)
        case "all_gather", torch.Tensor(), torch.Tensor():
            dist.all_gather_into_tensor(out, given, group=group)
        case "gather", torch.Tensor(), _:
            parts = None if out is None else list(out.chunk(ranks))
            dist.gather(given, parts, group_dst=root, group=group)
        case "scatter", _, torch.Tensor():
            parts = None if given is None else list(given.chunk(ranks))
            dist.scatter(out, parts, group_src=root, group=group)
        case "all_to_all", torch.Tensor(), torch.Tensor():
            dist.all_to_all_single(out, given, group=group)
        case "all_to_all_v", torch.Tensor(), torch.Tensor():
            counts = collective.counts
            sends = [count * elements for count in counts[rank]]
            takes = [row[rank] * elements for row in counts]
            dist.all_to_all_single(out, given, takes, sends, group=group)
        case "send_recv", torch.Tensor(), _:
            _send_receive(collective, group, given, out)
        case op, _, _:
            raise AssertionError(f"{op} lacks a tensor on rank {rank}")


def _moved(given: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if given is not None and given.data_ptr() != out.data_ptr():
        out.copy_(given)
    return out


def _send_receive(
    collective: Collective,
    group: dist.ProcessGroup,
    given: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    rank, peers = dist.get_rank(group), collective.peers
    if peers[rank] == rank and out is not None:
        out.copy_(given)
        return
    messages = []
    if peers[rank] >= 0:
        messages.append(dist.P2POp(dist.isend, given, group=group, group_peer=peers[rank]))
    if rank in peers and out is not None:
        source = peers.index(rank)
        messages.append(dist.P2POp(dist.irecv, out, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
