"""Statistics of distributions: read off published curves, or made of samples."""

import json
import re

import numpy as np

from meshwright.errors import InputError
from meshwright.observe.fleet.measures.spread import Curve, curve, curve_of
from meshwright.observe.fleet.measures.windows import Floats, numbered
from meshwright.observe.fleet.published.figure import Basis, Doubt, Figures, figures
from meshwright.observe.fleet.sources.public.array_pickle import read_arrays
from meshwright.observe.fleet.sources.public.columns import number, text
from meshwright.observe.fleet.sources.public.reading import Found

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


def tabled(found: Found) -> Figures:
    """Read quantiles, means and shares off published curves."""
    block = found.part.whole()
    made: Figures = {}
    names = numbered(text(block, "cluster"), text(block, "metric"))
    cluster, metric = text(block, "cluster").to_pylist(), text(block, "metric").to_pylist()
    value, share = number(block, "value"), number(block, "cdf_pct", 0.01)
    for place in range(int(names.max()) + 1):
        chosen = np.flatnonzero(names == place)
        one = curve(value[chosen], share[chosen])
        name = f"{cluster[chosen[0]]}.{metric[chosen[0]]}"
        made |= figures(
            f"{_PATH}.{name}", _of_curve(one, metric[chosen[0]]), _CURVE, found.part.label
        )
    return made


def drawn_durations(found: Found) -> Figures:
    """Read medians of durations off curves that were taken from a figure at powers of two."""
    document = json.loads(found.part.content())
    drawn = document.get("gpu_job_duration_s_cdf_pct", {})
    power = np.log2(np.asarray(drawn.get("x", [])))
    why = Doubt("read off a figure between two powers of two", Basis.OTHER)
    made: Figures = {}
    for cluster, shares in drawn.items():
        if cluster != "x":
            median = float(2 ** curve(power, np.asarray(shares) / 100).between(0.5))
            path = f"acme.cluster_summary_published.{cluster}"
            told = {"med_run_time_gpu": median}
            made |= figures(path, told, "median of a drawn curve", found.part.label, why)
    return made


def _of_curve(one: Curve, metric: str) -> dict[str, float]:
    values = {f"p{share}": one.quantile(share / 100) for share in _QUANTILES}
    values |= {
        "mean_from_cdf": one.mean(),
        "cdf_at_0": 100 * one.at_most(0),
        "cdf_at_5": 100 * one.at_most(5),
    }
    if metric == "gpu_power_w":
        values["share_over_400W_pct"] = 100 * (1 - one.at_most(400))
        values["share_le_70W_pct"] = 100 * one.at_most(70)
    return values


def pickled(found: Found) -> Figures:
    """Read quantiles off the curves of Acme's own pickles; other pickles are left alone."""
    stem = found.part.stem
    cluster = next((name for name in ("seren", "kalos", "philly") if name in stem), "seren")
    names = next((_PICKLED[name] for name in _PICKLED if stem.startswith(name)), ())
    if not names:
        return {}
    try:
        arrays = read_arrays(found.part.content(), found.part.label)
    except InputError:
        return {}
    made: Figures = {}
    for name, value, share in zip(names, arrays[::2], arrays[1::2], strict=False):
        of_full = name == "gpu_util_pct" and stem.endswith("_full")
        path = f"{_PATH}.{cluster.title()}.{name}{'_full' if of_full else ''}"
        one = curve(value, np.asarray(share) / 100)
        made |= figures(path, _of_curve(one, name), _CURVE, found.part.label)
    return made


def side_by_side(found: Found) -> Figures:
    """Make the curve of a metric that many servers or GPUs were sampled for."""
    stem = found.part.stem
    name, scale = next((_SAMPLED[word] for word in _SAMPLED if stem.startswith(word)), ("", 1.0))
    cluster = found.part.path.resolve().parent.name.title()
    return _sampled(found, f"{cluster}.{name}", found.part.columns[1:], scale) if name else {}


def philly_samples(found: Found) -> Figures:
    """Make the curve of Philly's GPUs."""
    names = tuple(name for name in found.part.columns if re.fullmatch(r"gpu\d+_util", name))
    return _sampled(found, "Philly.gpu_util_pct", names, 1.0)


def _sampled(found: Found, name: str, columns: tuple[str, ...], scale: float) -> Figures:
    """Make a curve of all samples; of very many, of every second, fourth or eighth row."""
    kept: list[Floats] = []
    step = 1
    for block in found.part.blocks(columns):
        for column in columns:
            values = number(block, column, scale)[::step]
            kept.append(values[~np.isnan(values)].astype(np.float32))
        if sum(map(len, kept)) > _MOST_SAMPLES:
            kept, step = [values[::2] for values in kept], step * 2
    samples = np.concatenate(kept) if kept else np.zeros(0)
    if not len(samples):
        return {}
    metric = name.partition(".")[2]
    how = f"{_CURVE}, over {'all' if step == 1 else f'every {step}th of'} samples"
    return figures(f"{_PATH}.{name}", _of_curve(curve_of(samples), metric), how, found.part.label)
