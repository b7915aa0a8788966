"""Which of the paths that `mw analyze` is given are no timelines, yet tell something."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.nccl_log import read_nccl_log
from meshwright.timeline.readers.trace_formats import FORMATS
from meshwright.timeline.readers.traces import TraceFile, find_traces

_LOGS = frozenset({"nccl log"})
_GRAPHS = frozenset({"execution trace", "chakra"})
_TIMELINES = frozenset(one.name for one in FORMATS if one.reader) - _GRAPHS


def files_of(paths: Sequence[str]) -> tuple[str, list[Path]]:
    """What the paths hold: `nccl log` or `execution trace` with the files, or nothing.

    A folder with timelines among its files is one of timelines.
    """
    found = [file for path in paths for file in _found(path)]
    names = {file.format for file in found}
    for kind, those in (("nccl log", _LOGS), ("execution trace", _GRAPHS)):
        if names & those and not names & _TIMELINES and not names & (_LOGS | _GRAPHS) - those:
            return kind, [file.path for file in found if file.format in those]
    if len(paths) > 1:
        what = f"are several paths, of: {', '.join(sorted(names))}"
        fix = "give one trace, one folder of ranks, or only logs of NCCL's or execution traces"
        raise InputError([Problem(" ".join(paths), what, fix)])
    return "", []


def _found(path: str) -> tuple[TraceFile, ...]:
    try:
        return find_traces(path)
    except InputError:
        # A job may print much before NCCL does: then only the whole file tells.
        if not Path(path).is_file() or not _is_log(Path(path)):
            raise
        return (TraceFile(Path(path), "nccl log", 0),)


def _is_log(path: Path) -> bool:
    try:
        read_nccl_log(path)
    except DamagedFile:
        return True
    except InputError:
        return False
    return True
