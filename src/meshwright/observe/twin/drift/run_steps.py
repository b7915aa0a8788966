"""What is judged of a run: its steps from `metrics.jsonl`, and its step as it was predicted."""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.observe.twin.device_twin import MAX_STEP_ERROR
from meshwright.observe.twin.drift.drift_detector import DriftTerm, ExpectedStep, StepSample
from meshwright.predict.cost import Calibration
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster, Gpu
from meshwright.spec.file_formats import load_data
from meshwright.spec.job_spec import JobSpec, read_job_spec

CONFIG_FILE, METRICS_FILE, SESSIONS_FILE = "config.toml", "metrics.jsonl", "sessions.jsonl"
_OLDER_SESSIONS_FILE = "sittings.jsonl"


class TrainSessionInfo(NamedTuple):
    """What a session of a run said of itself."""

    resumed_after_step: int
    """The step that it went on after."""
    device: str
    """As its driver calls it; `CPU`."""
    gpu: str | None
    """As the catalog does; None where it does not know it."""
    versions: Mapping[str, str]


class MetricsTail:
    """The rows of a file that grows, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._lines = 0
        self._file = 0
        self._last = 0

    def read_new_rows(self) -> Iterator[dict[str, Any]]:
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


def parse_step(row: Mapping[str, Any]) -> StepSample:
    """Return a step from its row; rows of older runs tell no parts."""
    step_s = float(row["step_s"])
    # The first step of a session warms up, and tells no speed.
    begins = "tokens_per_s" not in row
    parts = [row.get(name) for name in ("step_gap_s", "forward_backward_s", "optimizer_s")]
    if not all(isinstance(part, float | int) for part in parts):
        return StepSample(int(row["step"]), step_s, {}, begins)
    step_gap_s, forward_backward_s, optimizer_s = (
        float(part) for part in parts if part is not None
    )
    # A host that waits while the device still works on the step before costs nothing.
    data_s = min(step_gap_s, step_s * float(row.get("data_wait_fraction") or 0.0))
    terms: dict[DriftTerm, float] = {
        "data": data_s,
        "between": step_gap_s - data_s,
        "gradients": forward_backward_s,
        "update": optimizer_s,
    }
    if isinstance(row.get("comm_wait_s"), float | int):
        terms["exchange"] = float(row["comm_wait_s"])
    return StepSample(int(row["step"]), step_s, terms, begins)


def read_sessions(folder: Path) -> list[TrainSessionInfo]:
    """Return what the sessions of a run said; nothing of a run without a file of them."""
    if (folder / _OLDER_SESSIONS_FILE).exists():
        what = f"was written by an older version of mw train: it has {_OLDER_SESSIONS_FILE}"
        fix = f"use the version that wrote it; this one reads {SESSIONS_FILE}"
        raise InputError([Problem(str(folder), what, fix)])
    try:
        lines = (folder / SESSIONS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            versions = {name: str(row[name]) for name in ("meshwright", "torch") if name in row}
            device = str(row["device"])
            gpu = "cpu-core" if device == "CPU" else row.get("gpu")
            found.append(TrainSessionInfo(int(row["after"]), device, gpu, versions))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def read_run_config(folder: Path) -> dict[str, Any]:
    """Return the job of a run's folder."""
    if not (folder / CONFIG_FILE).is_file():
        what, fix = (
            f"holds no run: there is no {CONFIG_FILE}",
            "name the folder that mw train writes",
        )
        raise InputError([Problem(str(folder), what, fix)])
    return load_data(folder / CONFIG_FILE)


def find_cluster_with_gpu(gpu: Gpu) -> Cluster:
    """Return some cluster of such devices."""
    every = catalog.list_clusters().values()
    known = next((one for one in every if one.gpu.name == gpu.name), None)
    return known or replace(catalog.get_cluster("h200-superpod"), gpu=gpu)


def read_run_work(config: Mapping[str, Any], cluster: str | Cluster) -> JobSpec:
    """Return what a run does as what is predicted; a cluster given by name is made large enough."""
    return read_job_spec({**config, "cluster": cluster}, f"{CONFIG_FILE}: ")


def predict_expected_step(work: JobSpec, calibration: Calibration | None = None) -> ExpectedStep:
    """Predict the step of a run, in the terms that it records.

    The band is what is promised of one device with a calibration of its own; else where nine of
    ten published steps lie around their prediction.
    """
    step = predict_step(TrainingRun(work, framework=MESHWRIGHT, calibration=calibration))
    low_s, high_s = step.low_s, step.high_s
    if calibration is not None and work.layout.gpus == 1:
        low_s, high_s = step.step_s / (1 + MAX_STEP_ERROR), step.step_s / (1 - MAX_STEP_ERROR)
    return ExpectedStep(step.step_s, low_s, high_s, _terms(step, work))


def _terms(step: StepPrediction, work: JobSpec) -> dict[DriftTerm, float]:
    exchange_s = step.tp_s + step.cp_s + step.ep_s + step.pp_s + step.dp_s
    exchange_s += step.offload_s + step.bubble_s
    found: dict[DriftTerm, float] = {
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
