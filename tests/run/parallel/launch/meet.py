"""A rank of a job, for tests: meets the others, adds up all ranks, prints the sum.

`--of RANK` chooses a rank: it has another `--lr`, or ends with `--end CODE` (minus a signal's
number to be killed by it). With `--stay` ranks meet nobody, and wait to be asked to end; with
`--deaf` they do not listen. With `--wait` they take long to load.
"""

import argparse
import os
import signal
import sys
import time

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.launch.world import World, init_process_group, read_world
from meshwright.run.train.signals import use_default_sigint


def main() -> int:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", type=int, default=-1)
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--end", type=int)
    for flag in ("--stay", "--deaf", "--wait"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    with use_default_sigint():
        time.sleep(60 if args.wait else 0)
    world = read_world()
    chosen = world.rank == args.of
    if args.stay:
        return _end(args.end) if chosen and args.end else _stay(world.rank, deaf=args.deaf)
    try:
        init_process_group(
            world, "cpu", job={"optimizer.lr": args.lr if chosen else "1e-3", "seed": 1}
        )
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return _add(world, None if args.end is None else (args.end if chosen else 0))


def _add(world: World, end: int | None) -> int:
    """Add up all ranks; where one of them then ends, the others wait for it."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    sys.stdout.write(f"sum {total.item():g} of {world.size}\n")
    sys.stdout.flush()
    if end:
        return _end(end)
    if end is not None:
        dist.all_reduce(total)
    dist.destroy_process_group()
    return 0


def _end(code: int) -> int:
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def _stay(rank: int, *, deaf: bool) -> int:
    """Wait to be asked to end, and count how often."""
    asked: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: asked.append(number))
    sys.stderr.write(f"rank {rank} is ready\n")
    sys.stderr.flush()
    until = time.monotonic() + 60
    while (deaf or not asked) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    sys.stderr.write(f"rank {rank} was asked {len(asked)} times\n")
    if len(asked) != 1:
        return 9
    return 0 if rank else 128 + asked[0]  # as `mw train` does


if __name__ == "__main__":
    sys.exit(main())
