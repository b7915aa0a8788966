"""`mw doctor`: what this machine has, for bug reports. Names no host, user or path."""

import argparse
import platform
import re
import shutil
import sys
from importlib import metadata

from meshwright import __version__
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, make_fields, make_table
from meshwright.observe.hardware.machine import (
    count_cores,
    list_gpus,
    read_cpu_model,
    read_memory_bytes,
)
from meshwright.spec.units import format_bytes

EXAMPLES = ("mw doctor", "mw doctor --json")

_CORE = ("msgspec", "numpy", "pyarrow", "rich", "PyYAML", "tomli-w")
_EXTRAS = {
    "train": ("torch", "safetensors", "tokenizers"),
    "serve": ("torch", "starlette", "uvicorn"),
    "fleet": ("duckdb", "prometheus-client"),
    "plots": ("matplotlib",),
    "ray": ("ray",),
    "load": ("aiohttp", "uvloop"),
}
_PROGRAMS = {
    "nvidia-smi": "see GPUs",
    "sinfo": "submit Slurm jobs",
    "kubectl": "submit Kubernetes jobs",
    "prometheus": "run fleet tests",
    "mpirun": "compare with MPI",
    "gcc": "compile extensions",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the state of this machine."""
    del args
    machine = {
        "meshwright": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {_kernel()} {platform.machine()}",
        "cpu": read_cpu_model(),
        "cores": count_cores(),
        "memory": format_bytes(read_memory_bytes()) if read_memory_bytes() else "unknown",
        "terminal": "yes" if sys.stdout.isatty() else "no",
    }
    packages = {name: _version(name) for name in _packages()}
    extras = {
        extra: [name for name in names if packages[name] is None]
        for extra, names in _EXTRAS.items()
    }
    gpus = list(list_gpus())
    programs = {name: shutil.which(name) is not None for name in _PROGRAMS}
    data = {
        "machine": machine,
        "packages": packages,
        "extras_missing": extras,
        "gpus": gpus,
        "programs": programs,
    }
    rows = [(name, version or "not installed") for name, version in packages.items()]
    rows += [
        (f"[{extra}]", "ready" if not lacking else f"lacks {', '.join(lacking)}")
        for extra, lacking in extras.items()
    ]
    found = [
        (name, "found" if there else "not found", _PROGRAMS[name])
        for name, there in programs.items()
    ]
    views = (
        make_fields({**machine, "gpus": ", ".join(gpus) or "none seen"}),
        make_table("package, version", rows, wide="version"),
        make_table("program, here, needed to", found),
    )
    return CommandResult("doctor/1", data, views, (__version__,))


def _kernel() -> str:
    # The rest of a release can name a cloud's or a company's own build.
    version = re.match(r"\d+(\.\d+)?", platform.release())
    return version.group() if version else ""


def _packages() -> list[str]:
    return list(
        dict.fromkeys([*_CORE, "triton", *(name for names in _EXTRAS.values() for name in names)])
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
