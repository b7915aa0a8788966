"""Describes the machine a result was measured on: processor, memory, system, versions, GPUs.

Holds nothing that names a person or a place: no host name, no user name, no path.
"""

import platform
from importlib import metadata

import msgspec

from meshwright.observe.hardware.machine import (
    count_cores,
    list_gpus,
    read_cpu_model,
    read_memory_bytes,
)

PACKAGES = ("duckdb", "meshwright", "msgspec", "numpy", "pandas", "polars", "pyarrow", "torch")
"""The packages whose version can change a result."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to know to compare a figure with their own."""

    cpu: str
    """Processor model as the system names it."""
    cores: int
    """Logical cores this process may use."""
    memory_bytes: int
    """Physical memory; 0 where the system does not tell."""
    system: str
    """Operating system and kernel release."""
    python: str
    """Interpreter and version."""
    packages: dict[str, str]
    """Version of each installed package that can change a result."""
    gpus: tuple[str, ...] = ()
    """One entry per GPU: name, memory, driver."""


def describe() -> Machine:
    """Look at this machine."""
    return Machine(
        cpu=read_cpu_model(),
        cores=count_cores(),
        memory_bytes=read_memory_bytes(),
        # What follows the dash names a distribution's or a cloud's own build.
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=_packages(),
        gpus=list_gpus(),
    )


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
