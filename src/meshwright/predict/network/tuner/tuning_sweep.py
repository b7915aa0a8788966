"""Measured sweeps: one time per collective, size, algorithm, protocol and channels.

Reads the training data of the optimizer beside NCCL's example tuner. Sweeps of nccl-tests come
from `nccl_tests`; what to make of a sweep is `tuner_rows`. Sizes follow nccl-tests.
"""

import csv
from collections.abc import Mapping
from typing import get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.nccl_constants import (
    ALGORITHMS,
    PROTOCOLS,
    Algorithm,
    Protocol,
    get_fixed_constants,
)
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.tuner.tuner_csv import CSV_NAMES, TUNED_OPS
from meshwright.spec.field_checks import FieldChecker, check_integer
from meshwright.spec.name_suggestions import format_suggestion
from meshwright.spec.serialization import format_value

REQUIRED_COLUMNS = (
    *("collective", "size_bytes", "algorithm", "protocol", "channels"),
    *("nodes", "ranks", "pipeOps", "regBuff", "latency_us"),
)
"""Columns of the training data that are used; cost_metric and bandwidth_gbps may be beside them."""


class CollectiveTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The time that one call took with an algorithm, a protocol and a number of channels."""

    op: NcclOp
    nbytes: int
    algorithm: Algorithm
    protocol: Protocol
    channels: int
    seconds: float
    nodes: int | None = None
    """None where the source says any."""
    ranks: int | None = None
    pipe_ops: int | None = None
    registered: int | None = None

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("op", self.op, TUNED_OPS)
        bounds.one_of("algorithm", self.algorithm, get_args(Algorithm))
        bounds.one_of("protocol", self.protocol, get_args(Protocol))
        bounds.count(0, nbytes=self.nbytes, pipe_ops=self.pipe_ops)
        bounds.count(1, nodes=self.nodes, ranks=self.ranks)
        bounds.problems += check_integer(
            "channels", self.channels, 1, get_fixed_constants().max_channels
        )
        bounds.positive(seconds=self.seconds)
        if self.registered not in (None, 0, 1):
            bounds.add("registered", f"{self.registered} is not 0 or 1", "use 0, 1 or None")
        bounds.raise_problems()


def read_training_csv(text: str, where: str = "sweep") -> tuple[CollectiveTiming, ...]:
    """Return the rows of the optimizer's training data; `latency_us` is the time of a call."""
    lines = text.splitlines()
    numbered = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not numbered:
        raise InputError(
            [Problem(where, "holds no row", f"begin it with {','.join(REQUIRED_COLUMNS)}")]
        )
    heading, *rest = numbered
    names = [cell.strip() for cell in heading[1].split(",")]
    missing = [name for name in REQUIRED_COLUMNS if name not in names]
    if missing:
        what = f"the heading has no {', '.join(missing)}"
        fix = "name the columns as the tuner's optimizer does: " + ",".join(REQUIRED_COLUMNS)
        raise InputError([Problem(f"{where}: line {heading[0]}", what, fix)])
    problems: list[Problem] = []
    found: list[CollectiveTiming] = []
    for (number, _), cells in zip(rest, csv.reader(line for _, line in rest), strict=True):
        place = f"{where}: line {number}"
        if len(cells) != len(names):
            what = f"{len(cells)} columns, where the heading has {len(names)}"
            problems.append(Problem(place, what, "write one cell for each column"))
            continue
        row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        measured, faults = _measurement(row, place)
        problems += faults
        found += [measured] if measured is not None else []
    if problems:
        raise InputError(problems)
    return tuple(found)


def _measurement(
    row: Mapping[str, str], place: str
) -> tuple[CollectiveTiming | None, list[Problem]]:
    problems: list[Problem] = []
    ops = {name: op for op, name in CSV_NAMES.items()}
    for column, known in (
        ("collective", tuple(ops)),
        ("algorithm", ALGORITHMS),
        ("protocol", PROTOCOLS),
    ):
        if row[column] not in known:
            what = f"{column} {format_value(row[column])} is not known"
            problems.append(Problem(place, what, format_suggestion(row[column], known)))
    numbers: dict[str, float] = {}
    for column in REQUIRED_COLUMNS:
        if column in ("collective", "algorithm", "protocol"):
            continue
        try:
            text = row[column]
            numbers[column] = float(text) if column == "latency_us" else int(text)
        except ValueError:
            what = f"{column} {format_value(row[column])} is not a number"
            problems.append(Problem(place, what, "write digits alone"))
    if numbers.get("channels") == -1:
        what = "channels -1 does not say how many were used"
        fix = "measure with NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS set, and write their value"
        problems.append(Problem(place, what, fix))
    if problems:
        return None, problems
    any_of = {
        name: None if numbers[column] == -1 else int(numbers[column])
        for name, column in (
            ("nodes", "nodes"),
            ("ranks", "ranks"),
            ("pipe_ops", "pipeOps"),
            ("registered", "regBuff"),
        )
    }
    try:
        return CollectiveTiming(
            op=ops[row["collective"]],
            nbytes=int(numbers["size_bytes"]),
            algorithm=row["algorithm"],  # type: ignore[arg-type]
            protocol=row["protocol"],  # type: ignore[arg-type]
            channels=int(numbers["channels"]),
            seconds=numbers["latency_us"] * 1e-6,
            **any_of,
        ), []
    except InputError as error:
        return None, [Problem(place, f"{p.where}: {p.what}", p.fix) for p in error.problems]
