"""The folder of a watch: where each thing is, and that only its owner can read it.

settings.json  what agents are told          control     what they are asked for now
agents/        a file or more per process    incoming/   traces as agents write them
captures/      those that are kept           flight/     dumps of the flight recorder
hangs/         stacks and dumps of hangs     status.json, samples.jsonl, log.txt
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors

_INSIDE = ("agents", "captures", "flight", "incoming", "hangs")


class WatchFolder(NamedTuple):
    """Paths of a watch."""

    path: Path

    @property
    def agents(self) -> Path:
        """What processes say of themselves."""
        return self.path / "agents"

    @property
    def captures(self) -> Path:
        """Captures that are kept, one folder each."""
        return self.path / "captures"

    @property
    def control(self) -> Path:
        """The page that agents read."""
        return self.path / "control"

    @property
    def flight_recorder(self) -> Path:
        """Where the flight recorder is dumped to."""
        return self.path / "flight"

    @property
    def incoming(self) -> Path:
        """Where agents write traces."""
        return self.path / "incoming"

    @property
    def hangs(self) -> Path:
        """Stacks and dumps, one folder per hang."""
        return self.path / "hangs"

    @property
    def log(self) -> Path:
        """What went wrong while watching."""
        return self.path / "log.txt"

    @property
    def samples(self) -> Path:
        """What the hardware and the processes did, by the second."""
        return self.path / "samples.jsonl"

    @property
    def status(self) -> Path:
        """The watch at a glance."""
        return self.path / "status.json"


def create_watch_folder(path: Path, settings: dict[str, Any]) -> WatchFolder:
    """Make a new folder; one that holds an earlier watch is refused."""
    folder = WatchFolder(path.absolute())
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "is there already" if path.is_dir() else "is a file"
            fix = "give --out a folder that is not there yet"
            raise InputError([Problem(str(path), what, fix)])
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.path.chmod(0o700)
        for name in _INSIDE:
            (folder.path / name).mkdir(mode=0o700)
        write_private_text(folder.path / "settings.json", json.dumps(settings))
    except OSError as error:
        what = f"cannot create: {error.strerror}"
        raise InputError([Problem(str(path), what, "choose another one with --out")]) from None
    return folder


def open_watch_folder(path: Path) -> WatchFolder:
    """Return the folder of a watch that runs or ran."""
    with convert_os_errors(path, "read"):
        is_watch, is_there = (path / "status.json").is_file(), path.exists()
    if not is_watch:
        there = "holds no watch" if path.is_dir() else "is a file"
        what = there if is_there else "does not exist"
        raise InputError([Problem(str(path), what, "name a folder that mw watch made")])
    return WatchFolder(path.absolute())


def write_private_text(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.touch(mode=0o600)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
