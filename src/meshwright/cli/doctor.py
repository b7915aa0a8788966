"""`mw doctor`: what this machine has, for bug reports. Names no host, user or path."""

import argparse
import platform
import re
import shutil
import sys
from importlib import metadata

from meshwright import __version__
from meshwright.cli.answer import Answer, facts, table
from meshwright.cli.parser import add_common
from meshwright.observe.bench.host import cores, memory_bytes, processor
from meshwright.observe.bench.host import gpus as driver_gpus
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


def run(args: argparse.Namespace) -> Answer:
    """Answer with the state of this machine."""
    del args
    machine = {
        "meshwright": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {_kernel()} {platform.machine()}",
        "cpu": processor(),
        "cores": cores(),
        "memory": format_bytes(memory_bytes()) if memory_bytes() else "unknown",
        "terminal": "yes" if sys.stdout.isatty() else "no",
    }
    packages = {name: _version(name) for name in _packages()}
    extras = {
        extra: [name for name in names if packages[name] is None]
        for extra, names in _EXTRAS.items()
    }
    gpus = list(driver_gpus())
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
        facts({**machine, "gpus": ", ".join(gpus) or "none seen"}),
        table("package, version", rows, wide="version"),
        table("program, here, needed to", found),
    )
    return Answer("doctor/1", data, views, (__version__,))


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
