"""Measured rows with everything about them that the fitted constants do not change."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple, cast

import msgspec

from meshwright.predict.network.bounds import bound_s_per_byte
from meshwright.predict.network.collective import OPS
from meshwright.predict.network.curve import Choice, choices, joined, priced
from meshwright.predict.network.fabric import Correction, kinds
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.tuning import Op
from meshwright.predict.published.collectives import Row, Scored, system
from meshwright.predict.published.collectives.operations import only, version
from meshwright.predict.published.collectives.score import fabric_name

Table = Mapping[str, Correction]


class Sample(NamedTuple):
    """One measured row."""

    number: int
    """Its place among the samples."""
    scored: Scored
    system: str
    source: str
    """The page's site, owner and repository."""
    kind: str
    place: Placement
    op: Op
    nccl: str
    nbytes: float
    seconds: float
    choices: tuple[Choice, ...]
    """What NCCL takes, by size."""
    taken: tuple[Choice, ...]
    """What NCCL takes for this size."""
    weight: float


def samples(rows: Sequence[Row], scored: Sequence[Scored]) -> list[Sample]:
    """Return the rows that can be fitted; a system weighs the root of its number of rows."""
    usable = [item for item in scored if item.error is not None and item.collective in OPS]
    count = Counter(item.system for item in usable)
    return [
        _sample(number, rows[item.row], item, 1 / sqrt(count[item.system]))
        for number, item in enumerate(usable)
    ]


def _sample(number: int, row: Row, item: Scored, weight: float) -> Sample:
    place, op = system(row).place, cast(Op, item.collective)
    assert item.size_bytes is not None
    assert item.measured_us is not None
    found = tuple(choices(place, op, version(row), False, only(row)))
    return Sample(
        number=number,
        scored=item,
        system=item.system,
        source="/".join(str(row.get("source")).split("/")[2:5]),
        kind=fabric_name(place),
        place=place,
        op=op,
        nccl=version(row),
        nbytes=float(item.size_bytes),
        seconds=item.measured_us * 1e-6,
        choices=found,
        taken=tuple([choice for choice in found if choice.start_bytes <= item.size_bytes][-1:]),
        weight=weight,
    )


def price_s(sample: Sample, table: Table) -> float:
    """Return the time of a sample under some constants, as its own choice alone prices it."""
    raw = priced(sample.taken, sample.place, sample.op, sample.nccl, _links(sample, table))
    price = [part for part in raw if part[0] <= sample.nbytes][-1][1]
    return price.seconds(sample.nbytes)


def rescored(sample: Sample, table: Table) -> Scored:
    """Return a scored row with the prediction of other constants, on the whole curve."""
    raw = priced(sample.choices, sample.place, sample.op, sample.nccl, _links(sample, table))
    line = joined(raw, bound_s_per_byte(sample.op, sample.place))
    seconds = line.seconds(sample.nbytes)
    error = seconds / sample.seconds - 1
    return msgspec.structs.replace(sample.scored, predicted_us=seconds * 1e6, error=error)


def _links(sample: Sample, table: Table) -> tuple[Correction, Correction | None]:
    inside, between = kinds(sample.place)
    return table[inside], table[between] if sample.place.units > 1 else None
