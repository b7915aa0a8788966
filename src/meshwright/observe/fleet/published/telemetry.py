"""Statistics of samples: idle windows, waiting while idle, workers beside their peers."""

import re

import numpy as np

from meshwright.observe.fleet.measures.levels import pending_while_idle, sampled
from meshwright.observe.fleet.measures.peers import pace, stragglers
from meshwright.observe.fleet.measures.windows import idle_windows, numbered
from meshwright.observe.fleet.published.figure import Figures, figures, spread
from meshwright.observe.fleet.sources.public.columns import GIB, number, seconds, text
from meshwright.observe.fleet.sources.public.reading import Found

_FILES = "alibaba_v2026_genai.files"


def virtual_cluster(found: Found) -> Figures:
    """Tell how much of a virtual cluster was held, and how often jobs waited all the same."""
    block = found.part.whole()
    time = seconds(block, "time")
    total, running = number(block, "total_gpu_num"), number(block, "running_gpu_num")
    pending, idle = number(block, "pending_gpu_num"), number(block, "idle_gpu_num")
    known = total > 0
    values = {
        "rows": block.num_rows,
        "total_gpus": float(total.max()),
        "mean_util": sampled(time[known], running[known] / total[known]).mean(),
        "mean_pending_gpu": sampled(time, pending).mean(),
        "frac_time_pending_while_idle": pending_while_idle(
            sampled(time, pending), sampled(time, idle)
        ),
    }
    named = re.search(r"vc\w{3}$", found.part.stem)
    name = named.group() if named else found.part.path.resolve().parent.name
    how = (
        "over time: GPUs held of all, GPUs waited for, and share of time with both waiting and idle"
    )
    return figures(f"helios.earth_vc_may2020_data.{name}", values, how, found.part.label)


def active_nodes(found: Found) -> Figures:
    """Tell how many nodes of a cluster were active."""
    block = found.part.whole()
    active, total = number(block, "active"), number(block, "total")
    values = {
        "rows": block.num_rows,
        "mean_active": float(active.mean()),
        "total_min": float(total.min()),
        "total_max": float(total.max()),
        "mean_active_frac": float((active / total).mean()),
    }
    return figures("philly.philly_node_sequence", values, "over minutes", found.part.label)


def levels_of_run(found: Found) -> Figures:
    """Average what a cluster did during a run, over time."""
    block = found.part.whole()
    time = number(block, "time")
    columns = {
        "mean_gpu_util": "gpu_util",
        "mean_cpu_util": "cpu_util",
        "mean_queue": "queue_length",
    }
    values = {}
    for name, column in columns.items():
        level = sampled(time, number(block, column))
        values[name] = level._replace(
            time_s=level.time_s[:-1], value=level.value[:-1], end_s=float(time[-1])
        ).mean()
    name = found.part.stem.removeprefix("physical_").removesuffix("_cluster")
    how = "mean over time, each sample holding until the next"
    return figures(f"muri.physical_64gpu_400jobs.{name}", values, how, found.part.label)


def workers(found: Found) -> Figures:
    """Hold workers against their peers: by thirds of the time, and window by window."""
    block = found.part.whole()
    worker, time = number(block, "worker").astype(np.int64), number(block, "time")
    took = number(block, "batch_time_norm")
    numbers = re.findall(r"\d+", found.part.stem)
    job = numbers[0] if numbers else found.part.stem
    path = f"alibaba_v2020.minibatch_stragglers.rel_median_by_third.{job}"
    how = "median of a worker's times over the median of all workers' medians"
    made: Figures = {}
    for names, count in ((("a", "b", "c"), 3), (("all",), 1)):
        one = pace(worker, time, took, windows=count)
        for name, row in zip(names, one.ratio, strict=True):
            ratios = dict(zip(map(str, one.workers), row.tolist(), strict=True))
            made |= figures(f"{path}.{name}", ratios, how, found.part.label)
    slow = stragglers(pace(worker, time, took, windows=20), slower=1.2)
    where = f"alibaba_v2020.minibatch_stragglers.changes.job_{job}"
    values: dict[str, float] = {"windows": len(slow)}
    if slow:
        worst = max(slow, key=lambda one: one.change)
        values |= {"worker": worst.worker, "window": worst.window, "ratio": worst.ratio}
    how = "20 equal windows: 1.2 times its peers and 1.1 times its own usual pace"
    return made | figures(where, values, how, found.part.label)


def variations(found: Found) -> Figures:
    """Tell how unlike the workers of many jobs are: quantiles of jobs' mean variation."""
    block = found.part.whole()
    rows = np.array([number(block, name) for name in block.column_names[1:]])
    means = np.nanmean(rows, axis=0)
    values = {str(place): float(np.quantile(means, share))
              for place, share in enumerate((0.1, 0.5, 0.9))}  # fmt: skip
    path = "alibaba_v2020.minibatch_stragglers"
    how = "quantiles over jobs of the mean coefficient of variation"
    return figures(f"{path}.cov_job_mean_p10_p50_p90", values, how, found.part.label) | figures(
        path, {"cov_jobs": len(means)}, "jobs", found.part.label
    )


def pod_metric(found: Found) -> Figures:
    """Summarise one metric of pods."""
    block = found.part.whole()
    value, time = number(block, "value"), number(block, "timestamp_anon")
    pods = {pod for pod in text(block, "container_ip").to_pylist() if pod}
    values = spread(value) | {
        "rows": block.num_rows,
        "containers": len(pods),
        "span_h": float(time.max() - time.min()) / 3600,
    }
    values.pop("p99", None)
    path = f"{_FILES}.{found.part.path.name}:{found.part.member or found.part.path.name}"
    return figures(path, values, "over all samples", found.part.label)


def rows_only(found: Found) -> Figures:
    """Count the rows of a table that is otherwise not looked into."""
    path = f"{_FILES}.{found.part.path.name}:{found.part.member or found.part.path.name}"
    return figures(path, {"rows": found.part.whole().num_rows}, "rows", found.part.label)


def idle_pods(activity: Found, memory: Found | None) -> Figures:
    """Tell how long pods held a GPU that did nothing."""
    block = activity.part.whole()
    pod, time = numbered(text(block, "container_ip")), number(block, "timestamp_anon")
    value = number(block, "value")
    count = np.bincount(pod)
    first, last = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(first, pod, time)
    np.maximum.at(last, pod, time)
    nought = np.bincount(pod, weights=value == 0) / count
    mean = np.bincount(pod, weights=value) / count
    windows = idle_windows(pod, time, value)
    order = np.lexsort((time, pod))
    steps = np.diff(time[order])[np.diff(pod[order]) == 0]
    values = {
        "sample_interval_s_median": float(np.median(steps)),
        "pods": len(count),
        "pod_hours": float((last - first).sum()) / 3600,
        "idle_pod_hours_zero_samples": float(((last - first) * nought).sum()) / 3600,
        "mean_util": float(value.mean()),
        "zero_sample_share": float((value == 0).mean()),
        "pods_mean_below_5": int((mean < 5).sum()),
        "pods_never_active": int((nought == 1).sum()),
        "idle_windows_ge30min": len(windows.start_s),
        "idle_hours_in_windows_ge30min": windows.hours,
    }
    if memory is not None:
        names = text(block, "container_ip").dictionary_encode().dictionary.to_pylist()
        held = _mean_by_pod(memory)
        low = [name for name, one in zip(names, mean, strict=True) if one < 5]
        values["pods_below5_and_mem_over_10GiB"] = sum(held.get(name, 0) > 10 * GIB for name in low)
    how = "noughts without a gap over 300 s, for 1800 s and more, from first sample to last"
    return figures("alibaba_v2026_genai.idle_held", values, how, activity.part.label)


def _mean_by_pod(found: Found) -> dict[str, float]:
    block = found.part.whole()
    names = text(block, "container_ip").dictionary_encode()
    pod = numbered(text(block, "container_ip"))
    means = np.bincount(pod, weights=number(block, "value")) / np.bincount(pod)
    return dict(zip(names.dictionary.to_pylist(), means.tolist(), strict=False))
