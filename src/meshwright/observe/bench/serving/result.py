"""`Result`: everything a bench of a server saw, as a file that can be compared later."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.bench.case import Machine
from meshwright.observe.bench.host import cores, processor
from meshwright.observe.bench.serving.drive import Generator
from meshwright.observe.bench.serving.served import Served
from meshwright.observe.bench.serving.server import Server
from meshwright.observe.bench.serving.wire import Asking

FORMAT = "meshwright.bench.serve.result/1"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load that was put on a server."""

    name: str
    """The load in words, such as `4 requests/s`."""
    rate_per_s: float | None = None
    """Requests per second that were offered; None in a closed loop."""
    in_flight: int | None = None
    """Requests kept in flight; None in an open loop."""
    began_unix_s: float
    requests: tuple[Served, ...]
    generator: Generator
    gave_up: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A bench of one server."""

    format: str = FORMAT
    command: str
    """The command line that repeats it."""
    date: str
    """When it began, in UTC."""
    seed: int
    server: Server
    asking: Asking
    machine: Machine
    """Where the load came from; what the server runs on it alone knows."""
    software: dict[str, str]
    runs: tuple[Run, ...]
    interrupted: bool = False
    """Whether somebody ended it before all was sent."""


def here() -> tuple[Machine, dict[str, str]]:
    """Return this machine and the software that makes the load."""
    found = {"python": platform.python_version()}
    for package in ("meshwright", "aiohttp", "uvloop"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return Machine(device=processor(), host=processor(), cores=cores()), found


def today() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def save(result: Result, path: str) -> None:
    """Write a result; a file that is there is replaced only once the new one is whole."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        part.write_bytes(msgspec.json.encode(result))
        part.replace(target)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise InputError([Problem(path, what, "name a file in a folder that exists")]) from None


def load(path: str) -> Result:
    """Read a result."""
    fix = "give a file that mw bench serve --save FILE wrote"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError([Problem(path, error.strerror or str(error), fix)]) from None
    try:
        found = msgspec.json.decode(data, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedFile([Problem(path, f"is no result: {error}", fix)]) from None
    if found.format != FORMAT:
        raise InputError([Problem(path, f"has the format {found.format!r}, not {FORMAT!r}", fix)])
    return found
