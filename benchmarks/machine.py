"""Describes the machine a result was measured on: processor, memory, system, versions, GPUs.

Holds nothing that names a person or a place: no host name, no user name, no path.
"""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

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
        cpu=_cpu(),
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        # What follows the dash names a distribution's or a cloud's own build.
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=_packages(),
        gpus=_gpus(),
    )


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[str, ...]:
    """Ask nvidia-smi, which is there wherever an NVIDIA driver is; torch need not be."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
