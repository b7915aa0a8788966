"""`Status`: a watch at a glance, as it is kept in a file and shown on a screen."""

from pathlib import Path

import msgspec

from meshwright.errors import DamagedFile, Problem
from meshwright.observe.watch.folder import write_text
from meshwright.observe.watch.hardware import Summary


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    pid: int
    steps: int
    step_ms: float | None
    """The middle one of the newest."""
    overhead: float
    """Part of the time that watching took, as counted by its agent."""
    captures: int
    state: str
    """`runs`, `ended`, `failed`, `gone` (without having ended itself)."""


class CaptureStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One capture that was kept."""

    number: int
    step: int
    steps: int
    ranks: int
    why: str
    """`first`, `reference`, `differs` or `slowdown`."""
    what: str
    """What differs."""
    folder: str
    """Below the folder of the watch."""
    bytes: int
    step_ms: float
    on_device: bool = False
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
    what: tuple[str, ...] = ()
    """What grew, and what changed in the hardware."""
    finding: str = ""


class StallStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A time without a step."""

    step: int
    """The last one that ended."""
    after_s: float
    folder: str = ""
    """Empty until the ranks have answered."""
    places: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Ranks that stand in one place, and where."""
    verdict: str = ""
    """What the flight recorder's dumps say."""
    dumps: int = 0
    went_on_after_s: float | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it."""

    command: str
    """Without what looks like a secret."""
    watcher: int
    job: int
    code: int | None = None
    """The job's exit code; None while it runs."""
    since_s: float
    """Start, since 1970."""
    elapsed_s: float
    processes: int
    """That imported torch."""
    steps: int
    step_ms: float | None = None
    variation: float | None = None
    """Half the width of the middle half of step times, as a part of the middle one."""
    slowest_ms: float | None = None
    overhead: float
    """Of the rank on which watching took most."""
    budget: float
    stride: int | None = None
    """Every how many steps a capture is taken."""
    as_asked: bool = False
    """Whether that was asked for, whatever it costs."""
    ranks: tuple[RankStatus, ...]
    captures: tuple[CaptureStatus, ...] = ()
    taken: int = 0
    dropped: int = 0
    refused: int = 0
    """Captures not taken since the job was profiling itself, or a step did not end."""
    costs_ms: tuple[float, ...] = ()
    """What the newest captures cost, of the rank that each cost most."""
    slowdowns: tuple[SlowdownStatus, ...] = ()
    stalls: tuple[StallStatus, ...] = ()
    deaths: tuple[str, ...] = ()
    hardware: Summary = Summary()
    faults: bool = False
    """Whether the log says that something went wrong while watching."""
    notes: tuple[str, ...] = ()


def write_status(path: Path, status: Status) -> None:
    """Write it, whole or not at all."""
    write_text(path, msgspec.json.encode(status).decode())


def read_status(path: Path) -> Status:
    """Read it back."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except (OSError, msgspec.MsgspecError) as error:
        what, fix = f"cannot be read: {error}", "name a folder that this version of mw watch made"
        raise DamagedFile([Problem(str(path), what, fix)]) from None
