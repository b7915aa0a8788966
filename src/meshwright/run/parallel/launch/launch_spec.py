"""`LaunchSpec`: what is started, on how many nodes, with which variables. It knows no launcher."""

import re
import shlex
from typing import Literal, NamedTuple

import msgspec

from meshwright.control_characters import escape_control_characters
from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import FieldChecker

DeviceType = Literal["cuda", "cpu"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that end a line in some format, and bytes that are no UTF-8."""


class NodeShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks on nodes: the same number on each."""

    nodes: int
    """Nodes of the job."""
    ranks_per_node: int
    """Ranks on each of them, one to a GPU."""
    device: DeviceType = "cuda"
    """What a rank computes on."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(nodes=self.nodes, ranks_per_node=self.ranks_per_node)
        bounds.raise_problems()

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        kind = "GPU" if self.device == "cuda" else "CPU rank"
        ranks = f"{self.ranks_per_node} {kind}{'s' if self.ranks_per_node > 1 else ''}"
        return (
            f"1 node with {ranks}" if self.nodes == 1 else f"{self.nodes} nodes with {ranks} each"
        )


def fit_ranks_to_nodes(ranks: int, gpus_per_node: int, device: DeviceType = "cuda") -> NodeShape:
    """Lay ranks on as few nodes as will do, all of them filled equally."""
    if ranks <= gpus_per_node:
        return NodeShape(nodes=1, ranks_per_node=ranks, device=device)
    if ranks % gpus_per_node:
        fits = max(n for n in range(1, gpus_per_node + 1) if ranks % n == 0)
        what = f"{ranks} ranks do not fill nodes of {gpus_per_node} GPUs"
        fix = (
            f"use --gpus-per-node {fits}, or a layout whose GPUs are a multiple of {gpus_per_node}"
        )
        raise InputError([Problem("layout", what, fix)])
    return NodeShape(nodes=ranks // gpus_per_node, ranks_per_node=gpus_per_node, device=device)


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that runs once for every rank."""

    name: str
    """Name of the job in the launcher's lists."""
    command: tuple[str, ...]
    """Words of the program that every rank runs."""
    module: tuple[str, ...] = ()
    """The same for `torchrun`, which starts a module or a script itself; the command's where
    empty."""
    node_shape: NodeShape
    """Where it runs."""
    environment: dict[str, str] = {}
    """Variables that the user sets for every rank."""
    inherited: tuple[str, ...] = ()
    """Variables whose values are read where the job is started, so that they stand in no file."""
    source: str = ""
    """The job file that all this was read from."""

    def __post_init__(self) -> None:
        problems = []
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            fix = "use letters, digits, dots and dashes"
            problems.append(Problem("name", f"{self.name!r} is no name of a job", fix))
        if not self.command:
            problems.append(Problem("command", "is empty", "name a program"))
        for word in (*self.command, *self.module):
            if not is_writable(word):
                what = f"{word!r} holds a character that no job file can"
                problems.append(Problem("command", what, "leave out line ends and the like"))
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name) or not is_writable(value):
                what = f"{name!r} is no variable, or its value is more than a line"
                problems.append(Problem("--env", what, "write it like NAME=VALUE, on one line"))
        for name in self.inherited:
            if not _VARIABLE.fullmatch(name):
                what = f"{name!r} is no variable"
                problems.append(Problem("--env", what, "write it like NAME=VALUE, or NAME"))
        if problems:
            raise InputError(problems)

    @property
    def origin(self) -> str:
        """The job file as a comment may name it, on one line."""
        return f" from {escape_control_characters(self.source)}" if self.source else ""

    @property
    def command_line(self) -> str:
        """The command as a shell reads it."""
        return shlex.join(self.command)

    def torchrun_command(self, *flags: str) -> tuple[str, ...]:
        """Return the words that start all ranks of one node through torch's own launcher."""
        return (*("torchrun", f"--nnodes={self.node_shape.nodes}"),
                f"--nproc-per-node={self.node_shape.ranks_per_node}", *flags,
                *(self.module or ("--no-python", *self.command)))  # fmt: skip


def is_writable(text: str) -> bool:
    """Tell whether every format of job files can hold a text on one line."""
    return _UNWRITABLE.search(text) is None


def check_writable(options: msgspec.Struct) -> list[Problem]:
    """Say which texts of a launcher's options no job file can hold."""
    problems = []
    for name, value in msgspec.structs.asdict(options).items():
        for text in (value,) if isinstance(value, str) else value if _is_texts(value) else ():
            if not is_writable(text):
                what = f"{text!r} holds a character that no job file can"
                problems.append(Problem(name, what, "leave out line ends and the like"))
    return problems


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


class EnvironmentVariable(NamedTuple):
    """A variable that is set for every rank, and why."""

    name: str
    value: str
    reason: str


def recommend_environment(
    shape: NodeShape, *, interface: str = "", hca: str = "", traces: str = ""
) -> list[EnvironmentVariable]:
    """Return the variables of NCCL, gloo and torch that a job of this shape is given.

    `interface` and `hca` name network cards; nothing is guessed where they are empty. `traces` is
    where the flight recorder writes, one file for each rank.
    """
    found = []
    if shape.device == "cuda":
        found += [
            EnvironmentVariable("NCCL_DEBUG", "WARN", "say what goes wrong, and nothing else"),
            EnvironmentVariable(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                "3",
                "a collective that failed ends its process, without an abort that may hang",
            ),
            EnvironmentVariable(
                "TORCH_FR_BUFFER_SIZE", "2000", "keep the last collectives of each rank in memory"
            ),
            EnvironmentVariable(
                "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and write them down where one hangs"
            ),
        ]
        if traces:
            found.append(
                EnvironmentVariable("TORCH_FR_DUMP_TEMP_FILE", traces, "in a file for each rank")
            )
    if interface:
        why = "the network interface by which ranks find each other"
        found.append(EnvironmentVariable("GLOO_SOCKET_IFNAME", interface, why))
        if shape.device == "cuda":
            found.append(EnvironmentVariable("NCCL_SOCKET_IFNAME", interface, "the same for NCCL"))
    if hca and shape.device == "cuda":
        found.append(
            EnvironmentVariable("NCCL_IB_HCA", hca, "the InfiniBand HCAs that carry the data")
        )
    found.append(
        EnvironmentVariable(
            "PYTHONUNBUFFERED", "1", "lines appear in the log when they are written"
        )
    )
    return found
