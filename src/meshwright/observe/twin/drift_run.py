"""What is judged of a run: its steps from `metrics.jsonl`, and its step as it was predicted."""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.observe.twin.alone import STEP_SHARE
from meshwright.observe.twin.drift import Expected, StepTimes, Term
from meshwright.predict.cost import Calibration
from meshwright.predict.run import Run
from meshwright.predict.software import MESHWRIGHT
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster, Gpu
from meshwright.spec.files import load_data
from meshwright.spec.work import Work, read_work

CONFIG, ROWS, SITTINGS = "config.toml", "metrics.jsonl", "sittings.jsonl"


class Sitting(NamedTuple):
    """What a sitting of a run said of itself."""

    after: int
    """The step that it went on after."""
    device: str
    """As its driver calls it; `CPU`."""
    gpu: str | None
    """As the catalog does; None where it does not know it."""
    versions: Mapping[str, str]


class Rows:
    """The rows of a file that grows, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._lines = 0
        self._file = 0
        self._last = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Give the rows of steps that came since the last call; half a line waits for its end.

        A run that goes on rewrites the file without the steps it does again: of those, what was
        read first counts.
        """
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            status = self._path.stat()
            if status.st_ino != self._file or status.st_size < self._place:
                self._file, self._place, self._lines = status.st_ino, 0, 0
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._place, self._lines = self._place + len(line), self._lines + 1
                row = _read(line)
                if row is None and not line.isspace():
                    what = (
                        f"{self._path}: line {self._lines} is damaged, and its step is not judged"
                    )
                    warnings.warn(what, stacklevel=2)
                elif row is not None and _has_time(row) and row["step"] > self._last:
                    self._last = row["step"]
                    yield row


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _has_time(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is that of a step, and not of an evaluation after one."""
    return isinstance(row.get("step_s"), float | int)


def step_of(row: Mapping[str, Any]) -> StepTimes:
    """Return a step from its row; rows of older runs tell no parts."""
    step_s = float(row["step_s"])
    # The first step of a sitting warms up, and tells no speed.
    begins = "tokens_per_s" not in row
    parts = [row.get(f"{name}_s") for name in ("between", "gradients", "update")]
    if not all(isinstance(part, float | int) for part in parts):
        return StepTimes(int(row["step"]), step_s, {}, begins)
    between_s, gradients_s, update_s = (float(part) for part in parts if part is not None)
    # A host that waits while the device still works on the step before costs nothing.
    data_s = min(between_s, step_s * float(row.get("data_wait_share") or 0.0))
    terms: dict[Term, float] = {
        "data": data_s,
        "between": between_s - data_s,
        "gradients": gradients_s,
        "update": update_s,
    }
    if isinstance(row.get("exchange_wait_s"), float | int):
        terms["exchange"] = float(row["exchange_wait_s"])
    return StepTimes(int(row["step"]), step_s, terms, begins)


def sittings_of(folder: Path) -> list[Sitting]:
    """Return what the sittings of a run said; nothing of a run that is older than that."""
    try:
        lines = (folder / SITTINGS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            versions = {name: str(row[name]) for name in ("meshwright", "torch") if name in row}
            device = str(row["device"])
            gpu = "cpu-core" if device == "CPU" else row.get("gpu")
            found.append(Sitting(int(row["after"]), device, gpu, versions))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """Return the job of a run's folder."""
    if not (folder / CONFIG).is_file():
        what, fix = f"holds no run: there is no {CONFIG}", "name the folder that mw train writes"
        raise InputError([Problem(str(folder), what, fix)])
    return load_data(folder / CONFIG)


def cluster_with(gpu: Gpu) -> Cluster:
    """Return some cluster of such devices."""
    every = catalog.clusters().values()
    known = next((one for one in every if one.gpu.name == gpu.name), None)
    return known or replace(catalog.cluster("h200-superpod"), gpu=gpu)


def work_of(config: Mapping[str, Any], cluster: str | Cluster) -> Work:
    """Return what a run does as what is predicted; a cluster given by name is made large enough."""
    return read_work({**config, "cluster": cluster}, f"{CONFIG}: ")


def expected_of(work: Work, calibration: Calibration | None = None) -> Expected:
    """Predict the step of a run, in the terms that it records.

    The band is what is promised of one device with a calibration of its own; else where nine of
    ten published steps lie around their prediction.
    """
    step = predict_step(Run(work, software=MESHWRIGHT, calibration=calibration))
    low_s, high_s = step.low_s, step.high_s
    if calibration is not None and work.layout.gpus == 1:
        low_s, high_s = step.step_s / (1 + STEP_SHARE), step.step_s / (1 - STEP_SHARE)
    return Expected(step.step_s, low_s, high_s, _terms(step, work))


def _terms(step: StepPrediction, work: Work) -> dict[Term, float]:
    exchange_s = step.tp_s + step.cp_s + step.ep_s + step.pp_s + step.dp_s
    exchange_s += step.offload_s + step.bubble_s
    found: dict[Term, float] = {
        "data": 0.0,
        "between": 0.0,
        "gradients": step.compute_s + step.recompute_s,
        "update": step.optimizer_s,
    }
    # On a GPU a rank waits for others in its streams, and no host knows for how long.
    if work.cluster.gpu.kind == "cpu" and work.layout.gpus > 1:
        return found | {"exchange": exchange_s}
    found["gradients"] += exchange_s
    return found
