"""What logs of NCCL's prove to be wrong with a job, the gravest first, each with its remedy.

A log says what NCCL chose and why, not what that costs, so findings have no times.
"""

from collections.abc import Iterable, Sequence

from meshwright.observe.analyze.nccl_log.nccl_job import NcclJob, parse_transport
from meshwright.observe.analyze.nccl_log.nccl_warnings import explain_warning
from meshwright.observe.finding import Finding
from meshwright.spec.units import format_ranks
from meshwright.timeline.readers.nccl_log.nccl_log_records import (
    ChannelConnection,
    Communicator,
    NcclWarning,
)

_SHOWN = 3
_COST_BASIS = "not in time: a log says what NCCL chose, not what that costs"


def find_nccl_problems(job: NcclJob) -> tuple[Finding, ...]:
    """All findings: what ends a job, then slow ways of data, then what others' ends left."""
    by_severity: list[list[Finding]] = [[], [], []]
    for severity, finding in _warnings(job):
        by_severity[severity].append(finding)
    named = {finding.name for found in by_severity for finding in found}
    ends = [*by_severity[0], *_versions(job, named), *_unfinished(job)]
    slow = [*_sockets(job), *_no_gpu_direct(job), *_through_host(job), *_one_channel(job)]
    return (*ends, *slow, *by_severity[1], *by_severity[2])


def _finding(
    name: str, title: str, evidence: Iterable[str], ranks: Iterable[int | None], remedy: str
) -> Finding:
    return Finding(
        name=name,
        title=title,
        family="nccl",
        evidence=tuple(dict.fromkeys(evidence)),
        ranks=tuple(sorted({rank for rank in ranks if rank is not None})),
        cost_ms_per_step=None,
        gpu_share=None,
        cost_basis=_COST_BASIS,
        remedy=remedy,
        spans=(),
    )


def _warnings(job: NcclJob) -> Iterable[tuple[int, Finding]]:
    """Warnings of one meaning together; those of none by where in NCCL's sources they arise."""
    kinds: dict[str, list[NcclWarning]] = {}
    for one in job.log.warnings:
        meaning = explain_warning(one.message)
        kinds.setdefault(meaning.name if meaning else f"?{one.source or one.message}", []).append(
            one
        )
    for name, those in kinds.items():
        meaning = explain_warning(those[0].message)
        ranks = {rank for w in those for rank in job.find_ranks(w.host, w.pid, w.device)}
        texts = dict.fromkeys(f"{w.host}: {w.message} ({w.source or 'NCCL'})" for w in those)
        evidence = [f"{len(those):,} warnings, first: {next(iter(texts))}", *list(texts)[1:_SHOWN]]
        if meaning is not None:
            yield (
                meaning.severity,
                _finding(name, meaning.title, evidence, ranks, meaning.remedy),
            )
        else:
            title = f"NCCL warns: {those[0].message}"
            where = those[0].source or "its sources"
            remedy = f"no known meaning; {where} of NCCL {job.log.version} prints it".rstrip()
            yield 2, _finding("nccl-warning", title, evidence, ranks, remedy)


def _versions(job: NcclJob, named: set[str]) -> Iterable[Finding]:
    """Of the ranks of one communicator; NCCL's own warning of it says more."""
    name = "nccl-version-mismatch"
    if name in named:
        return
    said = {(o.host, o.pid): o.value for o in job.log.process_facts if o.subject == "version"}
    for ends in job.groups:
        by_version: dict[str, list[Communicator]] = {}
        for end in ends:
            version = said.get((end.host, end.pid))
            if version:
                by_version.setdefault(version, []).append(end)
        if len(by_version) > 1:
            evidence = [
                f"NCCL {version}: ranks {format_ranks(end.rank for end in those)}"
                f" on {_listed({end.host for end in those})}"
                for version, those in sorted(by_version.items())
            ]
            ranks = [job.ranks.get((end.host, end.pid, end.device)) for end in ends]
            title = "ranks of one communicator load different versions of NCCL"
            remedy = "install the same version on every node; LD_LIBRARY_PATH tells which is loaded"
            yield _finding(name, title, evidence, ranks, remedy)
            return


def _unfinished(job: NcclJob) -> Iterable[Finding]:
    """Communicators that ranks began to make and did not complete."""
    for ends in job.groups:
        stuck = [end for end in ends if not end.is_initialized and not end.is_destroyed]
        if not stuck or any(_made_again(job, end) for end in stuck):
            continue
        silent = sorted(set(range(ends[0].num_ranks)) - {end.rank for end in ends})
        number = ends[0].num_ranks
        about = f"communicator {ends[0].id or ends[0].address} of {number} ranks"
        began = format_ranks(end.rank for end in stuck)
        evidence = [f"{about}: rank {began} began to make it and did not complete"]
        if silent:
            evidence.append(f"no line of rank {format_ranks(silent)}")
        remedy = "look at the last lines of those ranks, and whether the job was stopped"
        if silent:
            remedy = (
                f"see whether rank {format_ranks(silent)} started and reached init_process_group or"
                " new_group, and whether its log is among these; MASTER_ADDR, WORLD_SIZE and RANK"
                " have to fit"
            )
        ranks = [job.ranks.get((end.host, end.pid, end.device)) for end in stuck]
        title = "a communicator was never completed" + (", ranks of it are missing" * bool(silent))
        yield _finding("communicator-incomplete", title, evidence, ranks, remedy)


def _made_again(job: NcclJob, end: Communicator) -> bool:
    """Whether lines break off in the log rather than in the job: it was used afterwards."""
    name = end.id or end.address
    return any(c.communicator == name and c.host == end.host for c in job.log.calls)


def _sockets(job: NcclJob) -> Iterable[Finding]:
    own = [one for one in job.log.connections if parse_transport(one.transport) == "NET/Socket"]
    if not own:
        return
    evidence = [_example(job, own, "use NET/Socket")]
    found = [one for one in job.log.process_facts if one.subject == "devices"]
    hosts = {one.host for one in own}
    nics = [f"NCCL found {one.value} on {one.host}" for one in found if one.host in hosts]
    off = [text for text in job.format_env_settings("NCCL_IB_DISABLE") if not text.endswith("=0")]
    forced = [
        text for text in job.format_env_settings("NCCL_NET") if text.lower().endswith("=socket")
    ]
    ranks = [job.find_rank(one) for one in own]
    if off or forced:
        title = "InfiniBand is disabled: NCCL uses TCP sockets"
        why = [f"{text} is set" for text in (*off, *forced)]
        remedy = f"unset {' and '.join(text.partition('=')[0] for text in (*off, *forced))}"
        remedy += " where nodes have InfiniBand or RoCE (ibv_devices lists the NICs)"
    elif nics:
        title = "NCCL uses TCP sockets although InfiniBand NICs are present"
        why = []
        remedy = "set NCCL_NET=IB: NCCL then stops with the reason instead of using sockets"
        remedy += "; the NICs have to be there on every node (ibstat: State Active)"
    else:
        return
    yield _finding(
        "network-sockets", title, [*evidence, *why, *list(dict.fromkeys(nics))[:_SHOWN]],
        ranks, remedy,
    )  # fmt: skip


def _no_gpu_direct(job: NcclJob) -> Iterable[Finding]:
    net = [one for one in job.log.connections if parse_transport(one.transport).startswith("NET/")]
    net = [one for one in net if parse_transport(one.transport) != "NET/Socket"]
    without = [one for one in net if "GDRDMA" not in one.transport]
    if not without:
        return
    reasons = list(dict.fromkeys(job.list_facts("no rdma")))
    evidence = [
        f"{len(without):,} of {len(net):,} ends of connections are without GDRDMA, such as "
        + _words(without[0]),
        *(f"GPU Direct RDMA Disabled for {text}" for text in reasons[:_SHOWN]),
    ]
    levels = job.format_env_settings("NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL", "NCCL_NET_GDR_READ")
    evidence += [f"{text} is set" for text in levels]
    receives = any(one.direction == "receive" and "GDRDMA" in one.transport for one in net)
    if levels:
        remedy = f"unset {' and '.join(text.partition('=')[0] for text in levels)}"
    elif any("distance" in text for text in reasons):
        remedy = (
            "use the NIC on the GPU's own PCIe switch (nvidia-smi topo -m); where there is none,"
            " try NCCL_NET_GDR_LEVEL=SYS and measure"
        )
    elif receives and all(one.direction == "send" for one in without):
        remedy = "try NCCL_NET_GDR_READ=1 and measure: only sends go through host memory"
    else:
        remedy = (
            "modprobe nvidia-peermem on every node, or a kernel and driver with DMA-BUF; then the"
            " log says GPU Direct RDMA Enabled"
        )
    title = "the network is used without GPU-direct RDMA: data goes through host memory"
    yield _finding(
        "no-gpu-direct-rdma", title, evidence, [job.find_rank(one) for one in without], remedy
    )


def _through_host(job: NcclJob) -> Iterable[Finding]:
    own = [one for one in job.log.connections if parse_transport(one.transport) == "SHM"]
    if not own:
        return
    set_ = [
        text
        for text in job.format_env_settings("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
        if text != "NCCL_P2P_DISABLE=0"
    ]
    pairs = job.list_facts("no peers")
    evidence = [
        _example(job, own, "use SHM"),
        *(f"{text} is set" for text in set_),
        *(f"P2P is disabled between connected GPUs {text}" for text in pairs[:_SHOWN]),
    ]
    if set_:
        remedy = f"unset {' and '.join(text.partition('=')[0] for text in set_)}"
    else:
        remedy = (
            "nvidia-smi topo -p2p r tells why: NS is a card that cannot, else switch off ACS in the"
            " BIOS or the IOMMU (intel_iommu=off); GPUs of two sockets: try NCCL_P2P_LEVEL=SYS and"
            " measure"
        )
    title = "GPUs of one node talk through host memory (SHM), not to each other"
    yield _finding(
        "peers-through-host", title, evidence, [job.find_rank(one) for one in own], remedy
    )


def _one_channel(job: NcclJob) -> Iterable[Finding]:
    for place, ends in enumerate(job.groups):
        complete = all(end.is_initialized for end in ends) and ends[0].num_ranks > 1
        if not complete or job.num_channels(place) != 1:
            continue
        limits = job.format_env_settings("NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MAX_CTAS")
        about = f"communicator {ends[0].id or ends[0].address} of {ends[0].num_ranks} ranks"
        evidence = [f"{about} has 1 channel", *(f"{text} is set" for text in limits)]
        names = " and ".join(text.partition("=")[0] for text in limits)
        remedy = f"unset {names}" if limits else "try NCCL_MIN_NCHANNELS=4 and measure"
        ranks = [job.ranks.get((end.host, end.pid, end.device)) for end in ends]
        title = "collectives have one channel only: one block of the GPU moves all data"
        yield _finding("one-channel", title, evidence, ranks, remedy)
        return


def _example(job: NcclJob, those: Sequence[ChannelConnection], verb: str) -> str:
    number = len({(*job.connection_scope(o), o.channel, o.source, o.target) for o in those})
    whole = len(
        {(*job.connection_scope(o), o.channel, o.source, o.target) for o in job.log.connections}
    )
    return f"{number:,} of {whole:,} connections {verb}, such as {_words(those[0])}"


def _words(one: ChannelConnection) -> str:
    side = f" [{one.direction}]" if one.direction else ""
    return f"channel {one.channel} from rank {one.source} to {one.target}{side} via {one.transport}"


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
