"""`RunState`: what a checkpoint holds beside tensors, and what of a job may not change in a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.run.train.run_folder.run_folder import find_recipe
from meshwright.run.train.train_step import WEIGHT_DTYPES
from meshwright.spec.file_formats import load_data
from meshwright.spec.layout import Layout
from meshwright.spec.serialization import decode

DEFAULT_KIND = "plain training"
RESTART_FIX = "change it back, or pass --no-resume"
RUN_STATE_VERSION = 2
"""Goes up with every change of `RunState`; a checkpoint of another version is refused."""


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds beside tensors."""

    version: int = RUN_STATE_VERSION
    tokens_seen: int
    guard: Any
    data: str
    """Fingerprint of the tokens and their order."""
    invariants: Any
    """What of the job may not change."""


def parse_run_state(extra: Mapping[str, Any], path: Path) -> RunState:
    """Read what a checkpoint holds beside tensors."""
    if (problem := _find_version_problem(extra, path)) is not None:
        raise InputError([problem])
    return decode(RunState, extra, f"{path}: ")


def _find_version_problem(extra: Mapping[str, Any], path: Path) -> Problem | None:
    version = extra.get("version", 1)  # the first version has no such field
    if version == RUN_STATE_VERSION:
        return None
    what = f"its run state has version {version}, and this release reads {RUN_STATE_VERSION}"
    fix = "resume with the release that saved it, or pass --no-resume"
    return Problem(str(path), what, fix)


def find_run_kind_problem(
    kind: str, extra: Mapping[str, Any], folder: Path, fix: str
) -> Problem | None:
    """Say where a folder holds a run of another kind, by what its checkpoint holds."""
    if "settings" not in extra and (problem := _find_version_problem(extra, folder)) is not None:
        return problem
    found = "grpo" if "settings" in extra else describe_kind(extra.get("invariants") or {})
    return _differs(kind, found, folder, fix)


def find_config_kind_problem(kind: str, folder: Path) -> Problem | None:
    """Say the same of a folder without a checkpoint, by its configuration."""
    try:
        config = load_data(folder / "config.toml")
    except InputError:
        return None
    return _differs(kind, find_recipe(config) or DEFAULT_KIND, folder, "")


def _differs(kind: str, found: str, folder: Path, fix: str) -> Problem | None:
    if kind == found:
        return None
    what = f"holds a run of {found}, and this is one of {kind}"
    return Problem(str(folder), what, f"give this run a folder of its own with --output-dir{fix}")


def describe_kind(kept: Mapping[str, Any]) -> str:
    """Return a recipe's name where there is one, in words where there is none."""
    recipe = kept.get("recipe")
    return str(recipe["kind"]) if isinstance(recipe, Mapping) else DEFAULT_KIND


def list_job_invariants(job: TrainJob) -> dict[str, Any]:
    """Return what makes a run the run it is; everything else may change when it goes on."""
    start = job.initial_load_path and make_absolute_path(job.initial_load_path)
    kept = {
        "model": msgspec.to_builtins(job.model),
        "layout": {
            "precision": "bf16",  # of the weights: fp8 products read them in bf16 too
            "optimizer": job.layout.optimizer,
            "master_precision": job.layout.master_precision,
            "moment_precision": job.layout.moment_precision,
        },
        "workload": {
            "sequence_length": job.workload.sequence_length,
            "global_batch": job.workload.global_batch,
        },
        "optimizer": {
            "ema_dtype": None if job.optimizer.ema_decay is None else job.optimizer.ema_dtype
        },
        "seed": job.seed,
        "initial_load_path": start,
    }
    if job.layout.precision in WEIGHT_DTYPES:
        kept["layout"]["precision"] = job.layout.precision
    return kept | job.resume_invariants()


def list_changed_invariants(job: TrainJob, state: RunState) -> list[Problem]:
    """Return what of a job is not as the run began with it."""
    now, then = (
        dict(flatten_values(list_job_invariants(job))),
        dict(flatten_values(state.invariants)),
    )
    return [
        Problem(
            name, f"is {now.get(name)!r}, and the run began with {then.get(name)!r}", RESTART_FIX
        )
        for name in dict.fromkeys((*now, *then))
        if now.get(name) != then.get(name)
    ]


def describe_layout_change(before: Layout, now: Layout) -> str:
    """Say how a run's layout differs from that of the session before; empty where it does not.

    How many sequences a rank takes at once moves nothing, and is left out.
    """
    fields = [name for name in Layout.__struct_fields__ if name != "microbatch"]
    pairs = [(name, _word(getattr(before, name)), _word(getattr(now, name))) for name in fields]
    return ", ".join(f"{name} {was} → {new}" for name, was, new in pairs if was != new)


def _word(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def flatten_values(data: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Go through the values of nested data with the path of each."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from flatten_values(value, f"{path}.{name}" if path else name)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from flatten_values(value, f"{path}[{index}]")
    else:
        yield path, data
