"""Where a job's files lie in a pod, which sees its image and its volumes and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.cli.flags.job_outline import JobOutline
from meshwright.errors import Problem

_PATHS = ("sources", "validation_sources", "tokenizer", "cache_dir")
"""What of `[data]` may be a path."""
_NO_PATHS = ("builtin", "bytes")
_EXAMPLE = "--volume-claim CLAIM:/data"


def choose_pod_folder(asked: str | None, job: str, claims: Sequence[str]) -> PurePosixPath:
    """Return the run's folder: the one asked for, or one in the first volume."""
    usual = PurePosixPath("runs", Path(job).stem)
    mounts = _mounts(claims)
    return PurePosixPath(asked) if asked else (mounts[0] / usual if mounts else usual)


def find_pod_problems(
    outline: JobOutline, folder: PurePosixPath, claims: Sequence[str]
) -> list[Problem]:
    """Return the paths of a job that a pod has not, or loses when it ends."""
    mounts = _mounts(claims)
    if not any(folder.is_relative_to(mount) for mount in mounts):
        what = f"{folder} is in no volume, so that checkpoints are lost with the pod"
        fix = f"mount one with {_EXAMPLE}"
        if mounts:
            fix = (
                f"use --output-dir {mounts[0] / folder.name}, or mount another volume with "
                f"--volume-claim"
            )
        return [Problem("--output-dir", what, fix), *_relative(outline, mounts)]
    return _relative(outline, mounts)


def _relative(outline: JobOutline, mounts: Sequence[PurePosixPath]) -> list[Problem]:
    there = mounts[0] if mounts else PurePosixPath("/data")
    return [
        outline.locate(
            Problem(
                name,
                f"{path} is a path of this machine, which a pod does not have",
                f"put it into a volume or the image, and name it there: "
                f"{name}={there / Path(path).name}",
            )
        )
        for name, path in _paths(outline.data)
        if not PurePosixPath(path).is_absolute()
    ]


def _paths(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the values of a job that are paths, with their names."""
    given = data.get("data")
    table = given if isinstance(given, Mapping) else {}
    found = [(f"data.{name}", value) for name in _PATHS for value in _texts(table.get(name, ""))]
    if isinstance(data.get("initial_load_path"), str):
        found.append(("initial_load_path", data["initial_load_path"]))
    model = data.get("model")
    if isinstance(model, str) and (model.endswith((".toml", ".json", ".yaml")) or "/" in model):
        found.append(("model", model))
    return found


def _texts(value: object) -> list[str]:
    """Return the paths in a value: text, or a list of text and of tables with a path."""
    items = value if isinstance(value, list) else [value]
    given = [item.get("path") if isinstance(item, Mapping) else item for item in items]
    return [
        text
        for text in given
        if isinstance(text, str) and text and text.partition(":")[0] not in _NO_PATHS
    ]


def _mounts(claims: Sequence[str]) -> list[PurePosixPath]:
    return [PurePosixPath(claim.partition(":")[2]) for claim in claims]
