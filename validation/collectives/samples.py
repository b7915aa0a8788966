"""Measured rows with everything about them that the fitted constants do not change."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple, cast

import msgspec

from meshwright.predict.network.collective_cost import OPS
from meshwright.predict.network.cost_curve import (
    NcclChoice,
    compute_choice_costs,
    join_segments,
    list_nccl_choices,
)
from meshwright.predict.network.link_corrections import LinkCorrection, get_link_kinds
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.wire_bound import bound_s_per_byte
from meshwright.predict.validation.collectives import Row, ScoredCollective, read_system
from meshwright.predict.validation.collectives.collective_score import fabric_name
from meshwright.predict.validation.collectives.row_prediction import (
    get_allowed_algorithms,
    get_nccl_version,
)

Table = Mapping[str, LinkCorrection]


class Sample(NamedTuple):
    """One measured row."""

    number: int
    """Its place among the samples."""
    scored: ScoredCollective
    system: str
    source: str
    """The page's site, owner and repository."""
    kind: str
    place: Placement
    op: NcclOp
    nccl: str
    nbytes: float
    seconds: float
    choices: tuple[NcclChoice, ...]
    """What NCCL takes, by size."""
    taken: tuple[NcclChoice, ...]
    """What NCCL takes for this size."""
    weight: float


def samples(rows: Sequence[Row], scored: Sequence[ScoredCollective]) -> list[Sample]:
    """Return the rows that can be fitted; a system weighs the root of its number of rows."""
    usable = [item for item in scored if item.error is not None and item.collective in OPS]
    count = Counter(item.system for item in usable)
    return [
        _sample(number, rows[item.row], item, 1 / sqrt(count[item.system]))
        for number, item in enumerate(usable)
    ]


def _sample(number: int, row: Row, item: ScoredCollective, weight: float) -> Sample:
    place, op = read_system(row).placement, cast(NcclOp, item.collective)
    assert item.size_bytes is not None
    assert item.measured_us is not None
    found = tuple(
        list_nccl_choices(place, op, get_nccl_version(row), False, get_allowed_algorithms(row))
    )
    return Sample(
        number=number,
        scored=item,
        system=item.system,
        source="/".join(str(row.get("source")).split("/")[2:5]),
        kind=fabric_name(place),
        place=place,
        op=op,
        nccl=get_nccl_version(row),
        nbytes=float(item.size_bytes),
        seconds=item.measured_us * 1e-6,
        choices=found,
        taken=tuple([choice for choice in found if choice.start_bytes <= item.size_bytes][-1:]),
        weight=weight,
    )


def price_s(sample: Sample, table: Table) -> float:
    """Return the time of a sample under some constants, as its own choice alone prices it."""
    raw = compute_choice_costs(
        sample.taken, sample.place, sample.op, sample.nccl, _links(sample, table)
    )
    price = [part for part in raw if part[0] <= sample.nbytes][-1][1]
    return price.predict_s(sample.nbytes)


def rescored(sample: Sample, table: Table) -> ScoredCollective:
    """Return a scored row with the prediction of other constants, on the whole curve."""
    raw = compute_choice_costs(
        sample.choices, sample.place, sample.op, sample.nccl, _links(sample, table)
    )
    line = join_segments(raw, bound_s_per_byte(sample.op, sample.place))
    seconds = line.predict_s(sample.nbytes)
    error = seconds / sample.seconds - 1
    return msgspec.structs.replace(sample.scored, predicted_us=seconds * 1e6, error=error)


def _links(sample: Sample, table: Table) -> tuple[LinkCorrection, LinkCorrection | None]:
    inside, between = get_link_kinds(sample.place)
    return table[inside], table[between] if sample.place.domains > 1 else None
