"""The folder of a run: one process at a time, its configuration, and what an earlier try left.

config.toml      the job, as `mw train` reads it, with whole paths
metrics.jsonl    a row of figures for each step
sessions.jsonl   a row for each session: the step it goes on after, its device, versions
checkpoints/     what the run goes on from
timeline/        what each of several ranks did, and profiled steps; see `run_timeline`
report.html      curves and how it ended
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.run.train.data.corpus.token_shards import is_token_shards
from meshwright.spec.file_formats import load_data
from meshwright.spec.layout import Layout
from meshwright.spec.serialization import decode

if TYPE_CHECKING:
    import torch

    from meshwright.run.train.job.train_job import TrainJob

METRICS_FILE = "metrics.jsonl"
SESSIONS_FILE = "sessions.jsonl"
_LOCK = ".lock"
_LAST_BYTES = 65536
"""Of the rows, read from the end: more than a row has."""


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process; another one that trains there is refused.

    So is a folder of tokens. What was made for a run that never began is removed again.
    """
    if is_token_shards(folder):
        what = "holds tokenized text, which a run is kept apart from"
        raise InputError([Problem(str(folder), what, "give this run a folder of its own")])
    if folder.is_file():
        fix = "name a folder, or move the file away"
        raise InputError([Problem(str(folder), "is a file, and a run needs a folder", fix)])
    folder = folder.resolve() if folder.is_symlink() else folder  # where it leads may be missing
    with convert_os_errors(folder, "write"):
        made = [each for each in (folder / _LOCK, folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another process trains in this folder"
            fix = "wait for it, or give this run a folder of its own"
            raise InputError([Problem(str(folder), what, fix)]) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        if made and folder.is_dir() and not has_run(folder):
            with suppress(OSError):  # somebody else put something there
                for each in made:
                    each.unlink() if each.name == _LOCK else each.rmdir()
        os.close(lock)


def is_locked(folder: Path) -> bool:
    """Tell whether a process trains in a folder; False on a file system without locks.

    The lock is held for an instant to find out: ask seldom.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def has_run(folder: Path) -> bool:
    """Tell whether a folder holds a run, or what a try left of one."""
    return folder.is_dir() and bool(_names(folder) & {"config.toml", METRICS_FILE, "checkpoints"})


def find_recipe(config: Mapping[str, Any]) -> str | None:
    """Return the recipe that a run's configuration is of; None is plain training."""
    recipe = config.get("recipe")
    kind = recipe.get("kind") if isinstance(recipe, Mapping) else None
    if isinstance(kind, str):
        return kind
    # A file of reinforcement learning has a task, and what its run keeps names its folder too;
    # no other job has either.
    own = "folder" in config or "task" in config
    return "grpo" if own and "workload" not in config else None


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def archive_run(folder: Path) -> Path:
    """Rename a run's folder to the first free name beside it."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    with convert_os_errors(folder, "move aside"):
        return folder.rename(aside)


def archive_metrics(folder: Path) -> Path | None:
    """Rename the rows of a try that ended before its first checkpoint; None where there are none.

    Nothing goes on from them, and they are somebody's figures all the same.
    """
    rows = folder / METRICS_FILE
    if not rows.exists() or not rows.stat().st_size:
        return None
    number = 1
    while (aside := folder / f"metrics.{number}.jsonl").exists():
        number += 1
    return rows.rename(aside)


def find_last_logged_step(folder: Path) -> int:
    """Return the last step of which figures were written; 0 where there is none."""
    try:
        with (folder / METRICS_FILE).open("rb") as rows:
            rows.seek(max(0, rows.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = rows.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # the last may be cut off
            return int(json.loads(line)["step"])
    return 0


def read_last_layout(folder: Path) -> Layout | None:
    """Return the layout of the session before; None where none can be read."""
    try:
        return decode(Layout, load_data(folder / "config.toml").get("layout", {}))
    except InputError:
        return None


def append_session(folder: Path, after: int, device: "torch.device") -> None:
    """Add a row for a session that goes on after a step: what it runs on, and by which versions."""
    import torch

    from meshwright import __version__
    from meshwright.run.train.profiling.device_peak import find_catalog_gpu

    row: dict[str, object] = {"after": after, "device": "CPU"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row["device"] = properties.name
        gpu = find_catalog_gpu(properties.name, properties.total_memory)
        row |= {} if gpu is None else {"gpu": gpu.name}
    row |= {"meshwright": __version__, "torch": str(torch.__version__)}
    with (folder / SESSIONS_FILE).open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


def write_config(job: "TrainJob", folder: Path) -> None:
    """Write the job into its folder, in one step."""
    from meshwright.run.train.job.job_file import dump_job  # it loads torch, and a claim does not

    new = folder / ".config.toml.new"
    new.write_text(dump_job(job), encoding="utf-8")
    new.replace(folder / "config.toml")
