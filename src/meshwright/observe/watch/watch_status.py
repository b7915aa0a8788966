"""Sums up what the page of a rank says."""

from pathlib import Path

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.hardware.hardware_sample import HardwareSummary
from meshwright.observe.watch.agent.shared_pages import CAPTURES_OFF, ENDED, FAILED, PROFILES_ITSELF
from meshwright.observe.watch.process_table import WatchedProcess
from meshwright.observe.watch.step_pace import summarize_step_times
from meshwright.observe.watch.watch_folder import write_private_text

STATUS_FORMAT = "meshwright.watch.status/2"


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    pid: int
    steps: int
    step_ms: float | None
    """The middle one of the newest."""
    overhead_share: float
    """Part of the time that watching took, as counted by its agent."""
    captures: int
    state: str
    """`running`, `completed`, `failed`, `killed` (it did not end by itself)."""


class CaptureStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One capture that was kept."""

    number: int
    step: int
    steps: int
    ranks: int
    reason: str
    """`first`, `reference`, `changed` or `slowdown`."""
    differences: str
    """What differs."""
    folder: str
    """Below the folder of the watch."""
    bytes: int
    step_ms: float
    has_device_work: bool = False
    """Whether it shows work of devices, which `mw diff` compares."""


class SlowdownStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A time from which on steps took longer."""

    step: int
    before_ms: float
    after_ms: float
    until_step: int | None = None
    """The first step that was as quick as before again."""
    capture: str = ""
    reference: str = ""
    changes: tuple[str, ...] = ()
    """What grew, and what changed in the hardware."""
    finding: str = ""


class HangStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A time without a step."""

    last_step: int
    """The last one that ended."""
    detected_after_s: float
    folder: str = ""
    """Empty until the ranks have answered."""
    positions: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Ranks that stand in one place, and where."""
    diagnosis: str = ""
    """What the flight recorder's dumps say."""
    num_dumps: int = 0
    resumed_after_s: float | None = None


class WatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it."""

    format: str = STATUS_FORMAT
    command: str
    """Without what looks like a secret."""
    watcher_pid: int
    job_pid: int
    exit_code: int | None = None
    """The job's exit code; None while it runs."""
    started_unix_s: float
    """Start, since 1970."""
    elapsed_s: float
    processes: int
    """That imported torch."""
    steps: int
    step_ms: float | None = None
    step_time_variation: float | None = None
    """Half the width of the middle half of step times, as a part of the middle one."""
    slowest_ms: float | None = None
    overhead_share: float
    """Of the rank on which watching took most."""
    max_overhead: float
    capture_interval: int | None = None
    """Every how many steps a capture is taken."""
    fixed_interval: bool = False
    """Whether that was asked for, whatever it costs."""
    ranks: tuple[RankStatus, ...]
    captures: tuple[CaptureStatus, ...] = ()
    captures_taken: int = 0
    captures_dropped: int = 0
    captures_refused: int = 0
    """Captures not taken since the job was profiling itself, or a step did not end."""
    capture_costs_ms: tuple[float, ...] = ()
    """What the newest captures cost, of the rank that each cost most."""
    slowdowns: tuple[SlowdownStatus, ...] = ()
    hangs: tuple[HangStatus, ...] = ()
    lost_processes: tuple[str, ...] = ()
    hardware: HardwareSummary = HardwareSummary()
    has_errors: bool = False
    """Whether the log says that something went wrong while watching."""
    notes: tuple[str, ...] = ()


def write_status(path: Path, status: WatchStatus) -> None:
    """Write it, whole or not at all."""
    write_private_text(path, msgspec.json.encode(status).decode())


def read_status(path: Path) -> WatchStatus:
    """Read it back; a status of an older version is refused."""
    fix = "name a folder that this version of mw watch made, or run mw watch again"
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_StatusVersion).format
        if version != STATUS_FORMAT:
            what = f"has the format {version!r}, not {STATUS_FORMAT!r}"
            raise InputError([Problem(str(path), what, fix)])
        return msgspec.json.decode(data, type=WatchStatus)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedFile([Problem(str(path), f"cannot read: {error}", fix)]) from None


class _StatusVersion(msgspec.Struct):
    format: str = "meshwright.watch.status/1"


MAX_TIMES = 4096
"""Steps, the newest, that figures are taken from."""


def summarize_process(process: WatchedProcess) -> RankStatus:
    """Sum up one rank."""
    reader = process.steps
    if reader is None:
        raise ValueError(f"process {process.announcement.pid} has made no step")
    head = reader.read_header()
    last_ns = reader.read_last_step_end_ns() or head.started_ns
    passed_ns = max(last_ns - head.started_ns, 1)
    figures = summarize_step_times(reader.read_step_durations(MAX_TIMES).step_s)
    state = "running"
    if head.state & FAILED:
        state = "failed"
    elif head.state & ENDED:
        state = "completed"
    elif process.is_gone:
        state = "killed"
    return RankStatus(
        rank=process.rank if process.rank is not None else -1,
        pid=process.announcement.pid,
        steps=head.num_steps,
        step_ms=1e3 * figures.median_s if figures else None,
        overhead_share=min(1.0, head.overhead_ns / passed_ns),
        captures=head.num_captures,
        state=state,
    )


def collect_notes(ranks: list[WatchedProcess]) -> list[str]:
    """What the agents have to say."""
    states = [one.steps.read_header().state for one in ranks if one.steps is not None]
    found = []
    if any(state & PROFILES_ITSELF for state in states):
        found.append("the job was profiling itself when a capture was due: it went first")
    if any(state & CAPTURES_OFF for state in states):
        found.append("captures failed and are off on some ranks: see log.txt")
    return found
