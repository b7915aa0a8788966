"""Read what nccl-tests prints: `all_reduce_perf` and its siblings, any version.

Columns are found by the heading, so tables with and without redop, root, per-iteration times or
timestamps read alike; lines that are none of the table's (NCCL's own log) are passed over. Format:
NVIDIA/nccl-tests 2.19.6, src/util.cu. The text does not name the algorithm: `to_tuning_sweep` is
told.
"""

import re
from collections.abc import Iterable

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.predict.network.nccl_constants import Algorithm, Protocol
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.tuner.tuner_csv import TUNED_OPS
from meshwright.predict.network.tuner.tuning_sweep import CollectiveTiming
from meshwright.spec.serialization import format_value

PROGRAMS: dict[str, NcclOp] = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send_recv",
}
"""Programs whose collective has a name here; others (gather, scatter, hypercube) have none."""
_PROGRAM = re.compile(r"\b([a-z_]+_perf)(?:_mpi)?\b")
# Launchers mark whose line it is: mpirun --tag-output, srun --label.
_LAUNCHER = re.compile(r"\[\d+,\d+\]<std(?:out|err)>:|\s*\d+: ")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")


class PerfTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One half of a row: out of place or in place."""

    seconds: float
    algbw_bytes_per_s: float
    """Size over time."""
    busbw_bytes_per_s: float
    """The same, comparable between numbers of ranks."""
    wrong: int | None
    """Elements with wrong results; None where they were not checked."""


class PerfRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    nbytes: int
    """The larger of what a rank sends and receives."""
    count: int
    """Elements."""
    dtype: str
    redop: str
    """Empty or `none` for collectives that reduce nothing."""
    root: int | None
    """None where the collective has none."""
    out_of_place: PerfTiming | None
    in_place: PerfTiming | None


class PerfRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one program."""

    op: NcclOp | None
    """None where the text does not name a program that is known."""
    ranks: int | None
    """None where the text lists no devices."""
    nodes: int | None
    """Hosts of the devices."""
    rows: tuple[PerfRow, ...]


def read_nccl_tests(text: str, where: str = "nccl-tests") -> PerfRun:
    """Return the table of one run with what its head says of the group."""
    problems: list[Problem] = []
    heading: list[str] = []
    rows: list[PerfRow] = []
    hosts: dict[int, str] = {}
    op: NcclOp | None = None
    for number, whole in enumerate(text.splitlines(), 1):
        place = f"{where}: line {number}"
        line = _LAUNCHER.sub("", whole, count=1) if _LAUNCHER.match(whole) else whole
        named = _PROGRAM.search(line) if op is None else None
        op = PROGRAMS.get(named[1]) if named else op
        if rank := _RANK.match(line.strip()):
            if int(rank[1]) in hosts:
                what = f"rank {int(rank[1])} is listed twice"
                fix = "give one run; if it was one, build nccl-tests with MPI=1"
                problems.append(Problem(place, what, fix))
            hosts[int(rank[1])] = rank[2]
        cells = line.split()
        if cells[:3] == ["#", "size", "count"]:
            heading = cells[1:]
        elif heading and len(cells) > 2 and cells[0].isdecimal() and cells[1].isdecimal():
            try:
                rows.append(_row(heading, cells))
            except ValueError as error:
                what = f"the row cannot be read: {error}"
                problems.append(Problem(place, what, "give the program's output unchanged"))
    if not rows and not problems:
        fix = "give what the program printed, with the line of column names"
        problems.append(Problem(where, "holds no table of nccl-tests", fix))
    if op is not None and hosts and not problems:
        problems += _other_program(op, len(hosts), rows, where)
    if problems:
        raise InputError(problems)
    return PerfRun(
        op=op,
        ranks=len(hosts) or None,
        nodes=len(set(hosts.values())) or None,
        rows=tuple(rows),
    )


def _other_program(op: NcclOp, ranks: int, rows: Iterable[PerfRow], where: str) -> list[Problem]:
    """Say that a table cannot be of the program that the text names, from its bus bandwidth.

    Texts pasted together from several runs show one program's name over another one's table.
    """
    timings = [row.out_of_place for row in rows if row.out_of_place is not None]
    largest = max(timings, key=lambda timing: timing.algbw_bytes_per_s, default=None)
    # Below 1 GB/s the two printed digits say too little.
    if largest is None or largest.algbw_bytes_per_s < 1e9:
        return []
    shown_factor = largest.busbw_bytes_per_s / largest.algbw_bytes_per_s
    if abs(shown_factor / bus_factor(op, ranks) - 1) < 0.02:
        return []
    what = (
        f"busbw is {shown_factor:.2f} of algbw, but {op} over {ranks} ranks has "
        f"{bus_factor(op, ranks):.2f}: the table is another program's"
    )
    return [Problem(where, what, "give the output of one run, from its first line on")]


def to_tuning_sweep(
    runs: Iterable[PerfRun],
    *,
    algorithm: Algorithm,
    protocol: Protocol,
    channels: int,
    op: NcclOp | None = None,
    nodes: int | None = None,
    ranks: int | None = None,
) -> tuple[CollectiveTiming, ...]:
    """Return the times of runs with this algorithm, protocol and number of channels.

    They are what the runs were given as NCCL_ALGO, NCCL_PROTO, NCCL_MIN_NCHANNELS and
    NCCL_MAX_NCHANNELS. `op`, `nodes` and `ranks` stand in for what a text does not say. Times are
    those out of place, or in place where there is no other.
    """
    problems: list[Problem] = []
    found: list[CollectiveTiming] = []
    for index, run in enumerate(runs):
        where = f"runs[{index}]"
        shape = (run.op or op, run.nodes or nodes, run.ranks or ranks)
        for name, value in zip(("op", "nodes", "ranks"), shape, strict=True):
            if value is None:
                problems.append(Problem(where, f"the text does not say {name}", f"give {name}"))
        if shape[0] is not None and shape[0] not in TUNED_OPS:
            what = f"NCCL has no choice of algorithm for {shape[0]}"
            problems.append(Problem(where, what, "leave the run out"))
        for row in run.rows:
            timing = row.out_of_place or row.in_place
            if timing is None or not timing.seconds > 0:
                continue
            if timing.wrong:
                what = f"{timing.wrong} wrong elements at {row.nbytes} bytes"
                problems.append(Problem(where, what, "do not tune by a run with wrong results"))
            if not problems:
                assert shape[0] is not None
                found.append(
                    CollectiveTiming(
                        op=shape[0],
                        nbytes=row.nbytes,
                        algorithm=algorithm,
                        protocol=protocol,
                        channels=channels,
                        seconds=timing.seconds,
                        nodes=shape[1],
                        ranks=shape[2],
                    )
                )
    if problems:
        raise InputError(problems)
    return tuple(found)


def _row(heading: list[str], cells: list[str]) -> PerfRow:
    """Pair cells with the columns above them; timestamps at the end have none."""
    names = [name for name in heading if name != "timestamp"]
    if len(cells) < len(names):
        raise ValueError(f"{len(cells)} columns where the heading has {len(names)}")
    starts = [index for index, name in enumerate(names) if name in ("time", "cputime")]
    if not starts:
        raise ValueError("the heading has no time")
    facts = dict(zip(names[: starts[0]], cells, strict=False))
    halves = [
        dict(zip(names[start:end], cells[start:end], strict=True))
        for start, end in zip(starts, [*starts[1:], len(names)], strict=True)
    ]
    root = facts.get("root", "-1")
    timings = [_timing(half) for half in halves[:2]]
    return PerfRow(
        nbytes=int(facts["size"]),
        count=int(facts["count"]),
        dtype=facts.get("type", ""),
        redop=facts.get("redop", ""),
        root=None if int(root) < 0 else int(root),
        out_of_place=timings[0],
        in_place=timings[1] if len(timings) > 1 else None,
    )


def _timing(half: dict[str, str]) -> PerfTiming | None:
    first = next(iter(half))
    # Older programs print an error, such as 0e+00, in the place of the count.
    wrong = half.get("#wrong", half.get("error", "N/A"))
    if half[first] == "N/A":
        return None
    numbers = [float(half[name]) for name in (first, "algbw", "busbw")]
    if not all(0 <= number < float("inf") for number in numbers):
        raise ValueError(f"{format_value(half[first])} µs is not a time")
    return PerfTiming(
        seconds=numbers[0] * 1e-6,
        algbw_bytes_per_s=numbers[1] * 1e9,
        busbw_bytes_per_s=numbers[2] * 1e9,
        wrong=None if wrong == "N/A" or "#wrong" not in half else int(float(wrong)),
    )
