"""What this machine is: its processor, cores, memory and GPUs, with nothing that names an owner."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.observe.bench.case import Machine

if TYPE_CHECKING:
    import torch

ASK_S = 30.0
"""How long the driver may take to answer: a sick one can hang."""
MODEST_LOAD = 0.5
"""Programs that may run beside; more of them take cores from what is measured."""


def processor() -> str:
    """Return the processor's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """Return how many logical cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def others_here(needed: int) -> str:
    """Say that other programs run, where they leave fewer cores than are needed; else nothing."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= MODEST_LOAD or cores() >= needed + load:
        return ""
    return f"other programs run here (load {load:.1f}): times are theirs as well"


def memory_bytes() -> int:
    """Return the physical memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def gpus() -> tuple[str, ...]:
    """Return a line for each GPU (name, memory, driver), asked of the driver; torch need not be."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ("nvidia-smi does not answer",)
    if done.returncode != 0:
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def machine_of(device: "torch.device") -> Machine:
    """Return what the times of a device depend on."""
    import torch

    from meshwright.observe.analyze.device import known_device
    from meshwright.observe.bench.nvml import driver_version

    if device.type != "cuda":
        return Machine(
            device=processor(), host=processor(), cores=cores(), torch=str(torch.__version__)
        )
    name = torch.cuda.get_device_name(device)
    known = known_device(name)
    return Machine(
        device=name,
        gpu=known.name if known is not None and known.kind == "gpu" else "",
        host=processor(),
        cores=cores(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        driver=driver_version(),
    )
