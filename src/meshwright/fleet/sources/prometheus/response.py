"""What a server of Prometheus's HTTP API answers, as arrays.

Prometheus, Thanos, Mimir and VictoriaMetrics answer alike. Numbers come as text; JSON's decoder
turns them into floats on the way.
"""

from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class TimeSeries(NamedTuple):
    """One series: its labels, and what was measured when."""

    labels: dict[str, str]
    time_s: Floats
    values: Floats


class _Result(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, float] | None = None
    values: list[tuple[float, float]] = []


class _Data(msgspec.Struct):
    result: list[_Result] = []


class ApiResponse(msgspec.Struct):
    """The parts of every answer that matter here."""

    status: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    error_type: str = msgspec.field(name="errorType", default="")
    warnings: list[str] = []
    partial: bool = msgspec.field(name="isPartial", default=False)


def parse_response(body: bytes) -> ApiResponse:
    """Read an answer without its data; raise msgspec.DecodeError where it broke off."""
    return msgspec.json.decode(body, type=ApiResponse)


def parse_series(data: msgspec.Raw) -> list[TimeSeries]:
    """Read the series of a query, whether it was for a moment or for a range."""
    # The decoder knows every spelling of numbers that occurs here but this one.
    body = bytes(data).replace(b'"+Inf"', b'"Inf"')
    found = msgspec.json.decode(body, type=_Data, strict=False).result
    return [_series(each) for each in found]


def _series(result: _Result) -> TimeSeries:
    pairs = [result.value] if result.value is not None else result.values
    # A third of the time that np.array takes for a list of pairs.
    both = np.fromiter(chain.from_iterable(pairs), np.float64, 2 * len(pairs)).reshape(-1, 2)
    return TimeSeries(result.metric, both[:, 0], both[:, 1])


def parse_list(data: msgspec.Raw) -> list[Any]:
    """Read a list of names or of sets of labels."""
    found = msgspec.json.decode(data)
    return found if isinstance(found, list) else []
