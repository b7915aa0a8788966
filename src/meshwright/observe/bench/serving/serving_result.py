"""`ServingBenchResult`: everything a serving bench measured, as a file for later comparison."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import make_parent_folder
from meshwright.observe.bench.serving.load_generator import GeneratorStats
from meshwright.observe.bench.serving.openai_protocol import RequestOptions
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.server_probe import ServerInfo
from meshwright.observe.hardware.machine import Machine, count_cores, read_cpu_model

RESULT_FORMAT = "meshwright.bench.serve.result/2"


_MEASURE_AGAIN = "measure again: mw bench serve URL --save-result FILE"


class _Format(msgspec.Struct):
    format: str


class ServingBenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One load that was put on a server."""

    name: str
    """The load in words, such as `4 requests/s`."""
    request_rate: float | None = None
    """Requests per second that were offered; None in a closed loop."""
    max_concurrency: int | None = None
    """Requests kept in flight; None in an open loop."""
    started_unix_s: float
    requests: tuple[RequestResult, ...]
    generator: GeneratorStats
    aborted: bool = False


class ServingBenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A bench of one server."""

    format: str = RESULT_FORMAT
    command: str
    """The command line that repeats it."""
    date: str
    """When it began, in UTC."""
    seed: int
    server: ServerInfo
    request_options: RequestOptions
    machine: Machine
    """Where the load came from; what the server runs on it alone knows."""
    software: dict[str, str]
    runs: tuple[ServingBenchRun, ...]
    interrupted: bool = False
    """Whether somebody ended it before all was sent."""


def describe_client() -> tuple[Machine, dict[str, str]]:
    """Return this machine and the software that makes the load."""
    found = {"python": platform.python_version()}
    for package in ("meshwright", "aiohttp", "uvloop"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return Machine(device=read_cpu_model(), host=read_cpu_model(), cores=count_cores()), found


def utc_now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def save_result(result: ServingBenchResult, path: str) -> None:
    """Write a result; a file that is there is replaced only once the new one is whole."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    make_parent_folder(target)
    try:
        part.write_bytes(msgspec.json.encode(result))
        part.replace(target)
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise InputError([Problem(path, what, "name a file that can be written")]) from None


def load_result(path: str) -> ServingBenchResult:
    """Read a result."""
    fix = "give a file that mw bench serve --save-result FILE wrote"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError([Problem(path, error.strerror or str(error), fix)]) from None
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version != RESULT_FORMAT:
            what = f"has the format {version!r}, not {RESULT_FORMAT!r}"
            raise InputError([Problem(path, what, _MEASURE_AGAIN)])
        return msgspec.json.decode(data, type=ServingBenchResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedFile([Problem(path, f"not a result file: {error}", fix)]) from None
