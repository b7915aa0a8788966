"""`Workload`: a training run or a stream of requests, told apart by `kind` in a file."""

from pathlib import Path
from typing import cast

from meshwright.spec.file_formats import load_data
from meshwright.spec.serialization import decode
from meshwright.spec.workload.requests import ServingWorkload
from meshwright.spec.workload.training import TrainingWorkload

Workload = TrainingWorkload | ServingWorkload
"""What is asked of a cluster."""


def read_workload(data: object, where: str = "") -> Workload:
    """Turn plain data into a workload; `kind` says which: `training` or `requests`."""
    return decode(cast(type[Workload], Workload), data, where)


def load_workload(path: str | Path) -> Workload:
    """Read a workload from a TOML, JSON or YAML file; problems name the file and the field."""
    return read_workload(load_data(path), f"{Path(path)}: ")
