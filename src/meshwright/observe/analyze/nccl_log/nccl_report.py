"""What logs of NCCL's say of a job: communicators, what carries their data, what was called.

Counts what was printed, of however many ranks there are logs. The network's lines name GPU-direct
RDMA; lines of P2P do not say whether it is NVLink or PCIe. Knows no remedies: `nccl_findings` does.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.analyze.nccl_log.nccl_findings import find_nccl_problems
from meshwright.observe.analyze.nccl_log.nccl_job import NcclJob, parse_transport
from meshwright.observe.finding import Finding
from meshwright.timeline.readers.nccl_log.nccl_log_reader import count_call_bytes
from meshwright.timeline.readers.nccl_log.nccl_log_records import NcclLog
from meshwright.timeline.readers.parsing.communication_names import normalize_collective


class CommunicatorGroup(NamedTuple):
    """A communicator over all ranks whose lines are there."""

    id: str
    num_ranks: int
    ranks_seen: tuple[int, ...]
    """The ranks that have lines."""
    ranks_initialized: tuple[int, ...]
    """Those whose making was completed."""
    hosts: tuple[str, ...]
    num_nodes: int
    """As NCCL counts them, else the hosts that were seen."""
    num_channels: int
    """0 where no line says it."""
    num_rings: int
    num_trees: int
    max_init_s: float | None
    """How long the slowest rank took to make it."""


class TransportRoute(NamedTuple):
    """What carries data, and how much of it."""

    transport: str
    """`P2P`, `SHM`, `NET/IB`, `NET/Socket`, …"""
    gpu_direct: str
    """`yes`, `no`, `sends only` or `receives only`; empty where it is no network."""
    num_connections: int
    """Channels from one rank to another."""
    num_rank_pairs: int
    """Ranks that they connect, in one direction."""
    log_texts: tuple[str, ...]
    """The words of the log, the most frequent first."""


class CallTotals(NamedTuple):
    """Calls of one operation and size."""

    operation: str
    bytes: int
    """Of the larger of what a rank gives and takes; -1 where it is not known."""
    dtype: str
    num_ranks: int
    num_calls: int
    """Of all ranks together."""


class NcclReport(NamedTuple):
    """All of it."""

    num_files: int
    versions: tuple[str, ...]
    networks: tuple[str, ...]
    devices: tuple[str, ...]
    """NICs that NCCL found."""
    env_settings: tuple[str, ...]
    """`NAME=VALUE` of the environment."""
    num_processes: int
    hosts: tuple[str, ...]
    communicators: tuple[CommunicatorGroup, ...]
    """The largest first."""
    routes: tuple[TransportRoute, ...]
    calls: tuple[CallTotals, ...]
    """Those with most bytes in all first."""
    num_warnings: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def analyze_nccl_logs(logs: Sequence[NcclLog]) -> NcclReport:
    """Sum up the logs of one job."""
    job = NcclJob.from_logs(logs)
    processes = {(one.host, one.pid) for one in job.log.communicators}
    processes |= {(one.host, one.pid) for one in job.log.process_facts}
    return NcclReport(
        len(logs),
        tuple(
            sorted({log.version for log in logs if log.version} | set(job.list_facts("version")))
        ),
        job.list_facts("network"),
        tuple(dict.fromkeys(nic for line in job.list_facts("devices") for nic in _nics(line))),
        tuple(f"{name}={value}" for name, value in job.env_settings),
        len(processes),
        tuple(sorted({host for host, _ in processes})),
        _groups(job),
        _routes(job),
        _called(job.log),
        len(job.log.warnings),
        find_nccl_problems(job),
        job.log.notes,
    )


def _nics(line: str) -> Iterable[str]:
    """`[0]mlx5_0:1/IB [1]mlx5_1:1/IB` one by one."""
    return [found[1] for found in re.finditer(r"\[\d+\](\S+)", line)]


def _groups(job: NcclJob) -> tuple[CommunicatorGroup, ...]:
    rings: defaultdict[int, set[int]] = defaultdict(set)
    trees: defaultdict[int, set[int]] = defaultdict(set)
    for ring in job.log.rings:
        rings[job.find_group_index(ring.communicator)].add(ring.channel)
    for tree in job.log.trees:
        trees[job.find_group_index(tree.communicator)].add(tree.channel)
    found = []
    for place, ends in enumerate(job.groups):
        hosts = tuple(sorted({end.host for end in ends}))
        took = [end.init_s for end in ends if end.init_s is not None]
        found.append(
            CommunicatorGroup(
                ends[0].id,
                ends[0].num_ranks,
                tuple(sorted(end.rank for end in ends)),
                tuple(sorted(end.rank for end in ends if end.is_initialized)),
                hosts,
                max(*(end.num_nodes for end in ends), len(hosts)),
                job.num_channels(place),
                len(rings[place]),
                len(trees[place]),
                max(took, default=None),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.num_ranks))


def _routes(job: NcclJob) -> tuple[TransportRoute, ...]:
    ends: defaultdict[tuple[object, ...], dict[str, bool]] = defaultdict(dict)
    words: defaultdict[tuple[object, ...], Counter[str]] = defaultdict(Counter)
    kinds: dict[tuple[object, ...], str] = {}
    for one in job.log.connections:
        # Without a communicator's id its ranks are known within a process only.
        key = (*job.connection_scope(one), one.source, one.target, one.channel)
        kinds[key] = parse_transport(one.transport)
        words[key][re.sub(r"/\d+(\(\d+\))?(?=/|$)", "", one.transport)] += 1
        ends[key][one.direction] = "GDRDMA" in one.transport
    rows: defaultdict[tuple[str, str], list[tuple[object, ...]]] = defaultdict(list)
    for key, kind in kinds.items():
        rows[kind, _direct(ends[key]) if kind.startswith("NET/") else ""].append(key)
    return tuple(
        TransportRoute(
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


def _called(log: NcclLog) -> tuple[CallTotals, ...]:
    count: Counter[tuple[str, int, str, int]] = Counter(
        (
            normalize_collective(one.name) or one.name,
            count_call_bytes(one),
            one.dtype,
            one.num_ranks,
        )
        for one in log.calls
    )
    rows = [CallTotals(*key, calls) for key, calls in count.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes * row.num_calls, row)))
