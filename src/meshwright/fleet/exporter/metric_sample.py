"""One value of one metric, with its labels."""

from typing import NamedTuple


class MetricSample(NamedTuple):
    """One value of one metric of a GPU or a job."""

    name: str
    help: str
    labels: dict[str, str]
    value: float
    is_counter: bool = False
