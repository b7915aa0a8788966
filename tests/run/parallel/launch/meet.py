"""A rank of a job, for tests: meets the others, adds up all ranks, prints the sum.

python meet.py [--lr TEXT --of RANK] [--end CODE --of RANK] [--stay] [--late RANK]
"""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.launch.environment import connect, world_of


def main() -> int:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", type=int, default=-1)
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--end", type=int, default=None)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--late", type=int, default=-1)
    args = parser.parse_args()
    world = world_of()
    if world.rank == args.late:
        return 0
    chosen = world.rank == args.of
    lr = args.lr if chosen else "1e-3"
    try:
        connect(
            world, "cpu", job={"optimizer.lr": lr, "seed": 1}, meet_s=60 if args.late < 0 else 3
        )
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if args.stay:
        return _stay(world.rank)
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    sys.stdout.write(f"sum {total.item():g} of {world.size}\n")
    sys.stdout.flush()
    if args.end is not None and chosen:
        if args.end < 0:
            os.kill(os.getpid(), -args.end)
        return int(args.end)
    if args.end is not None:
        dist.all_reduce(total)  # waits for one that is gone
    dist.destroy_process_group()
    return 0


def _stay(rank: int) -> int:
    """Wait to be asked to end, and count how often."""
    asked: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: asked.append(number))
    sys.stderr.write(f"rank {rank} is ready\n")
    sys.stderr.flush()
    until = time.monotonic() + 60
    while not asked and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    sys.stderr.write(f"rank {rank} was asked {len(asked)} times\n")
    return 0 if len(asked) == 1 else 9


if __name__ == "__main__":
    sys.exit(main())
