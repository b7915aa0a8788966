"""What logs of NCCL's say of a job: communicators, what carries their data, what was called.

Counts what was printed, of however many ranks there are logs. The network's lines name GPU-direct
RDMA; lines of P2P do not say whether it is NVLink or PCIe. Knows no remedies: `nccl_findings` does.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.analyze.nccl_findings import find
from meshwright.observe.analyze.nccl_job import Job, route_of
from meshwright.observe.finding import Finding
from meshwright.timeline.readers.communication import collective_of
from meshwright.timeline.readers.nccl_log import call_bytes
from meshwright.timeline.readers.nccl_records import NcclLog


class Group(NamedTuple):
    """A communicator over all ranks whose lines are there."""

    id: str
    num_ranks: int
    seen: tuple[int, ...]
    """The ranks that have lines."""
    ready: tuple[int, ...]
    """Those whose making was completed."""
    hosts: tuple[str, ...]
    num_nodes: int
    """As NCCL counts them, else the hosts that were seen."""
    channels: int
    """0 where no line says it."""
    rings: int
    trees: int
    slowest_s: float | None
    """How long the slowest rank took to make it."""


class Route(NamedTuple):
    """What carries data, and how much of it."""

    transport: str
    """`P2P`, `SHM`, `NET/IB`, `NET/Socket`, …"""
    gpu_direct: str
    """`yes`, `no`, `sends only` or `receives only`; empty where it is no network."""
    connections: int
    """Channels from one rank to another."""
    pairs: int
    """Ranks that they connect, in one direction."""
    how: tuple[str, ...]
    """The words of the log, the most frequent first."""


class Called(NamedTuple):
    """Calls of one operation and size."""

    operation: str
    bytes: int
    """Of the larger of what a rank gives and takes; -1 where it is not known."""
    dtype: str
    num_ranks: int
    calls: int
    """Of all ranks together."""


class NcclReport(NamedTuple):
    """All of it."""

    files: int
    versions: tuple[str, ...]
    networks: tuple[str, ...]
    devices: tuple[str, ...]
    """Network cards that NCCL found."""
    settings: tuple[str, ...]
    """`NAME=VALUE` of the environment."""
    num_processes: int
    hosts: tuple[str, ...]
    groups: tuple[Group, ...]
    """The largest first."""
    routes: tuple[Route, ...]
    called: tuple[Called, ...]
    """Those with most bytes in all first."""
    warnings: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def nccl_report(logs: Sequence[NcclLog]) -> NcclReport:
    """Sum up the logs of one job."""
    job = Job.of(logs)
    processes = {(one.host, one.process) for one in job.log.communicators}
    processes |= {(one.host, one.process) for one in job.log.told}
    return NcclReport(
        len(logs),
        tuple(sorted({log.version for log in logs if log.version} | set(job.told("version")))),
        job.told("network"),
        tuple(dict.fromkeys(card for line in job.told("devices") for card in _cards(line))),
        tuple(f"{name}={value}" for name, value in job.settings),
        len(processes),
        tuple(sorted({host for host, _ in processes})),
        _groups(job),
        _routes(job),
        _called(job.log),
        len(job.log.warnings),
        find(job),
        job.log.notes,
    )


def _cards(line: str) -> Iterable[str]:
    """`[0]mlx5_0:1/IB [1]mlx5_1:1/IB` one by one."""
    return [found[1] for found in re.finditer(r"\[\d+\](\S+)", line)]


def _groups(job: Job) -> tuple[Group, ...]:
    rings: defaultdict[int, set[int]] = defaultdict(set)
    trees: defaultdict[int, set[int]] = defaultdict(set)
    for ring in job.log.rings:
        rings[job.place(ring.communicator)].add(ring.channel)
    for tree in job.log.trees:
        trees[job.place(tree.communicator)].add(tree.channel)
    found = []
    for place, ends in enumerate(job.groups):
        hosts = tuple(sorted({end.host for end in ends}))
        took = [end.took_s for end in ends if end.took_s is not None]
        found.append(
            Group(
                ends[0].id,
                ends[0].num_ranks,
                tuple(sorted(end.rank for end in ends)),
                tuple(sorted(end.rank for end in ends if end.ready)),
                hosts,
                max(*(end.num_nodes for end in ends), len(hosts)),
                job.num_channels(place),
                len(rings[place]),
                len(trees[place]),
                max(took, default=None),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.num_ranks))


def _routes(job: Job) -> tuple[Route, ...]:
    ends: defaultdict[tuple[object, ...], dict[str, bool]] = defaultdict(dict)
    words: defaultdict[tuple[object, ...], Counter[str]] = defaultdict(Counter)
    kinds: dict[tuple[object, ...], str] = {}
    for one in job.log.connections:
        # Without a communicator's id its ranks are known within a process only.
        key = (*job.scope(one), one.source, one.target, one.channel)
        kinds[key] = route_of(one.transport)
        words[key][re.sub(r"/\d+(\(\d+\))?(?=/|$)", "", one.transport)] += 1
        ends[key][one.direction] = "GDRDMA" in one.transport
    rows: defaultdict[tuple[str, str], list[tuple[object, ...]]] = defaultdict(list)
    for key, kind in kinds.items():
        rows[kind, _direct(ends[key]) if kind.startswith("NET/") else ""].append(key)
    return tuple(
        Route(
            kind,
            direct,
            len(keys),
            len({key[:-1] for key in keys}),
            tuple(text for text, _ in _total(words[key] for key in keys).most_common(3)),
        )
        for (kind, direct), keys in sorted(rows.items(), key=lambda row: -len(row[1]))
    )


def _total(counts: Iterable[Counter[str]]) -> Counter[str]:
    whole: Counter[str] = Counter()
    for one in counts:
        whole.update(one)
    return whole


def _direct(ends: dict[str, bool]) -> str:
    """Which ends of a connection use GPU-direct RDMA."""
    if len(set(ends.values())) == 1:
        return "yes" if next(iter(ends.values())) else "no"
    return "sends only" if ends.get("send") else "receives only"


def _called(log: NcclLog) -> tuple[Called, ...]:
    count: Counter[tuple[str, int, str, int]] = Counter(
        (collective_of(one.name) or one.name, call_bytes(one), one.dtype, one.num_ranks)
        for one in log.calls
    )
    rows = [Called(*key, calls) for key, calls in count.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes * row.calls, row)))
