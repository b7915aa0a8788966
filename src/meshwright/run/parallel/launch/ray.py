"""`render_driver`: text of a Python program that starts a job on a Ray cluster.

Ray finds the nodes: one placement bundle for each, on which torchrun starts the ranks. Ray's own
trainer is not used, as it forms the process group itself, before jobs are compared.
"""

import msgspec

from meshwright.run.parallel.launch.launch_spec import (
    LaunchSpec,
    check_writable,
    recommend_environment,
)
from meshwright.spec.field_checks import FieldChecker


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only Ray is told."""

    address: str = "auto"
    """Where the cluster is; `auto` finds the one that this machine belongs to."""
    cpus_per_rank: int = 1
    """CPU cores of each rank."""
    wait_s: int = 600
    """How long to wait for nodes to be free."""
    socket_ifname: str = ""
    """Network interface by which ranks meet."""
    nccl_ib_hca: str = ""
    """InfiniBand cards of NCCL."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(address=self.address)
        bounds.count(cpus_per_rank=self.cpus_per_rank, wait_s=self.wait_s)
        bounds.problems += check_writable(self)
        bounds.raise_problems()


def render_driver(start: LaunchSpec, options: RayOptions) -> str:
    """Write the program that `ray job submit` or `python` runs."""
    shape = start.node_shape
    chosen = recommend_environment(
        shape,
        interface=options.socket_ifname,
        hca=options.nccl_ib_hca,
        traces="/tmp/nccl-rank-",  # noqa: S108 - where torch writes them by default
    )
    width = max(len(f"    {one.name!r}: {one.value!r},") for one in chosen)
    lines = [f"{f'    {one.name!r}: {one.value!r},':{width}}  # {one.reason}" for one in chosen]
    lines += [f"    {name!r}: {value!r}," for name, value in start.environment.items()]
    head = [
        f"# Written by mw launch ray{start.origin}: {shape}.",
        _IMPORTS,
        f"ADDRESS = {options.address!r}",
        f"NODES, RANKS_PER_NODE = {shape.nodes}, {shape.ranks_per_node}",
        f"GPUS_PER_NODE = {shape.ranks_per_node if shape.device == 'cuda' else 0}",
        f"CPUS_PER_NODE = {shape.ranks_per_node * options.cpus_per_rank}",
        f"WAIT_S = {options.wait_s}",
        f"PROGRAM = {list(start.module or ('--no-python', *start.command))!r}",
        "VARIABLES = {",
        *lines,
        "}",
        "# Read from the driver's environment, so that their values stand in no file.",
        f"INHERITED = {list(start.inherited)!r}",
    ]
    return "\n".join(head) + _BODY


_IMPORTS = """\
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
"""

_BODY = '''


@ray.remote(num_cpus=0, max_retries=0)
def meeting():
    """Return an address of the first node, and a port that is free there."""
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as listener:
        return address, listener.getsockname()[1]


@ray.remote(max_retries=0)
def node(index, folder, address, port, inherited):
    """Start the ranks of one node, and return how they ended."""
    command = [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}", f"--node-rank={index}",
        f"--master-addr={address}", f"--master-port={port}", *PROGRAM,
    ]
    # Nodes that share the driver's files work in its folder.
    place = folder if os.path.isdir(folder) else None
    environment = {**os.environ, **VARIABLES, **inherited}
    return subprocess.run(command, env=environment, cwd=place).returncode


def main():
    """Wait for nodes, start all, and end all when one fails."""
    missing = [name for name in INHERITED if name not in os.environ]
    if missing:
        sys.exit(f"error: {', '.join(missing)}: not set in the driver's environment")
    inherited = {name: os.environ[name] for name in INHERITED}
    ray.init(address=ADDRESS)
    bundle = {"CPU": CPUS_PER_NODE, **({"GPU": GPUS_PER_NODE} if GPUS_PER_NODE else {})}
    # GPUs of one rank group must not be scattered; CPU ranks may share a machine.
    strategy = "STRICT_SPREAD" if GPUS_PER_NODE and NODES > 1 else "SPREAD"
    group = placement_group([bundle] * NODES, strategy=strategy)
    if not group.wait(WAIT_S):
        sys.exit(f"error: no {NODES} nodes with {bundle} became free within {WAIT_S} s")

    def there(index):
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    address, port = ray.get(meeting.options(scheduling_strategy=there(0)).remote())
    running = [
        node.options(
            num_cpus=CPUS_PER_NODE, num_gpus=GPUS_PER_NODE, scheduling_strategy=there(index)
        ).remote(index, os.getcwd(), address, port, inherited)
        for index in range(NODES)
    ]
    numbers = {task: index for index, task in enumerate(running)}
    while running:
        done, running = ray.wait(running)
        code = ray.get(done[0])
        if code:
            for task in running:
                ray.cancel(task, force=True)
            print(f"error: node {numbers[done[0]]} ended with exit code {code}", file=sys.stderr)
            sys.exit(code if 0 < code < 256 else 1)


if __name__ == "__main__":
    main()
'''
