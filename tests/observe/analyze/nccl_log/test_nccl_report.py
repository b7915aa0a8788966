"""What logs of NCCL's say of a job, and what they prove. Forms of lines: NCCL's sources, issues."""

from pathlib import Path

import pytest

from meshwright.observe.analyze.nccl_log.nccl_report import NcclReport, analyze_nccl_logs
from meshwright.observe.analyze.nccl_log.nccl_warnings import explain_warning
from meshwright.observe.finding import Finding
from meshwright.timeline.readers.nccl_log.nccl_log_reader import read_nccl_log

NICS = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
OFF = "NCCL_IB_DISABLE set by environment to 1."


def said(rank: int, message: str) -> str:
    """A line of one of four ranks, two on each node."""
    return f"node{rank // 2}:10{rank}:20{rank} [{rank % 2}] NCCL INFO {message}"


def made(rank: int, *, ready: bool = True, version: str = "2.27.3+cuda12.9") -> list[str]:
    """What a rank prints while it makes a communicator of four."""
    about = (
        f"comm 0x{rank}a rank {rank} nranks 4 cudaDev {rank % 2} nvmlDev {rank % 2} busId 18000"
        " commId 0xdead"
    )
    lines = [f"NCCL version {version}", f"ncclCommInitRank {about} - Init START"]
    lines += [
        f"comm 0x{rank}a rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
        "Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1",
        "2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels, 1 p2p channels per"
        " peer",
    ]
    return [
        said(rank, line)
        for line in (*lines, *([f"ncclCommInitRank {about} - Init COMPLETE"] * ready))
    ]


def way(source: int, target: int, transport: str, direction: str = "") -> str:
    """A line about a connection."""
    side = f"[{direction}] " if direction else ""
    teller = target if direction == "receive" else source
    ends = f"{source}[{source % 2}] -> {target}[{target % 2}]"
    return said(teller, f"Channel 00/0 : {ends} {side}via {transport}")


def report(tmp_path: Path, *files: list[str]) -> NcclReport:
    """The report of these files."""
    logs = []
    for place, lines in enumerate(files):
        path = tmp_path / f"{place}.log"
        path.write_text("\n".join(lines))
        logs.append(read_nccl_log(path))
    return analyze_nccl_logs(logs)


ALL = [line for rank in range(4) for line in made(rank)]
SOUND = [
    *ALL,
    said(0, "Channel 00/02 : 0 1 2 3"),
    said(0, "Channel 01/02 : 0 1 2 3"),
    said(0, NICS),
    said(0, "Using network IB"),
    way(0, 1, "P2P/CUMEM"),
    way(1, 2, "NET/IB/0/GDRDMA", "send"),
    way(1, 2, "NET/IB/0/GDRDMA", "receive"),
]


def only(found: NcclReport) -> Finding:
    """The one finding."""
    (finding,) = found.findings
    return finding


def test_a_sound_job_is_summed_up_and_has_no_findings(tmp_path: Path) -> None:
    found = report(tmp_path, SOUND)
    assert found.findings == ()
    assert found.versions == ("2.27.3+cuda12.9",)
    assert found.devices == ("mlx5_0:1/IB", "mlx5_1:1/IB")
    assert found.networks == ("IB",)
    (group,) = found.communicators
    assert (group.num_ranks, group.num_nodes, group.ranks_seen) == (4, 2, (0, 1, 2, 3))
    assert (group.num_channels, group.num_rings, group.num_trees) == (2, 2, 2)
    assert {(r.transport, r.gpu_direct, r.num_connections) for r in found.routes} == {
        ("P2P", "", 1),
        ("NET/IB", "yes", 1),
    }


def test_files_of_ranks_make_one_job(tmp_path: Path) -> None:
    (group,) = report(tmp_path, *(made(rank) for rank in range(4))).communicators
    assert group.ranks_initialized == (0, 1, 2, 3)


def test_sockets_although_there_are_nics(tmp_path: Path) -> None:
    lines = [*ALL, said(1, NICS), way(1, 2, "NET/Socket/0", "send")]
    finding = only(report(tmp_path, lines))
    assert finding.name == "network-sockets"
    assert finding.ranks == (1,)
    assert "NCCL_NET=IB" in finding.remedy
    assert any("mlx5_0:1/IB" in text for text in finding.evidence)


def test_sockets_by_a_setting(tmp_path: Path) -> None:
    finding = only(report(tmp_path, [*ALL, said(0, OFF), way(1, 2, "NET/Socket/0", "send")]))
    assert finding.remedy.startswith("unset NCCL_IB_DISABLE")
    assert "NCCL_IB_DISABLE=1 is set" in finding.evidence


def test_sockets_alone_prove_nothing(tmp_path: Path) -> None:
    lines = [*ALL, said(0, "NET/IB : No device found."), way(1, 2, "NET/Socket/0", "send")]
    assert report(tmp_path, lines).findings == ()


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", "nvidia-peermem"),
        ("GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)", "NCCL_NET_GDR_LEVEL"),
        ("NCCL_NET_GDR_LEVEL set by environment to LOC", "unset NCCL_NET_GDR_LEVEL"),
    ],
)
def test_a_network_without_gpu_direct(tmp_path: Path, reason: str, remedy: str) -> None:
    lines = [*ALL, said(1, reason), way(1, 2, "NET/IB/0", "send"), way(1, 2, "NET/IB/0", "receive")]
    found = report(tmp_path, lines)
    finding = only(found)
    assert finding.name == "no-gpu-direct-rdma"
    assert finding.ranks == (1, 2)
    assert remedy in finding.remedy
    assert found.routes[0].gpu_direct == "no"


def test_sends_alone_without_gpu_direct(tmp_path: Path) -> None:
    ways = [way(1, 2, "NET/IB/0", "send"), way(1, 2, "NET/IB/0/GDRDMA", "receive")]
    found = report(tmp_path, [*ALL, *ways])
    assert found.routes[0].gpu_direct == "receives only"
    assert "NCCL_NET_GDR_READ=1" in only(found).remedy


def test_peers_through_host_memory(tmp_path: Path) -> None:
    off = said(0, "NCCL_P2P_DISABLE set by environment to 1")
    finding = only(report(tmp_path, [*ALL, off, way(0, 1, "SHM/direct/direct")]))
    assert finding.name == "peers-through-host"
    assert finding.remedy == "unset NCCL_P2P_DISABLE"
    found = report(tmp_path, [*ALL, way(0, 1, "SHM/direct/direct")])
    assert "nvidia-smi topo -p2p r" in only(found).remedy


def test_one_channel(tmp_path: Path) -> None:
    lines = [line.replace("2 coll channels", "1 coll channels") for line in ALL]
    limit = said(0, "NCCL_MAX_NCHANNELS set by environment to 1.")
    finding = only(report(tmp_path, [*lines, limit]))
    assert (finding.name, finding.remedy) == ("one-channel", "unset NCCL_MAX_NCHANNELS")
    assert finding.ranks == (0, 1, 2, 3)


def test_versions_that_differ_within_a_communicator(tmp_path: Path) -> None:
    files = [made(rank) for rank in range(3)]
    finding = only(report(tmp_path, *files, made(3, version="2.21.5+cuda12.4")))
    assert finding.name == "nccl-version-mismatch"
    assert any("2.21.5" in text and "ranks 3 on node1" in text for text in finding.evidence)


def test_ranks_that_never_came(tmp_path: Path) -> None:
    finding = only(report(tmp_path, *(made(rank, ready=False) for rank in range(3))))
    assert finding.name == "communicator-incomplete"
    assert "no line of rank 3" in finding.evidence


def test_logs_of_some_ranks_of_a_completed_communicator_prove_nothing(tmp_path: Path) -> None:
    assert report(tmp_path, made(0)).findings == ()


def test_what_ends_a_job_comes_before_what_slows_it(tmp_path: Path) -> None:
    warned = "node1:102:202 [0] misc/socket.cc:58 NCCL WARN "
    lines = [
        *ALL,
        way(0, 1, "SHM/direct/direct"),
        warned + "socketProgress: Connection closed by remote peer node0<4000>",
        warned + "Cuda failure 'out of memory'",
        warned + "something new",
    ]
    names = [one.name for one in report(tmp_path, lines).findings]
    assert names == ["out-of-device-memory", "peers-through-host", "peer-gone", "nccl-warning"]


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("NET/IB : Got completion from peer 1.2.3.4<5> with status=12 opcode=1 len=0",
         "fabric-retries"),
        ("NET/IB: Got completion from peer x with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0",
         "fabric-retries"),
        ("NET/IB : Got completion with status=5 opcode=0", "fabric-flushed"),
        ("NET/IB : Got completion with status=15 opcode=0", "fabric-error"),
        ("Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes", "shared-memory-full"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 18000", "duplicate-gpu"),
        ("Call to ibv_modify_qp failed with error Network is unreachable", "queue-pair-refused"),
        ("socketStartConnect: Connect to 10.0.0.1<43> failed : Connection refused",
         "no-connection"),
        ("Mismatched NCCL version detected : rank 0 version 22703 rank 1 version 22105",
         "nccl-version-mismatch"),
    ],
)  # fmt: skip
def test_warnings_have_meanings(message: str, name: str) -> None:
    found = explain_warning(message)
    assert found is not None
    assert found.name == name


def test_a_warning_that_names_a_version_is_a_warning(tmp_path: Path) -> None:
    text = "node0:1:2 [0] dev.cc:9 NCCL WARN This was compiled with NCCL version 2.1, which is old"
    found = report(tmp_path, [text])
    assert (found.num_warnings, found.versions) == (1, ())


def test_calls_are_summed_by_operation_and_size(tmp_path: Path) -> None:
    end = "datatype 9 op 0 root 0 comm 0x0a [nranks=4] stream 0x5631"
    call = f"opCount 1f sendbuff 0x7f00 recvbuff 0x7f00 count 1024 {end}"
    lines = [*ALL, *[said(0, f"AllReduce: {call}")] * 3, said(0, f"AllGather: {call}")]
    found = [(c.operation, c.bytes, c.dtype, c.num_calls) for c in report(tmp_path, lines).calls]
    assert found == [("all_gather", 8192, "bf16", 1), ("all_reduce", 2048, "bf16", 3)]
