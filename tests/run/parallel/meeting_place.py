"""Where ranks that were launched for a test meet once more, as those of a launcher do."""

import socket

import torch.distributed as dist

from meshwright.run.parallel.launch.world import STORE_FD_VARIABLE

_LOOPBACK = "127.0.0.1"


def leave_to_meet_again() -> dict[str, str]:
    """Leave the process group of a launch; return the environment in which its ranks form another.

    The first rank listens at the port from now on and hands its socket over: one that was chosen
    and let go of may be somebody else's when the ranks come to it.
    """
    rank, ranks, port = dist.get_rank(), dist.get_world_size(), [0]
    mine: dict[str, str] = {}
    if rank == 0:
        listener = socket.create_server((_LOOPBACK, 0))
        port = [listener.getsockname()[1]]
        mine = {STORE_FD_VARIABLE: str(listener.detach())}
    dist.broadcast_object_list(port)
    dist.barrier()  # who leaves while another still connects is taken for dead
    dist.destroy_process_group()
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port[0]),
        **mine,
    }
