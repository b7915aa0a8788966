"""What NCCL_DEBUG prints, as records and moments. Forms of lines: NCCL's sources and issues."""

import gzip
from pathlib import Path
from typing import cast

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline.readers.nccl_log.nccl_log_lines import parse_line, parse_timestamp
from meshwright.timeline.readers.nccl_log.nccl_log_reader import nccl_log_to_timeline, read_nccl_log
from meshwright.timeline.readers.nccl_log.nccl_log_records import NcclLog

COMM = "comm 0x55aa rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId 18000 commId 0xdead"


def _said(rank: int, message: str, time: str = "") -> str:
    return f"{time}node-1.x:10{rank}:20{rank} [{rank}] NCCL INFO {message}"


def _call(rank: int, name: str, count: int, time: str = "") -> str:
    buffers = "sendbuff 0x7f00 recvbuff (nil)"
    end = "datatype 9 op 0 root 0 comm 0x55aa [nranks=2] stream 0x5631"
    return _said(rank, f"{name}: opCount 1f {buffers} count {count} {end}", time)


LOG = "\n".join(
    [
        "step 1 loss 2.5",
        "NCCL version 2.21.5+cuda12.4",
        *(_said(n, f"ncclCommInitRank {COMM.format(rank=n)} - Init START") for n in (0, 1)),
        "[0] " + _said(0, "Channel 00/02 :    0   1"),
        _said(0, "Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1"),
        _said(0, "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA"),
        _said(0, "Channel 01/0 : 0[0] -> 1[1] via P2P/direct pointer"),
        _said(1, "Channel 00 : 1[1000] -> 0[2000] via SHM/direct/direct"),
        _said(0, "Connected all rings, use ring PXN 0 GDR 1"),
        _said(0, f"ncclCommInitRank {COMM.format(rank=0)} - Init COMPLETE"),
        _said(0, "Init timings - ncclCommInitRank: rank 0 nranks 2 total 1.25 (kernels 0.10)"),
        _call(0, "AllGather", 1024, "[2025-01-02 03:04:05.123] "),
        _call(1, "AllReduce", 1024, "2025-01-02 03:04:05 "),
        _call(0, "AllReduce", 7),
        "",
        "[2025-01-02 03:04:06] node-1.x:100:300 [0] transport/net_ib.cc:1300 (ncclIbTest) "
        "NCCL WARN NET/IB : Got completion with status=12",
        "node-1.x:100:300 [0] misc/socket.cc:49 NCCL WARN socketProgress: refused",
        _said(0, "comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 18000 - Destroy COMPLETE"),
    ]
)


@pytest.fixture
def log(tmp_path: Path) -> NcclLog:
    path = tmp_path / "nccl.log"
    path.write_text(LOG)
    return read_nccl_log(path)


def test_communicators_have_both_ends_and_how_far_each_came(log: NcclLog) -> None:
    first, second = log.communicators
    assert (first.rank, first.num_ranks, first.device, first.id) == (0, 2, 0, "0xdead")
    assert (first.is_initialized, first.is_destroyed, first.init_s) == (True, True, 1.25)
    assert (second.rank, second.is_initialized, second.is_destroyed) == (1, False, False)
    assert log.version == "2.21.5+cuda12.4"


def test_channels_belong_to_the_communicator_that_their_thread_makes(log: NcclLog) -> None:
    found = [(c.channel, c.source, c.target, c.direction, c.transport) for c in log.connections]
    assert found == [
        (0, 0, 1, "send", "NET/IB/0/GDRDMA"),
        (1, 0, 1, "", "P2P/direct pointer"),
        (0, 1, 0, "", "SHM/direct/direct"),
    ]
    assert {c.communicator for c in log.connections} == {"0xdead"}


def test_rings_and_trees_are_read(log: NcclLog) -> None:
    assert log.rings == (("0xdead", 0, (0, 1)),)
    assert [(t.channel, t.rank, t.up, t.down) for t in log.trees] == [
        (0, 0, -1, (1, -1, -1)),
        (1, 0, 1, (-1, -1, -1)),
    ]


def test_calls_know_their_rank_and_communicator(log: NcclLog) -> None:
    first, second, _ = log.calls
    assert (first.name, first.op_count, first.num_elements, first.dtype) == (
        "AllGather",
        31,
        1024,
        "bf16",
    )
    assert (second.rank, second.communicator, second.reduction) == (1, "0xdead", "sum")


def test_warnings_say_where_in_nccls_source_they_come_from(log: NcclLog) -> None:
    first, second = log.warnings
    assert first.source == "transport/net_ib.cc:1300 (ncclIbTest)"
    assert first.message == "NET/IB : Got completion with status=12"
    assert first.time_ns == parse_timestamp("2025-01-02 03:04:06")
    assert second.source == "misc/socket.cc:49"


def test_calls_with_times_are_moments(log: NcclLog) -> None:
    timeline = nccl_log_to_timeline(log)
    assert timeline.column("rank").tolist() == [0, 1]
    assert timeline.column("duration_ns").tolist() == [0, 0]
    assert timeline.column("bytes").tolist() == [1024 * 2 * 2, 1024 * 2]
    assert timeline.spans.column("collective").to_pylist() == ["all_gather", "all_reduce"]
    start = timeline.column("start_ns")
    assert start[0] - start[1] == 123_000_000
    assert "1 calls without a time were left out" in timeline.metadata["notes"]


def test_without_times_or_calls_there_is_no_timeline(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(_call(0, "AllReduce", 8))
    with pytest.raises(InputError, match="has no times"):
        nccl_log_to_timeline(read_nccl_log(path))
    path.write_text(_said(0, "Connected all rings"))
    with pytest.raises(InputError, match="no calls of collectives"):
        nccl_log_to_timeline(read_nccl_log(path))


def test_older_lines_without_ids_are_read(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(_said(0, "comm 0x7f rank 3 nranks 8 cudaDev 3 busId b000 - Init COMPLETE"))
    (found,) = read_nccl_log(path).communicators
    assert (found.rank, found.num_ranks, found.bus_id, found.id, found.is_initialized) == (
        3,
        8,
        "b000",
        "",
        True,
    )


def test_an_address_that_is_used_again_is_another_communicator(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    start = _said(0, f"{COMM.format(rank=0)} - Init START")
    path.write_text("\n".join([start, _said(0, f"{COMM.format(rank=0)} - Init COMPLETE"), start]))
    assert [one.is_initialized for one in read_nccl_log(path).communicators] == [True, False]


def test_words_before_a_line_are_skipped() -> None:
    for before in ("", "[rank3]: ", "3: ", "[2025/01/02 03:04:05.5] ", "[1,3]<stdout>:| "):
        line = parse_line(before + "host:1:2 [7] NCCL INFO hello")
        assert line is not None
        assert (line.origin, line.device, line.message) == (("host", 1, 2), 7, "hello")
    assert parse_line("we use NCCL INFO logs") is None


def test_a_file_without_lines_of_nccls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"\xff\xfe nothing\n" + b"x" * 100_000)
    with pytest.raises(InputError, match="no line of NCCL's"):
        read_nccl_log(path)


def test_a_packed_log_that_breaks_off_keeps_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log.gz"
    text = "\n".join(_call(0, "AllReduce", n) for n in range(20_000))
    path.write_bytes(gzip.compress(text.encode())[:-2000])
    with pytest.raises(DamagedFile) as caught:
        read_nccl_log(path)
    assert len(cast(NcclLog, caught.value.readable).calls) > 100
