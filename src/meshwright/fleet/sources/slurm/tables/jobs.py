"""Records of Slurm's to rows of the table of jobs."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.sources.slurm.formats.hostlist import expand_hostlist
from meshwright.fleet.sources.slurm.formats.states import FINISHED_STATES, parse_job_state
from meshwright.fleet.sources.slurm.formats.text_columns import (
    Floats,
    combine_chunks,
    parse_distinct,
    to_arrow,
    to_floats,
)
from meshwright.fleet.sources.slurm.formats.tres import parse_gres_gpus, parse_req_mem, parse_tres
from meshwright.fleet.sources.slurm.tables.attempts import (
    expand_elements,
    fill_from_parents,
    number_attempts,
)
from meshwright.fleet.sources.slurm.tables.steps import JobsWithStepTotals, fold_steps
from meshwright.fleet.sources.source import make_rows

_NUMBER, _TEXT = pa.float64(), pa.string()
_SAT_AT = re.compile(
    r"^(?:interactive|bash|zsh|tcsh|sh|code-server|_interactive)$|jupyter|notebook|rstudio|vscode"
    r"|^sys/dashboard|^ondemand",
    re.IGNORECASE,
)
_EXIT = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_SHELL = re.compile(r"(?:^|/|\s)salloc\b|\bsrun\b.*\s--pty\b|(?:^|/|\s)sinteractive\b")


class SlurmJobRows(NamedTuple):
    """Rows of jobs, and what could not be told."""

    rows: pa.Table
    notes: tuple[str, ...]


def build_job_rows(
    records: pa.Table,
    seen_s: float,
    cluster: str = "",
    renames: Mapping[str, str] = {},
    counts_gpus: bool | None = None,
) -> SlurmJobRows:
    """Return the rows that records of jobs and their steps come to.

    `cluster` names those whose records do not; `renames` gives nodes the names they have now;
    `counts_gpus` says whether the accounting counts GPUs at all, which otherwise the records show.
    """
    if records["id"].null_count:  # a damaged line may lack even that
        records = records.filter(pc.is_valid(records["id"]))
    folded = fold_steps(records)
    jobs = folded.jobs
    given, asked = _resources(jobs["alloc"]), _resources(jobs["req"])
    if counts_gpus is None:
        counts_gpus = _mentions_gpus(jobs)
    (state,) = parse_distinct(
        jobs["state"].fill_null(""), lambda text: (parse_job_state(text),), [_TEXT]
    )
    ended = np.array(pc.is_in(state, value_set=pa.array(sorted(FINISHED_STATES))))
    gpus, kind = _gpus(jobs, given, asked, counts_gpus)
    times = _times(jobs, np.array(state), ended)
    code, sign = parse_distinct(jobs["exit"].fill_null(""), _exit, [pa.int32(), pa.int32()])
    nodes = _first(given.nodes, asked.nodes, _counted(jobs["num_nodes"]))
    cpus = _first(given.cpus, _counted(jobs["cpus"]), asked.cpus)
    over = pa.array(ended)
    columns: dict[str, Any] = {
        "cluster": jobs["cluster"].fill_null(cluster or "slurm"),
        "scheduler_id": pc.coalesce(jobs["scheduler_id"], jobs["id"]),
        **{name: jobs[name] for name in ("name", "user", "team", "partition", "qos")},
        "state": state,
        "exit_code": pc.if_else(over, code, None),
        "signal": pc.if_else(over, sign, None),
        "reason": _reason(jobs),
        "interactive": _interactive(jobs, folded),
        "workload": _work(jobs["wckey"]),
        **{name: to_arrow(values) for name, values in times.items()},
        "time_limit_s": jobs["time_limit_s"],
        "gpus": to_arrow(gpus),
        "gpu_kind": kind,
        "num_nodes": pc.cast(to_arrow(nodes), pa.int32(), safe=False),
        "nodes": _nodes(jobs["nodelist"], renames),
        "cpus": to_arrow(cpus),
        "memory_requested": to_arrow(_memory(jobs, given, asked, nodes, cpus)),
        "memory_peak": to_arrow(folded.peak_memory_bytes),
        "cpu_s": to_arrow(np.where(ended, _cpu(jobs, folded), np.nan)),
        "gpu_util": to_arrow(folded.gpu_util),
        "gpu_memory_peak": to_arrow(folded.peak_gpu_memory_bytes),
    }
    return _numbered(jobs, columns, seen_s)


def _numbered(jobs: pa.Table, columns: dict[str, Any], seen_s: float) -> SlurmJobRows:
    """Spread arrays, number attempts, and put everything into the table's order."""
    source, names, cut = expand_elements(jobs)
    table = pa.table({name: combine_chunks(column) for name, column in columns.items()})
    if len(source) != len(jobs):
        jobs, table = jobs.take(source), table.take(source)
    restarts = to_floats(jobs["restarts"])
    ended = np.array(pc.is_in(table["state"], value_set=pa.array(sorted(FINISHED_STATES))))
    found = number_attempts(table["cluster"].combine_chunks(), names, table, restarts, ended)
    table, names = fill_from_parents(table, found), names.take(pa.array(found.rows))
    array = pc.struct_field(pc.extract_regex(names, r"^(?P<array>\d+)_"), "array")
    rows = make_rows(
        "jobs",
        {
            **{name: table[name] for name in table.column_names},
            "job": names,
            "attempt": pa.array(found.attempt, pa.int32()),
            "array": array,
            "seen_s": pa.array(np.full(len(names), seen_s)),
        },
    )
    notes = (f"{cut} arrays list only their first elements that wait; they are one row each",)
    return SlurmJobRows(rows, notes if cut else ())


class _Resources(NamedTuple):
    cpus: Floats
    memory: Floats
    nodes: Floats
    gpus: Floats
    kind: pa.Array
    told: npt.NDArray[np.bool_]


def _resources(text: pa.ChunkedArray) -> _Resources:
    text = text.fill_null("")
    columns = parse_distinct(text, parse_tres, [_NUMBER, _NUMBER, _NUMBER, _NUMBER, _TEXT])
    cpus, memory, nodes, gpus = (to_floats(column) for column in columns[:4])
    return _Resources(cpus, memory, nodes, gpus, columns[4], np.array(pc.not_equal(text, "")))


def _mentions_gpus(jobs: pa.Table) -> bool:
    return any(
        bool(pc.any(pc.match_substring(jobs[name].fill_null(""), "gres/gpu")).as_py())
        for name in ("alloc", "req")
    )


def _gpus(
    jobs: pa.Table, given: _Resources, asked: _Resources, counted: bool
) -> tuple[Floats, pa.Array]:
    """Count the GPUs that were given, or asked for while none were; null where nobody counts."""
    gpus = np.where(given.told, given.gpus, asked.gpus)
    if not counted:
        gpus = np.where(gpus == 0, np.nan, gpus)
    gres, gres_kind = parse_distinct(jobs["gres"].fill_null(""), parse_gres_gpus, [_NUMBER, _TEXT])
    more = to_floats(gres)
    gpus = np.where(np.nan_to_num(gpus) == 0, np.where(np.isnan(more), gpus, more), gpus)
    hint = jobs["gpu_kind"].combine_chunks()
    return gpus, pc.coalesce(given.kind, asked.kind, gres_kind, hint)


def _times(
    jobs: pa.Table, state: npt.NDArray[Any], ended: npt.NDArray[np.bool_]
) -> dict[str, Floats]:
    start, end = to_floats(jobs["start_s"]), to_floats(jobs["end_s"])
    # What waits shows when it is expected to start, what runs when its limit ends.
    waits = state == "pending"
    never = np.array(
        pc.and_(
            pc.equal(jobs["alloc"].fill_null(""), ""),
            pc.is_in(jobs["nodelist"], value_set=pa.array(["None assigned", "(null)", ""])),
        )
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        never &= ~(end > start)  # cancelled before it ran: older Slurms call its end its start
    return {
        "submit_s": to_floats(jobs["submit_s"]),
        "eligible_s": to_floats(jobs["eligible_s"]),
        "start_s": np.where(waits | never, np.nan, start),
        "end_s": np.where(ended | (state == "unknown"), end, np.nan),
    }


def _exit(text: str) -> tuple[int | None, int | None]:
    found = _EXIT.fullmatch(text)
    return (int(found[1]), int(found[2] or 0)) if found else (None, None)


def _counted(column: pa.ChunkedArray) -> Floats:
    values = to_floats(column)
    return np.where(values == 0, np.nan, values)


def _first(*choices: Floats) -> Floats:
    result = choices[0]
    for other in choices[1:]:
        result = np.where(np.isnan(result), other, result)
    return result


def _memory(
    jobs: pa.Table, given: _Resources, asked: _Resources, nodes: Floats, cpus: Floats
) -> Floats:
    # To ask for nothing in particular (`--mem=0`) is to ask for all there is on the node.
    memory = _first(np.where(asked.memory > 0, asked.memory, np.nan), given.memory)
    missing = np.flatnonzero(np.isnan(memory) & np.array(pc.is_valid(jobs["req_mem"])))
    if len(missing):
        texts = jobs["req_mem"].take(missing).to_pylist()
        told = [
            parse_req_mem(text, nodes[row], cpus[row])
            for text, row in zip(texts, missing.tolist(), strict=True)
        ]
        memory[missing] = np.array(told, dtype=np.float64)
    return memory


def _cpu(jobs: pa.Table, folded: JobsWithStepTotals) -> Floats:
    own = to_floats(jobs["cpu_s"])
    return np.where(np.nan_to_num(own) > 0, own, _first(folded.cpu_s, own))


def _reason(jobs: pa.Table) -> pa.Array:
    """Say why a job waits or ended: Slurm's reason, the node that failed, or who cancelled it."""
    nothing = pa.scalar(None, _TEXT)
    reason = jobs["reason"].combine_chunks()
    reason = pc.if_else(
        pc.is_in(reason, value_set=pa.array(["None", "", "(null)"])), nothing, reason
    )
    node = pc.if_else(pc.equal(jobs["failed_node"], ""), nothing, jobs["failed_node"])
    failed = pc.binary_join_element_wise("node failed: ", node, "")
    users = _users(jobs)
    (who,) = parse_distinct(
        jobs["by"].fill_null(""), lambda by: (users.get(by, by) or None,), [_TEXT]
    )
    cancelled = pc.binary_join_element_wise("cancelled by ", who, "")
    return combine_chunks(pc.coalesce(failed, cancelled, reason))


def _users(jobs: pa.Table) -> dict[str, str]:
    """Return the names of the users by number, as far as the records tell them."""
    pairs = jobs.select(["uid", "user"]).group_by(["uid", "user"]).aggregate([]).to_pylist()
    known = {row["uid"]: row["user"] for row in pairs if row["uid"] and row["user"]}
    return {"0": "root", **known}


def _interactive(jobs: pa.Table, folded: JobsWithStepTotals) -> pa.Array:
    (named,) = parse_distinct(
        jobs["name"].fill_null(""), lambda name: (bool(_SAT_AT.search(name)),), [pa.bool_()]
    )
    line = jobs["submit_line"].combine_chunks()
    typed = pc.match_substring_regex(line.fill_null(""), _SHELL.pattern)
    sat = np.array(named) | np.array(typed) | folded.has_interactive_step
    known = sat | folded.has_batch_step | np.array(pc.is_valid(line))
    return pa.array(sat, pa.bool_(), mask=~known)


def _work(wckey: pa.ChunkedArray) -> pa.Array:
    """Return what work a job is, by the key people gave; Slurm marks its own guess with a star."""
    text = pc.utf8_ltrim(combine_chunks(wckey), characters="*")
    return pc.if_else(
        pc.is_in(text, value_set=pa.array(["", "(null)"])), pa.scalar(None, _TEXT), text
    )


def _nodes(nodelist: pa.ChunkedArray, renames: Mapping[str, str]) -> pa.Array:
    def read(text: str) -> tuple[list[str] | None]:
        return ([renames.get(name, name) for name in expand_hostlist(text)] or None,)

    (nodes,) = parse_distinct(nodelist.fill_null(""), read, [pa.list_(_TEXT)])
    return nodes
