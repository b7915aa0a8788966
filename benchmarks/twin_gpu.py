"""How near predictions of a measured GPU come to steps of our own trainer on it.

The device is benched, calibrated and put to work in one go: rows of `mw bench` (none of them a
step) become a calibration, from it every configuration of `mw twin` is predicted, and then run.
Shapes that the bench did not measure say how well it predicts products it has not seen.

    python -m benchmarks.run twin_gpu            (about 12 minutes of a GPU)

TWIN_GPU_ROWS and TWIN_GPU_HELD name rows that are there already.
"""

import os
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.result import figure
from meshwright.errors import MissingDependency
from meshwright.observe.twin.device_twin import DeviceTwin
from meshwright.observe.twin.step_breakdown import SHOWN_KINDS

NAME = "twin_gpu"
QUESTION = "Is a step of a measured GPU what its calibration predicts?"
ROWS, HELD = "TWIN_GPU_ROWS", "TWIN_GPU_HELD"
HELD_PRODUCTS = 60


def measure(quick: bool) -> dict[str, object]:
    """Bench, calibrate, predict and run; `quick` benches a minute and runs two configurations."""
    import torch

    from meshwright.observe.bench.suite import read_bench
    from meshwright.observe.calibrate.calibration import calibrate
    from meshwright.observe.twin.default_configs import build_default_gpu_configs
    from meshwright.observe.twin.device_twin import run_device_twin
    from meshwright.observe.twin.drift.run_steps import find_cluster_with_gpu

    if not torch.cuda.is_available():
        raise MissingDependency("steps of a GPU are run", "use a machine that has one")
    with tempfile.TemporaryDirectory() as folder:
        rows, held = _rows(Path(folder), quick=quick)
        found = calibrate(read_bench(rows), read_bench(held).rows)
    cluster = find_cluster_with_gpu(found.gpu)
    configs = build_default_gpu_configs()[:2] if quick else build_default_gpu_configs()
    twins = [run_device_twin(config, cluster, found.calibration) for config in configs]
    unseen = next(one.validation for one in found.reports if one.title == "gemm bf16")
    figures = [*_overall(twins, quick=quick)]
    if unseen is not None:
        figures += [
            figure("unseen products, median error", 100 * unseen.median, "%", "<= 4"),
            figure("unseen products, 95th percentile", 100 * unseen.p95, "%", "<= 12"),
        ]
    figures += [one for twin in twins for one in _of(twin)]
    notes = (
        f"{torch.cuda.get_device_name()}, calibrated from {found.calibration.source}; one step of "
        "each configuration is the median of those timed over 3 s or more, after 4 s of training."
    )
    return {"figures": figures, "peers": [], "notes": notes}


def _rows(folder: Path, *, quick: bool) -> tuple[Path, Path]:
    """Return files of rows: those that are there, or new ones."""
    import torch

    from meshwright.observe.bench.bench_family import BenchTarget
    from meshwright.observe.bench.families import FAMILIES
    from meshwright.observe.bench.kernels import attention, gemm
    from meshwright.observe.bench.kernels.attention import ATTENTION_FAMILY
    from meshwright.observe.bench.kernels.gemm import GEMM_FAMILY
    from meshwright.observe.bench.suite import run_bench
    from meshwright.observe.hardware.machine import describe_machine

    place = BenchTarget(torch.device("cuda", 0))
    machine = describe_machine(place.device)
    rows, held = folder / "rows.jsonl", folder / "held.jsonl"
    if os.environ.get(ROWS):
        rows = Path(os.environ[ROWS])
    else:
        run_bench(FAMILIES, place, machine, size="quick" if quick else "full", path=rows)
    if os.environ.get(HELD):
        held = Path(os.environ[HELD])
    else:
        unseen = gemm.list_validation_gemms(12 if quick else HELD_PRODUCTS)
        families = (
            GEMM_FAMILY._replace(cases=lambda _size, _gpu: unseen),
            ATTENTION_FAMILY._replace(
                cases=lambda _size, _gpu: attention.list_validation_attention()
            ),
        )
        run_bench(families, place, machine, size="full", path=held)
    return rows, held


def _overall(twins: list[DeviceTwin], *, quick: bool) -> list[dict[str, object]]:
    errors = [abs(100 * twin.step_error) for twin in twins]
    memory = [abs(100 * (twin.memory_error or 0.0)) for twin in twins]
    return [
        figure("configurations", len(twins), "", "" if quick else ">= 12"),
        figure("step, median error", median(errors), "%", "<= 4"),
        figure("step, largest error", max(errors), "%", "<= 10"),
        figure("memory, largest error", max(memory), "%", "<= 5"),
    ]


def _of(twin: DeviceTwin) -> list[dict[str, object]]:
    name, gib = str(twin.config), 2**30
    sides = (("predicted", twin.predicted), ("measured", twin.measured))
    return [
        *(figure(f"{name}: step {word}", 1e3 * side.step_s, "ms") for word, side in sides),
        *(
            figure(f"{name}: memory {word}", side.peak_memory_bytes / gib, "GiB")
            for word, side in sides
        ),
        *(
            figure(f"{name}: {part} {word}", 1e3 * side.step_breakdown[part], "ms")
            for part in SHOWN_KINDS
            if max(side.step_breakdown[part] for _, side in sides) > 0.005 * twin.measured.step_s
            for word, side in sides
        ),
    ]
