"""What this machine is: its processor, cores, memory and GPUs, with nothing that names an owner."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

DRIVER_TIMEOUT_S = 30.0
"""How long the driver may take to answer: a sick one can hang."""
MAX_BACKGROUND_LOAD = 0.5
"""Programs that may run beside; more of them take cores from what is measured."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows were measured, as far as their times depend on it."""

    device: str
    """What the driver calls it, or the processor's name."""
    gpu: str = ""
    """Its name in the catalog; empty for a processor, or one that is not there."""
    host: str = ""
    """The host's processor."""
    cores: int = 0
    torch: str = ""
    cuda: str = ""
    driver: str = ""

    @property
    def fingerprint(self) -> str:
        """What rows of one machine have in common."""
        return "|".join(str(value) for value in msgspec.structs.astuple(self))


def read_cpu_model() -> str:
    """Return the processor's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def count_cores() -> int:
    """Return how many logical cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_other_load(needed: int) -> str:
    """Say that other programs run, where they leave fewer cores than are needed; else nothing."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= MAX_BACKGROUND_LOAD or count_cores() >= needed + load:
        return ""
    return f"other programs run here (load {load:.1f}): times are theirs as well"


def read_memory_bytes() -> int:
    """Return the physical memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def list_gpus() -> tuple[str, ...]:
    """Return a line for each GPU (name, memory, driver), asked of the driver; torch need not be."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ("nvidia-smi does not answer",)
    if done.returncode != 0:
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def describe_machine(device: "torch.device") -> Machine:
    """Return what the times of a device depend on."""
    import torch

    from meshwright.observe.hardware.catalog_device import find_catalog_device
    from meshwright.observe.hardware.nvml import read_driver_version

    if device.type != "cuda":
        return Machine(
            device=read_cpu_model(),
            host=read_cpu_model(),
            cores=count_cores(),
            torch=str(torch.__version__),
        )
    name = torch.cuda.get_device_name(device)
    known = find_catalog_device(name)
    return Machine(
        device=name,
        gpu=known.name if known is not None and known.kind == "gpu" else "",
        host=read_cpu_model(),
        cores=count_cores(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        driver=read_driver_version(),
    )
