"""`RunState`: what a checkpoint holds beside tensors, and what of a job may not change in a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.job import Job
from meshwright.run.train.paths import whole_path
from meshwright.run.train.run_folder import recipe_in
from meshwright.run.train.step import WEIGHT_FORMATS
from meshwright.spec.files import load_data
from meshwright.spec.layout import Layout
from meshwright.spec.read import read

PLAIN = "plain training"
BEGIN_ANEW = "change it back, or begin anew with --fresh"


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds beside tensors."""

    tokens_seen: int
    guard: Any
    data: str
    """Fingerprint of the tokens and their order."""
    kept: Any
    """What of the job may not change."""


def state_of(extra: Mapping[str, Any], path: Path) -> RunState:
    """Read what a checkpoint holds beside tensors."""
    return read(RunState, extra, f"{path}: ")


def other_kind(kind: str, extra: Mapping[str, Any], folder: Path, fix: str) -> Problem | None:
    """Say where a folder holds a run of another kind, by what its checkpoint holds."""
    found = "grpo" if "settings" in extra else kind_of(extra.get("kept") or {})
    return _differs(kind, found, folder, fix)


def other_config(kind: str, folder: Path) -> Problem | None:
    """Say the same of a folder without a checkpoint, by its configuration."""
    try:
        config = load_data(folder / "config.toml")
    except InputError:
        return None
    return _differs(kind, recipe_in(config) or PLAIN, folder, "")


def _differs(kind: str, found: str, folder: Path, fix: str) -> Problem | None:
    if kind == found:
        return None
    what = f"holds a run of {found}, and this is one of {kind}"
    return Problem(str(folder), what, f"give this run a folder of its own with --folder{fix}")


def kind_of(kept: Mapping[str, Any]) -> str:
    """Return a recipe's name where there is one, in words where there is none."""
    recipe = kept.get("recipe")
    return str(recipe["kind"]) if isinstance(recipe, Mapping) else PLAIN


def kept_of(job: Job) -> dict[str, Any]:
    """Return what makes a run the run it is; everything else may change when it goes on."""
    start = job.start_from and whole_path(job.start_from)
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
            "average": None if job.optimizer.average is None else job.optimizer.average_precision
        },
        "seed": job.seed,
        "start_from": start,
    }
    if job.layout.precision in WEIGHT_FORMATS:
        kept["layout"]["precision"] = job.layout.precision
    return kept | job.kept()


def changes(job: Job, state: RunState) -> list[Problem]:
    """Return what of a job is not as the run began with it."""
    now, then = dict(leaves(kept_of(job))), dict(leaves(state.kept))
    return [
        Problem(
            name, f"is {now.get(name)!r}, and the run began with {then.get(name)!r}", BEGIN_ANEW
        )
        for name in dict.fromkeys((*now, *then))
        if now.get(name) != then.get(name)
    ]


def layout_change(before: Layout, now: Layout) -> str:
    """Say how a run's layout differs from that of the sitting before; empty where it does not.

    How many sequences a rank takes at once moves nothing, and is left out.
    """
    fields = [name for name in Layout.__struct_fields__ if name != "microbatch"]
    pairs = [(name, _word(getattr(before, name)), _word(getattr(now, name))) for name in fields]
    return ", ".join(f"{name} {was} → {new}" for name, was, new in pairs if was != new)


def _word(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Go through the values of nested data with the path of each."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, data
