"""Statistics of distributions: read off published curves, or made of samples."""

import json
import re

import numpy as np

from meshwright.errors import InputError
from meshwright.fleet.columns import Floats, group_rows
from meshwright.fleet.sources.public_traces.columns import read_numbers, read_text
from meshwright.fleet.sources.public_traces.numpy_pickle import read_arrays
from meshwright.fleet.sources.public_traces.public_trace_source import RecognizedTable
from meshwright.fleet.statistics.distribution import CdfCurve, estimate_cdf, make_cdf
from meshwright.fleet.validation.statistic import (
    StatisticBasis,
    StatisticCaveat,
    Statistics,
    make_statistics,
)

_PATH = "acme.util_quantiles_from_pickles"
_QUANTILES = (10, 25, 50, 75, 90, 99)
_CURVE = "smallest value that such a share of samples does not exceed; share at most a value"
_GPU = ("gpu_util_pct", "gpu_mem_pct_of_80GB", "sm_active_pct", "unlabelled_4", "sm_occupancy_pct")
_PICKLED = {
    "gpu_power": ("gpu_power_w",),
    "gpu_temp": ("gpu_temp_c", "gpu_mem_temp_c"),
    "ib": ("ib_send_raw", "ib_recv_raw"),
    "server_power": ("gpu_server_power_w", "cpu_server_power_w"),
    "util_cpu_mem": ("cpu_util_pct", "host_mem_pct"),
    "util_gpu": _GPU,
}
"""Curves of Acme's pickles in their order: which is which, only the files' names tell."""
_SAMPLED = {
    "NODE_CPU_UTILIZATION": ("cpu_util_pct", 1.0),
    "NODE_MEMORY_UTILIZATION": ("host_mem_pct", 1.0),
    "NODE_IB_SEND": ("ib_send_raw", 1.0),
    "NODE_IB_RECEIVE": ("ib_recv_raw", 1.0),
    "GPU_UTIL": ("gpu_util_pct", 1.0),
    "FB_USED": ("gpu_mem_pct_of_80GB", 100 / (80 * 1024)),
    "SM_ACTIVE": ("sm_active_pct", 1.0),
    "SM_OCCUPANCY": ("sm_occupancy_pct", 1.0),
    "POWER_USAGE": ("gpu_power_w", 1.0),
    "GPU_TEMP": ("gpu_temp_c", 1.0),
    "MEMORY_TEMP": ("gpu_mem_temp_c", 1.0),
}
_MOST_SAMPLES = 100_000_000


def read_curve_tables(found: RecognizedTable) -> Statistics:
    """Read quantiles, means and shares off published curves."""
    block = found.table.read_all()
    made: Statistics = {}
    names = group_rows(read_text(block, "cluster"), read_text(block, "metric"))
    cluster, metric = (
        read_text(block, "cluster").to_pylist(),
        read_text(block, "metric").to_pylist(),
    )
    value, share = read_numbers(block, "value"), read_numbers(block, "cdf_pct", 0.01)
    for place in range(int(names.max()) + 1):
        chosen = np.flatnonzero(names == place)
        one = make_cdf(value[chosen], share[chosen])
        name = f"{cluster[chosen[0]]}.{metric[chosen[0]]}"
        made |= make_statistics(
            f"{_PATH}.{name}", _of_curve(one, metric[chosen[0]]), _CURVE, found.table.label
        )
    return made


def read_sampled_durations(found: RecognizedTable) -> Statistics:
    """Read medians of durations off curves that were taken from a figure at powers of two."""
    document = json.loads(found.table.read_bytes())
    drawn = document.get("gpu_job_duration_s_cdf_pct", {})
    power = np.log2(np.asarray(drawn.get("x", [])))
    why = StatisticCaveat("read off a figure between two powers of two", StatisticBasis.OTHER)
    made: Statistics = {}
    for cluster, shares in drawn.items():
        if cluster != "x":
            median = float(2 ** make_cdf(power, np.asarray(shares) / 100).interpolate_quantile(0.5))
            path = f"acme.cluster_summary_published.{cluster}"
            told = {"med_run_time_gpu": median}
            made |= make_statistics(path, told, "median of a drawn curve", found.table.label, why)
    return made


def _of_curve(one: CdfCurve, metric: str) -> dict[str, float]:
    values = {f"p{share}": one.quantile(share / 100) for share in _QUANTILES}
    values |= {
        "mean_from_cdf": one.mean(),
        "cdf_at_0": 100 * one.cdf(0),
        "cdf_at_5": 100 * one.cdf(5),
    }
    if metric == "gpu_power_w":
        values["share_over_400W_pct"] = 100 * (1 - one.cdf(400))
        values["share_le_70W_pct"] = 100 * one.cdf(70)
    return values


def read_pickled_curves(found: RecognizedTable) -> Statistics:
    """Read quantiles off the curves of Acme's own pickles; other pickles are left alone."""
    stem = found.table.stem
    cluster = next((name for name in ("seren", "kalos", "philly") if name in stem), "seren")
    names = next((_PICKLED[name] for name in _PICKLED if stem.startswith(name)), ())
    if not names:
        return {}
    try:
        arrays = read_arrays(found.table.read_bytes(), found.table.label)
    except InputError:
        return {}
    made: Statistics = {}
    for name, value, share in zip(names, arrays[::2], arrays[1::2], strict=False):
        of_full = name == "gpu_util_pct" and stem.endswith("_full")
        path = f"{_PATH}.{cluster.title()}.{name}{'_full' if of_full else ''}"
        one = make_cdf(value, np.asarray(share) / 100)
        made |= make_statistics(path, _of_curve(one, name), _CURVE, found.table.label)
    return made


def build_wide_table_cdf(found: RecognizedTable) -> Statistics:
    """Make the curve of a metric that many servers or GPUs were sampled for."""
    stem = found.table.stem
    name, scale = next((_SAMPLED[word] for word in _SAMPLED if stem.startswith(word)), ("", 1.0))
    cluster = found.table.path.resolve().parent.name.title()
    return _sampled(found, f"{cluster}.{name}", found.table.columns[1:], scale) if name else {}


def build_philly_cdf(found: RecognizedTable) -> Statistics:
    """Make the curve of Philly's GPUs."""
    names = tuple(name for name in found.table.columns if re.fullmatch(r"gpu\d+_util", name))
    return _sampled(found, "Philly.gpu_util_pct", names, 1.0)


def _sampled(
    found: RecognizedTable, name: str, columns: tuple[str, ...], scale: float
) -> Statistics:
    """Make a curve of all samples; of very many, of every second, fourth or eighth row."""
    kept: list[Floats] = []
    step = 1
    for block in found.table.iter_blocks(columns):
        for column in columns:
            values = read_numbers(block, column, scale)[::step]
            kept.append(values[~np.isnan(values)].astype(np.float32))
        if sum(map(len, kept)) > _MOST_SAMPLES:
            kept, step = [values[::2] for values in kept], step * 2
    samples = np.concatenate(kept) if kept else np.zeros(0)
    if not len(samples):
        return {}
    metric = name.partition(".")[2]
    how = f"{_CURVE}, over {'all' if step == 1 else f'every {step}th of'} samples"
    return make_statistics(
        f"{_PATH}.{name}", _of_curve(estimate_cdf(samples), metric), how, found.table.label
    )
