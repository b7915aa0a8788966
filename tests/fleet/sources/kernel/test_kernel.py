"""Kernel logs: each way a line is printed, each fault that is told, real files."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.fleet.sources.kernel.log_line import LogClock, parse_line
from meshwright.fleet.sources.kernel.messages import normalize_pci_address, parse_fault
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.sources.source_registry import open_source

REAL = Path(__file__).parents[5] / "shared" / "fleet_traces" / "gpud_kernel_logs"
XID = "NVRM: Xid (PCI:0000:9b:00): 79, pid=7, name=python, GPU has fallen off the bus."
NOON = 1740312000.0  # 2025-02-23T12:00:00Z


def read(file: Path, **options: str) -> list[dict[str, Any]]:
    source = open_source(str(file), SourceOptions(cluster="east", kind_options=options))
    assert source.name.startswith("kernel ")
    return [row for batch in source.read_batches() for row in batch.rows.to_pylist()]


@pytest.mark.parametrize(
    ("line", "node"),
    [
        (f"2025-02-23T12:00:00+00:00 n7 kernel: [  12.5] {XID}", "n7"),
        (f"2025-02-23T13:00:00.000000+01:00 n7 kernel: {XID}", "n7"),
        (f"Feb 23 12:00:00 n7 kernel: [   12.500000] {XID}", "n7"),
        (f"[Sun Feb 23 12:00:00 2025] {XID}", "log"),
        (f"kern  :warn  : [Sun Feb 23 12:00:00 2025] {XID}", "log"),
        (f"kern  :warn  : 2025-02-23T12:00:00,000000+00:00 {XID}", "log"),
        (f"2025-02-23T12:00:00,000000+00:00 {XID}", "log"),
        (f"[43200.000000] {XID}", "log"),
        (f"<4>[43200.000000][  T123] {XID}", "log"),
        (f"4,3973,43200000000,-;{XID}", "log"),
        ('{"_TRANSPORT":"kernel","__REALTIME_TIMESTAMP":"1740312000000000","_HOSTNAME":"n7",'
         f'"MESSAGE":"{XID}"}}', "n7"),
    ],
)  # fmt: skip
def test_each_form_of_line(tmp_path: Path, line: str, node: str) -> None:
    file = tmp_path / "log.txt"
    file.write_text(f"{line}\n")
    os.utime(file, (NOON + 86_400 * 200,) * 2)
    (only,) = read(file, boot="2025-02-23T00:00:00+00:00")
    assert (only["node"], only["time_s"], only["kind"], only["code"]) == (node, NOON, "xid", 79)
    assert only["text"] == "0000:9b:00: pid=7, name=python, GPU has fallen off the bus."


def test_lines_without_a_year_are_of_the_last_one_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "kern.log"
    file.write_text(f"Dec 31 23:59:59 n7 kernel: {XID}\nJan  1 00:00:01 n7 kernel: {XID}\n")
    os.utime(file, (1735700000,) * 2)  # 2025-01-01
    assert [row["time_s"] for row in read(file)] == [1735689599.0, 1735689601.0]


def test_gpus_of_one_second_are_one_row_that_counts_them(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    other = XID.replace("9b", "3a")
    file.write_text(f"[Sun Feb 23 12:00:00 2025] {XID}\n[Sun Feb 23 12:00:00 2025] {other}\n")
    (only,) = read(file)
    assert only["count"] == 2
    assert only["text"].startswith("0000:3a:00, 0000:9b:00: ")
    index = tmp_path / "gpus.csv"
    index.write_text("0, 00000000:3A:00.0\n1, 00000000:9B:00.0\n")
    assert [row["gpu"] for row in read(file, gpus=str(index))] == [1, 0]


def test_times_since_the_start_need_the_start(tmp_path: Path) -> None:
    file = tmp_path / "n3.dmesg"
    file.write_text(f"[   12.500000] {XID}\n")
    (batch,) = open_source(str(file), SourceOptions(cluster="east")).read_batches()
    assert batch.rows.num_rows == 0
    assert "--option boot" in batch.notes[0]


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "n3.dmesg"
    file.write_text(f"[Sun Feb 23 12:00:00 2025] {XID}\n")
    source = open_source(str(file), SourceOptions(cluster="east"))
    (batch,) = source.read_batches()
    assert not list(source.read_batches(batch.cursor))


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:02): 13, pid=1, name=a, Graphics", "xid", 13),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "xid", 14),
        ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress", "nvswitch",
         12028),
        ("pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0", "pcie", None),
        ("pcieport 0000:16:01.0: PCIe Bus Error: severity=Corrected, type=Data Link", "pcie", None),
        ("pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0",
         "pcie_fatal", None),
        ("nvidia 0000:9b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction",
         "pcie_fatal", None),
        ("mlx5_core 0000:1a:00.0 ibp26s0: Link down", "infiniband", None),
        ("mlx5_core 0000:1a:00.0: poll_health:739: device's health compromised - reached miss "
         "count", "infiniband", None),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "host_memory", None),
        ("Linux version 5.15.0-112-generic (buildd@lcy02)", "boot", None),
    ],
)  # fmt: skip
def test_each_fault(text: str, kind: str, code: int | None) -> None:
    told = parse_fault(text)
    assert told is not None
    assert (told.kind, told.code) == (kind, code)


@pytest.mark.parametrize(
    "text",
    [
        "EDAC MC0: Giving out device to module i10nm_edac",
        "mlx5_core 0000:1a:00.0 ibp26s0: Link up",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "pcieport 0000:00:01.0: AER: enabled with IRQ 27",
        "nvidia-nvswitch2: open (major=510)",
    ],
)
def test_what_is_no_fault(text: str) -> None:
    assert parse_fault(text) is None


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=60), st.sampled_from(["", "[", "Feb 30 ", "2025-13-01T00:00:00 ", "{", XID])
)
def test_nonsense_is_no_error(text: str, head: str) -> None:
    line = parse_line(head + text, LogClock(written_s=NOON, boot_s=0.0))
    fault = parse_fault(line.text if line else head + text)
    assert line is None or line.time_s is None or math.isfinite(line.time_s)
    assert fault is None or (fault.kind and fault.text in head + text)


def test_addresses_are_told_alike() -> None:
    assert (
        normalize_pci_address("00000000:9B:00.0")
        == normalize_pci_address("0000:9b:00")
        == normalize_pci_address("9b:00")
        == "0000:9b:00"
    )


def test_other_files_and_options_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("nothing of a kernel\n")
    with pytest.raises(InputError, match="no kind"):
        open_source(str(file), SourceOptions())
    (tmp_path / "n3.dmesg").write_text(f"[Sun Feb 23 12:00:00 2025] {XID}\n")
    with pytest.raises(InputError, match="--cluster"):
        open_source(str(tmp_path / "n3.dmesg"), SourceOptions())
    with pytest.raises(InputError, match="zone"):
        open_source(str(file), SourceOptions(kind_options={"zones": "UTC"}), "kernel")


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared kernel logs are not here")
def test_real_logs() -> None:
    gsp = read(REAL / "nvidia_xid__dmesg-with-xid-119.log", node="n1")
    assert {row["code"] for row in gsp} == {119}
    assert all("GPU-509665ad-b600-ac93-3616-d754b23d636d" in row["text"] for row in gsp)
    mixed = read(REAL / "memory__dmesg.decode.iso.log", node="n1")
    assert sum(row["code"] == 13 for row in mixed) == 16
    assert sum(row["code"] == 43 for row in mixed) == 1
    assert {row["kind"] for row in mixed} == {"xid", "oom"}
    (switch,) = read(REAL / "nvidia_fabric-manager__fabricmanager.log", node="n1")
    assert (switch["kind"], switch["code"]) == ("nvswitch", 12028)
    assert switch["text"].startswith("0000:86:00: non-fatal")
    nccl = read(REAL / "nvidia_nccl__dmesg.decode.iso.log", node="n1")
    assert [row["kind"] for row in nccl] == ["segfault"] * 2
