"""Results as MLPerf's tools read them: lines of `:::MLLOG` and a JSON object.

The fields are those of MLPerf's logging library: namespace, time_ms, event_type, key, value and
metadata. A bench is one run between `run_start` and `run_stop`; a case is a point in it, whose
value is its median time in seconds.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright import __version__
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.hardware.machine import Machine

PREFIX = ":::MLLOG "
NAMESPACE = "meshwright"
Event = Literal["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]


class MlperfLog:
    """A log that grows line by line."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")
        except OSError as fault:
            what = f"cannot write {path}: {fault.strerror or fault}"
            raise InputError([Problem("--mlperf-log", what, "name another file")]) from None

    def start(self, machine: Machine) -> None:
        """Write what is measured, and where."""
        self._line("POINT_IN_TIME", "submission_benchmark", "meshwright_bench")
        self._line("POINT_IN_TIME", "submission_platform", machine.device)
        software = msgspec.to_builtins(machine)
        self._line("POINT_IN_TIME", "meshwright_version", __version__, software)
        self._line("INTERVAL_START", "run_start", None)

    def row(self, row: BenchRow) -> None:
        """Write what came of a case."""
        whole: dict[str, Any] = msgspec.to_builtins(row)
        case = whole.pop("case")
        key = f"{case['family']}_{case['name']}"
        rest = {name: value for name, value in whole.items() if value is not None}
        self._line("POINT_IN_TIME", key, rest.pop("median_s"), {**rest, "sizes": case["sizes"]})

    def stop(self, status: Literal["success", "aborted"]) -> None:
        """Write how it ended."""
        self._line("INTERVAL_END", "run_stop", None, {"status": status})

    def _line(self, event: Event, key: str, value: object, metadata: object = None) -> None:
        # Where a line was written is asked for by readers of MLPerf's logs; all come from here.
        told = {"file": "mlperf_log.py", "lineno": 0, **dict(metadata or {})}  # type: ignore[call-overload]
        line = {
            "namespace": NAMESPACE,
            "time_ms": round(1e3 * self._clock()),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": told,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(PREFIX + json.dumps(line, ensure_ascii=False) + "\n")
