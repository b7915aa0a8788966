"""Statistics of samples: idle windows, waiting while idle, workers beside their peers."""

import re

import numpy as np

from meshwright.fleet.columns import group_rows
from meshwright.fleet.sources.public_traces.columns import GIB, read_numbers, read_text, read_times
from meshwright.fleet.sources.public_traces.public_trace_source import RecognizedTable
from meshwright.fleet.statistics.intervals import find_idle_intervals
from meshwright.fleet.statistics.step_function import (
    build_step_function,
    measure_pending_while_idle,
)
from meshwright.fleet.statistics.stragglers import compare_pace, find_stragglers
from meshwright.fleet.validation.statistic import Statistics, make_statistics, summarize_samples

_FILES = "alibaba_v2026_genai.files"


def summarize_virtual_cluster(found: RecognizedTable) -> Statistics:
    """Tell how much of a virtual cluster was held, and how often jobs waited all the same."""
    block = found.table.read_all()
    time = read_times(block, "time")
    total, running = read_numbers(block, "total_gpu_num"), read_numbers(block, "running_gpu_num")
    pending, idle = read_numbers(block, "pending_gpu_num"), read_numbers(block, "idle_gpu_num")
    known = total > 0
    values = {
        "rows": block.num_rows,
        "total_gpus": float(total.max()),
        "mean_util": build_step_function(time[known], running[known] / total[known]).mean(),
        "mean_pending_gpu": build_step_function(time, pending).mean(),
        "frac_time_pending_while_idle": measure_pending_while_idle(
            build_step_function(time, pending), build_step_function(time, idle)
        ),
    }
    named = re.search(r"vc\w{3}$", found.table.stem)
    name = named.group() if named else found.table.path.resolve().parent.name
    how = (
        "over time: GPUs held of all, GPUs waited for, and share of time with both waiting and idle"
    )
    return make_statistics(f"helios.earth_vc_may2020_data.{name}", values, how, found.table.label)


def summarize_active_nodes(found: RecognizedTable) -> Statistics:
    """Tell how many nodes of a cluster were active."""
    block = found.table.read_all()
    active, total = read_numbers(block, "active"), read_numbers(block, "total")
    values = {
        "rows": block.num_rows,
        "mean_active": float(active.mean()),
        "total_min": float(total.min()),
        "total_max": float(total.max()),
        "mean_active_frac": float((active / total).mean()),
    }
    return make_statistics("philly.philly_node_sequence", values, "over minutes", found.table.label)


def average_run_levels(found: RecognizedTable) -> Statistics:
    """Average what a cluster did during a run, over time."""
    block = found.table.read_all()
    time = read_numbers(block, "time")
    columns = {
        "mean_gpu_util": "gpu_util",
        "mean_cpu_util": "cpu_util",
        "mean_queue": "queue_length",
    }
    values = {}
    for name, column in columns.items():
        level = build_step_function(time, read_numbers(block, column))
        values[name] = level._replace(
            time_s=level.time_s[:-1], value=level.value[:-1], end_s=float(time[-1])
        ).mean()
    name = found.table.stem.removeprefix("physical_").removesuffix("_cluster")
    how = "mean over time, each sample holding until the next"
    return make_statistics(f"muri.physical_64gpu_400jobs.{name}", values, how, found.table.label)


def compare_workers(found: RecognizedTable) -> Statistics:
    """Hold workers against their peers: by thirds of the time, and window by window."""
    block = found.table.read_all()
    worker, time = read_numbers(block, "worker").astype(np.int64), read_numbers(block, "time")
    took = read_numbers(block, "batch_time_norm")
    numbers = re.findall(r"\d+", found.table.stem)
    job = numbers[0] if numbers else found.table.stem
    path = f"alibaba_v2020.minibatch_stragglers.rel_median_by_third.{job}"
    how = "median of a worker's times over the median of all workers' medians"
    made: Statistics = {}
    for names, count in ((("a", "b", "c"), 3), (("all",), 1)):
        one = compare_pace(worker, time, took, windows=count)
        for name, row in zip(names, one.ratio, strict=True):
            ratios = dict(zip(map(str, one.workers), row.tolist(), strict=True))
            made |= make_statistics(f"{path}.{name}", ratios, how, found.table.label)
    slow = find_stragglers(compare_pace(worker, time, took, windows=20), slower=1.2)
    where = f"alibaba_v2020.minibatch_stragglers.changes.job_{job}"
    values: dict[str, float] = {"windows": len(slow)}
    if slow:
        worst = max(slow, key=lambda one: one.ratio_to_own_median)
        values |= {
            "worker": worst.worker,
            "window": worst.window_index,
            "ratio": worst.ratio_to_peers,
        }
    how = "20 equal windows: 1.2 times its peers and 1.1 times its own usual pace"
    return made | make_statistics(where, values, how, found.table.label)


def measure_variation(found: RecognizedTable) -> Statistics:
    """Tell how unlike the workers of many jobs are: quantiles of jobs' mean variation."""
    block = found.table.read_all()
    rows = np.array([read_numbers(block, name) for name in block.column_names[1:]])
    means = np.nanmean(rows, axis=0)
    values = {str(place): float(np.quantile(means, share))
              for place, share in enumerate((0.1, 0.5, 0.9))}  # fmt: skip
    path = "alibaba_v2020.minibatch_stragglers"
    how = "quantiles over jobs of the mean coefficient of variation"
    return make_statistics(
        f"{path}.cov_job_mean_p10_p50_p90", values, how, found.table.label
    ) | make_statistics(path, {"cov_jobs": len(means)}, "jobs", found.table.label)


def summarize_pod_metric(found: RecognizedTable) -> Statistics:
    """Summarise one metric of pods."""
    block = found.table.read_all()
    value, time = read_numbers(block, "value"), read_numbers(block, "timestamp_anon")
    pods = {pod for pod in read_text(block, "container_ip").to_pylist() if pod}
    values = summarize_samples(value) | {
        "rows": block.num_rows,
        "containers": len(pods),
        "span_h": float(time.max() - time.min()) / 3600,
    }
    values.pop("p99", None)
    path = f"{_FILES}.{found.table.path.name}:{found.table.member or found.table.path.name}"
    return make_statistics(path, values, "over all samples", found.table.label)


def count_rows(found: RecognizedTable) -> Statistics:
    """Count the rows of a table that is otherwise not looked into."""
    path = f"{_FILES}.{found.table.path.name}:{found.table.member or found.table.path.name}"
    return make_statistics(
        path, {"rows": found.table.read_all().num_rows}, "rows", found.table.label
    )


def measure_idle_pods(activity: RecognizedTable, memory: RecognizedTable | None) -> Statistics:
    """Tell how long pods held a GPU that did nothing."""
    block = activity.table.read_all()
    pod, time = group_rows(read_text(block, "container_ip")), read_numbers(block, "timestamp_anon")
    value = read_numbers(block, "value")
    count = np.bincount(pod)
    first, last = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(first, pod, time)
    np.maximum.at(last, pod, time)
    nought = np.bincount(pod, weights=value == 0) / count
    mean = np.bincount(pod, weights=value) / count
    windows = find_idle_intervals(pod, time, value)
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
        "idle_hours_in_windows_ge30min": windows.total_hours,
    }
    if memory is not None:
        names = read_text(block, "container_ip").dictionary_encode().dictionary.to_pylist()
        held = _mean_by_pod(memory)
        low = [name for name, one in zip(names, mean, strict=True) if one < 5]
        values["pods_below5_and_mem_over_10GiB"] = sum(held.get(name, 0) > 10 * GIB for name in low)
    how = "noughts without a gap over 300 s, for 1800 s and more, from first sample to last"
    return make_statistics("alibaba_v2026_genai.idle_held", values, how, activity.table.label)


def _mean_by_pod(found: RecognizedTable) -> dict[str, float]:
    block = found.table.read_all()
    names = read_text(block, "container_ip").dictionary_encode()
    pod = group_rows(read_text(block, "container_ip"))
    means = np.bincount(pod, weights=read_numbers(block, "value")) / np.bincount(pod)
    return dict(zip(names.dictionary.to_pylist(), means.tolist(), strict=False))
