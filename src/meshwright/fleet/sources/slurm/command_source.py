"""Slurm's own commands on this machine, asked for what is new."""

import io
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.fleet.sources.slurm.formats.sacct import FIELDS, read_sacct
from meshwright.fleet.sources.slurm.formats.scontrol import iter_blocks
from meshwright.fleet.sources.slurm.snapshot import SlurmSnapshot, split_batches
from meshwright.fleet.sources.slurm.tables import nodes
from meshwright.fleet.sources.slurm.tables.allocations import (
    SlurmAllocation,
    build_allocation_rows,
    read_prolog_log,
)
from meshwright.fleet.sources.source import RowBatch, SourceOptions

OVERLAP_S: Final = 3600.0
"""So much before the last look is asked for again: slurmdbd writes late."""
_WINDOW_S: Final = 7 * 86400.0
"""Of accounting at once: a question about years is more than some databases answer."""
_CHUNK: Final = 1000
"""Jobs named in one call."""
_EVENTS: Final = "format=Cluster,NodeName,Start,End,State,Reason,TRES"


class SlurmCommandSource:
    """A source that runs `sacct`, `scontrol` and `sacctmgr`, all of which only read."""

    def __init__(
        self, asked: SourceOptions, renames: Mapping[str, str], gpu_map: str = "",
        overlap_s: float = OVERLAP_S, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._asked, self._renames, self._gpu_map = asked, renames, gpu_map
        self._overlap_s = overlap_s
        # Times are printed in the zone of whoever asks: no zone is without folds but this.
        self._environment = {**(os.environ if environment is None else environment), "TZ": "UTC"}
        self._environment.pop("SLURM_TIME_FORMAT", None)
        missing = [name for name in ("sacct", "scontrol") if not self._which(name)]
        if missing:
            raise MissingDependency(
                f"{' and '.join(missing)} cannot be found on this machine",
                "run where Slurm's commands are, or name a folder of what they printed",
            )

    @property
    def name(self) -> str:
        """What it is; Slurm's settings say where."""
        return f"slurm://{self._asked.cluster}"

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give what changed since the cursor, and whatever had not ended by then."""
        state = _state(cursor)
        now = time.time()
        since = self._asked.since_s or 0.0
        if state["until_s"]:
            since = max(0.0, state["until_s"] - self._overlap_s)
        reading = self._reading()
        for end in _windows(since, self._asked.until_s or now):
            # A long past is read piece by piece, each of which is kept once it is read.
            reading.accounting_jobs.append(self._accounting(since, end, [], reading))
            past = json.dumps({**state, "until_s": end})
            yield from split_batches(reading.build_rows(now), self._asked, past, reading.notes)
            since, reading = end, self._reading()
        reading.accounting_jobs.append(
            self._accounting(since, self._asked.until_s, state["open"], reading)
        )
        reading.add_blocks(list(iter_blocks(self._run("scontrol", "-d", "show", "job"))))
        reading.add_blocks(list(iter_blocks(self._run("scontrol", "-d", "show", "node"))))
        self._node_events(reading)
        if self._gpu_map:
            reading.prolog_allocations += _map(self._gpu_map)
        tables = reading.build_rows(now)
        held = [] if self._gpu_map else self._still_held(tables, state["allocations"], now)
        fresh = json.dumps(
            {
                "until_s": min(now, self._asked.until_s or now),
                "open": _open(tables.get("jobs")),
                "allocations": held,
            }
        )
        yield from split_batches(tables, self._asked, fresh, reading.notes)

    def _reading(self) -> SlurmSnapshot:
        """Begin a reading, with what the cluster is called and whether it counts GPUs."""
        reading = SlurmSnapshot("UTC", self._renames, cluster_alias=self._asked.cluster)
        told = dict(
            re.findall(
                r"(?m)^(ClusterName|AccountingStorageTRES)\s*=\s*(.*?)\s*$",
                self._run("scontrol", "show", "config"),
            )
        )
        reading.cluster = told.get("ClusterName", "") or reading.cluster
        if "AccountingStorageTRES" in told:
            reading.tracks_gpus = "gres/gpu" in told["AccountingStorageTRES"]
        return reading

    def _accounting(
        self, since_s: float, until_s: float | None, open_ones: list[str], reading: SlurmSnapshot
    ) -> pa.Table:
        """Ask for all records in a window, and for jobs that had not ended when last asked."""
        told = self._run("sacct", "-e").split()
        fields = [name for name in FIELDS if name in told]
        window = ["-S", _utc(since_s)]
        if until_s is not None:
            window += ["-E", _utc(until_s)]
        if "Restarts" in fields or since_s <= 0.0:
            first = self._sacct(fields, window, reading)
            seen = set(pc.unique(first["scheduler_id"]).to_pylist())
            ask = [number for number in open_ones if number not in seen]
            more = self._sacct_of(fields, ask, reading)
            return pa.concat_tables([first, *more])
        # Without a count of restarts an attempt is known by those before it: ask for all of them.
        listed = self._sacct(["JobIDRaw", "State"], [*window, "-X"], reading)
        ask = list(dict.fromkeys([*pc.unique(listed["scheduler_id"]).to_pylist(), *open_ones]))
        return pa.concat_tables([listed.slice(0, 0), *self._sacct_of(fields, ask, reading)])

    def _sacct_of(
        self, fields: list[str], jobs: list[str], reading: SlurmSnapshot
    ) -> list[pa.Table]:
        return [
            self._sacct(
                fields, ["-S", _utc(0.0), "-j", ",".join(jobs[start : start + _CHUNK])], reading
            )
            for start in range(0, len(jobs), _CHUNK)
        ]

    def _sacct(self, fields: list[str], which: list[str], reading: SlurmSnapshot) -> pa.Table:
        command = ["sacct", "-a", "-D", "-P", "--delimiter=\x1f", "-o", ",".join(fields), *which]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                command, env=self._environment, stdout=subprocess.PIPE, stderr=errors
            ) as running,
        ):
            # Years of history are read while they come.
            assert running.stdout is not None
            fault: InputError | None = None
            try:
                records, notes = read_sacct(cast(BinaryIO, running.stdout), "sacct", "UTC")
            except InputError as error:
                fault = error
            code = running.wait()
            errors.seek(0)
            if code or fault:
                raise _failed(command, code, errors.read()) from fault
        reading.notes += notes
        return records

    def _node_events(self, reading: SlurmSnapshot) -> None:
        boots = [node.boot_s for node in reading.node_states if node.boot_s]
        if not boots or not self._which("sacctmgr"):
            return
        try:
            text = self._run_bytes(
                "sacctmgr", "-P", "show", "event", f"start={_utc(min(boots))}", _EVENTS
            )
        except InputError:
            reading.notes.append(
                "sacctmgr may not be asked for events: nodes are told as they are now"
            )
            return
        reading.node_events += nodes.read_events(io.BytesIO(text), "sacctmgr show event", "", "UTC")

    def _still_held(
        self, tables: dict[str, pa.Table], before: list[list[Any]], now: float
    ) -> list[list[Any]]:
        """End the holds of jobs that have ended, whose GPUs the controller has forgotten.

        Returns those that have not, as far as anybody has heard.
        """
        allocations = _holds(tables.get("allocations"))
        if not before or "jobs" not in tables:
            return [*allocations, *before]
        columns = (
            tables["jobs"][name].to_pylist() for name in ("cluster", "job", "attempt", "end_s")
        )
        ends = {tuple(row[:3]): row[3] for row in zip(*columns, strict=True)}
        there = {tuple(row) for row in allocations}
        gone = [row for row in before if tuple(row) not in there]
        done = [
            SlurmAllocation(
                cluster, job, attempt, node, {gpu: share}, start, ends[cluster, job, attempt]
            )
            for cluster, job, attempt, node, gpu, share, start in gone
            if ends.get((cluster, job, attempt)) is not None
        ]
        if done:
            known = [tables["allocations"]] if "allocations" in tables else []
            tables["allocations"] = pa.concat_tables([*known, build_allocation_rows(done, now)])
        return [*allocations, *(row for row in gone if ends.get(tuple(row[:3])) is None)]

    def _run(self, *command: str) -> str:
        return self._run_bytes(*command).decode(errors="replace")

    def _run_bytes(self, *command: str) -> bytes:
        done = subprocess.run(command, env=self._environment, capture_output=True, check=False)
        if done.returncode and not done.stdout.strip():
            raise _failed(command, done.returncode, done.stderr)
        return done.stdout

    def _which(self, name: str) -> str | None:
        return shutil.which(name, path=self._environment.get("PATH"))


def _failed(command: Sequence[str], code: int, errors: bytes) -> InputError:
    why = errors.decode(errors="replace").strip().splitlines()
    what = f"failed: {why[-1] if why else f'exit code {code}'}"
    return InputError([Problem(" ".join(command[:3]), what, "see that Slurm answers: sinfo")])


def _utc(moment_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(max(0.0, moment_s)))


def _windows(since_s: float, until_s: float) -> Iterator[float]:
    """Give the ends of all windows but the last; all of the past at once where none is named."""
    end = since_s + _WINDOW_S
    while since_s > 0.0 and end < until_s:
        yield end
        end += _WINDOW_S


def _state(cursor: str | None) -> dict[str, Any]:
    told = json.loads(cursor) if cursor else {}
    return {"until_s": 0.0, "open": [], "allocations": [], **told}


def _open(jobs: pa.Table | None) -> list[str]:
    """Return the numbers of jobs that have not ended."""
    if jobs is None:
        return []
    still = pc.is_in(jobs["state"], value_set=pa.array(["pending", "running"]))
    return sorted(set(jobs.filter(still)["scheduler_id"].to_pylist()))


def _holds(allocations: pa.Table | None) -> list[list[Any]]:
    if allocations is None:
        return []
    names = ["cluster", "job", "attempt", "node", "gpu", "gpu_fraction", "start_s"]
    still = allocations.filter(pc.is_null(allocations["end_s"]))
    return [[row[name] for name in names] for row in still.to_pylist()]


def _map(path: str) -> Iterable[SlurmAllocation]:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            return read_prolog_log(lines, "")
    except OSError as error:
        fix = "name the log that the prolog writes"
        raise InputError([Problem(path, f"cannot read: {error.strerror}", fix)]) from error
