"""Statistics of clusters from their lists of jobs, or from those of their parts."""

import numpy as np
import pyarrow as pa

from meshwright.fleet.columns import Floats, group_rows
from meshwright.fleet.sources.public_traces import pai, philly
from meshwright.fleet.sources.public_traces.columns import (
    read_numbers,
    read_states,
    read_text,
    read_times,
)
from meshwright.fleet.sources.public_traces.public_trace_source import (
    RecognizedTable,
    parse_cluster_name,
)
from meshwright.fleet.sources.public_traces.trace_files import TraceTable
from meshwright.fleet.sources.public_traces.trace_format import ReadContext
from meshwright.fleet.statistics.distribution import share_by_group
from meshwright.fleet.validation.job_summary import JobSet, compute_gpu_time_share, summarize_jobs
from meshwright.fleet.validation.statistic import (
    StatisticBasis,
    StatisticCaveat,
    Statistics,
    count_values,
    make_statistics,
)

_JOBS = (
    "over jobs by the trace's own duration and queue columns; what neither completed nor was "
    "cancelled failed"
)
_ATTEMPT = ("attempt", "ascending")
_HELIOS = ("Venus", "Earth", "Saturn", "Uranus")
_FIG4 = {"Seren": "seren", "Kalos": "kalos"}
_ACME = "acme.cluster_summary_published"
_ROUNDED = StatisticCaveat(
    "it is made of figures that were printed rounded, or that do not add up as printed",
    StatisticBasis.FIGURES,
)
_COPY = StatisticCaveat("the copy holds 82,247 of the 112,956 jobs", StatisticBasis.OTHER)


def summarize_acme_jobs(found: RecognizedTable) -> Statistics:
    """Summarise a list of jobs of Acme."""
    block, cluster = found.table.read_all(), found.format.cluster
    jobs = read_job_set(block)
    path = f"{_ACME}.{cluster}"
    made = make_statistics(path, summarize_jobs(jobs), _JOBS, found.table.label)
    on_gpus = np.asarray(jobs.gpus > 0)
    kinds = np.asarray(read_text(block, "type").fill_null("unknown").to_pylist(), dtype=str)[
        on_gpus
    ]
    for name, weight in (("job_count", None), ("gpu_time", jobs.gpu_s[on_gpus])):
        shares = {kind: 100 * share for kind, share in share_by_group(kinds, weight).items()}
        where = f"acme.fig4_shares_from_repo_pdf.{_FIG4.get(cluster, cluster)}_{name}_pct"
        made |= make_statistics(
            where, shares, f"share of GPU jobs' {name} by kind", found.table.label
        )
    path = f"acme.jobs.{cluster}"
    run_s = jobs.run_s[on_gpus]
    sizes = {
        "gpu_time_ge256_pct": 100 * compute_gpu_time_share(jobs, 256),
        "gpu_time_1gpu_pct": 100 * compute_gpu_time_share(jobs, 1, 2),
        "pretrain_over_a_day_pct": 100 * _share_over(run_s[kinds == "Pretrain"], 86_400),
    }
    made |= make_statistics(path, sizes, "over GPU jobs", found.table.label)
    if cluster == "Kalos":
        states = count_values(read_text(block, "state").to_pylist())
        where = "acme.kalos_all_job_states_thirdparty"
        states["total"] = block.num_rows
        made |= make_statistics(where, states, "jobs by state", found.table.label)
    return made


def _share_over(run_s: Floats, limit_s: float) -> float:
    known = run_s[~np.isnan(run_s)]
    return float((known > limit_s).mean()) if len(known) else float("nan")


def summarize_helios_jobs(found: RecognizedTable) -> Statistics:
    """Summarise a list of jobs of one of Helios' clusters."""
    cluster = parse_cluster_name(found.table)
    values = summarize_jobs(read_job_set(found.table.read_all()))
    paths = [f"{_ACME}.{cluster}", f"helios.cluster_summary_published.{cluster}"]
    if cluster == "Philly":
        paths.append("philly.published_row")
    made: Statistics = {}
    for path in paths:
        made |= make_statistics(path, values, _JOBS, found.table.label)
    return made


def summarize_philly_jobs(found: RecognizedTable) -> Statistics:
    """Summarise Philly as its authors do: jobs that ran, from their first start to their last end.

    A job has the GPUs of its first attempt, and waited until that began.
    """
    told = ReadContext("Philly", 0.0, found.table)
    table = philly.read_jobs(found.table, told)["jobs"].sort_by([("job", "ascending"), _ATTEMPT])
    job = group_rows(table["job"])
    first = np.flatnonzero(np.append(True, job[1:] != job[:-1]))
    last = np.append(first[1:], len(job)) - 1
    start, gpus = _array(table["start_s"])[first], _array(table["gpus"])[first]
    run, wait = _array(table["end_s"])[last] - start, start - _array(table["submit_s"])[first]
    ended = np.asarray(table["state"].to_pylist(), dtype=str)[last]
    ran = ~np.isnan(run) & (gpus > 0)
    values = summarize_jobs(JobSet(gpus, run, wait, ended).select(ran))
    how = "over jobs that ran: GPUs of the first attempt, first start to last end"
    made: Statistics = {}
    for path in ("philly.published_row", f"{_ACME}.Philly"):
        made |= make_statistics(path, values, how, found.table.label)
    return made


def summarize_helios_capacity(found: RecognizedTable) -> Statistics:
    """Average how many GPUs a cluster had over the days."""
    gpus = read_numbers(found.table.read_all(), "total")
    path = f"helios.cluster_summary_published.{parse_cluster_name(found.table)}"
    why = StatisticCaveat("printed without its fraction")
    how = "mean over days of the GPUs of all virtual clusters"
    return make_statistics(path, {"gpu_num": float(np.nanmean(gpus))}, how, found.table.label, why)


def summarize_summary_table(found: RecognizedTable) -> Statistics:
    """Work out what follows from a table of summaries: sums, means over parts, and shares."""
    block = found.table.read_all()
    rows = {
        name: {
            column: float(read_numbers(block, column)[place]) for column in block.column_names[1:]
        }
        for place, name in enumerate(read_text(block, "id").to_pylist())
    }
    of_helios = set(_HELIOS) <= set(rows)
    path = "helios" if of_helios else "acme"
    made: Statistics = {}
    for name, row in rows.items():
        where = f"{path}.cluster_summary_published.{name}"
        how = "from the other figures of the same row"
        made |= make_statistics(where, _following(row), how, found.table.label, _ROUNDED)
    if of_helios:
        whole = _together([rows[name] for name in _HELIOS])
        how = "from the rows of the four clusters: sums, and means by their jobs"
        for where in ("helios.cluster_summary_published.total", f"{_ACME}.Helios"):
            made |= make_statistics(where, whole, how, found.table.label, _ROUNDED)
        hours = sum(whole[f"{end}_gpu_time"] for end in ("complete", "cancel", "fail")) / 3600
        total = {"gpu_hours_total": hours}
        made |= make_statistics("helios", total, how, found.table.label, _ROUNDED)
    return made


def _following(row: dict[str, float]) -> dict[str, float]:
    """Return the figures of a row that its others determine."""
    found = {"cpu_job_num": row["job_num"] - row["gpu_job_num"]}
    ends = ("complete", "cancel", "fail")
    whole = sum(row.get(f"{end}_gpu_time", np.nan) for end in ends)
    if "complete_rate_gpu_time" in row:
        found |= {f"{end}_rate_gpu_time": row[f"{end}_gpu_time"] / whole for end in ends}
    for part in ("gpu", "cpu"):
        if f"complete_rate_{part}" in row:
            others = row[f"complete_rate_{part}"] + row[f"cancel_rate_{part}"]
            found[f"fail_rate_{part}"] = 1 - others
    if "complete_rate" in row:
        for end in ends:
            both = sum(
                row[f"{end}_rate_{part}"] * row[f"{part}_job_num"] for part in ("cpu", "gpu")
            )
            found[f"{end}_rate"] = both / row["job_num"]
    return found


def _together(rows: list[dict[str, float]]) -> dict[str, float]:
    """Put clusters together: counts and GPU time add up, means and rates are weighed by jobs."""
    found: dict[str, float] = {}
    for column in rows[0]:
        values = np.array([row[column] for row in rows])
        if column.endswith(("_num", "_gpu_time")) and not column.startswith(("avg", "med")):
            found[column] = float(values.sum())
        elif column.startswith(("avg_", "complete_rate", "cancel_rate", "fail_rate")):
            of = "cpu" if column.endswith("_cpu") else "gpu" if "gpu" in column else ""
            weight = np.array([row[f"{of}_job_num" if of else "job_num"] for row in rows])
            found[column] = float((values * weight).sum() / weight.sum())
    return found


def summarize_philly_durations(found: RecognizedTable) -> Statistics:
    """Summarise the copy of Philly that tells durations alone."""
    block = found.table.read_all()
    run, gpus = read_numbers(block, "duration"), read_numbers(block, "num_gpus")
    jobs = JobSet(gpus, run, np.full(len(run), np.nan), np.full(len(run), "unknown"))
    values = {
        "rows": block.num_rows,
        "vcs": len(set(read_text(block, "cluster").to_pylist())),
        "gpu_hours": float(np.nansum(jobs.gpu_s)) / 3600,
        "mean_duration_s": float(np.nanmean(run)),
        "median_duration_s": float(np.nanmedian(run)),
        "p90": float(np.nanquantile(run, 0.9)),
        "max_gpus": float(np.nanmax(gpus)),
        "mean_gpus": float(np.nanmean(gpus)),
        "share_1gpu_jobs": float((gpus == 1).mean()),
        "share_gpu_time_ge8": compute_gpu_time_share(jobs, 8),
        "zero_dur": int((run == 0).sum()),
    }
    made = make_statistics(
        "philly.philly_sia_csv", values, "over the rows of the copy", found.table.label
    )
    known = ("job_num", "gpu_job_num", "cpu_job_num", "avg_run_time_gpu", "med_run_time_gpu",
             "max_run_time_gpu", "avg_gpu_num", "med_gpu_num", "max_gpu")  # fmt: skip
    whole = summarize_jobs(jobs)
    told = {name: whole[name] for name in known}
    for path in ("philly.published_row", f"{_ACME}.Philly"):
        made |= make_statistics(path, told, _JOBS, found.table.label, _COPY)
    return made


def summarize_runtimes(found: RecognizedTable) -> Statistics:
    """Summarise a list of nothing but runtimes."""
    run = read_numbers(found.table.read_all(), "runtime")
    values = {"rows": len(run), "median": float(np.median(run)), "mean": float(run.mean())}
    return make_statistics("philly.philly_runtime_csv", values, "over all rows", found.table.label)


def summarize_workload(found: RecognizedTable) -> Statistics:
    """Summarise a simulator's workload by the load that it offers to 64 GPUs."""
    block = found.table.read_all()
    run, gpus = read_numbers(block, "duration", 1e-3), read_numbers(block, "num_gpu")
    submit = read_numbers(block, "submit_time", 1e-3)
    hours, span = float((run * gpus).sum()) / 3600, float(submit.max() - submit.min()) / 3600
    values = {"jobs": len(run), "gpu_hours": hours, "span_h": span, "max_gpu": float(gpus.max())}
    if span:
        values["offered_load_64"] = hours / span / 64
    name = found.table.stem.removeprefix("sim_")
    how = "GPU-hours asked for, from the first submission to the last, over 64 GPUs"
    return make_statistics(
        f"muri.reference_replay_ours.results.{name}", values, how, found.table.label
    )


def summarize_finished_run(found: RecognizedTable) -> Statistics:
    """Summarise jobs that ran on a real cluster."""
    block = found.table.read_all()
    jct, end = read_numbers(block, "JCT"), read_numbers(block, "end_time")
    values = {
        "jobs": len(jct),
        "avg_JCT_s": float(jct.mean()),
        "p99_JCT_s": float(np.quantile(jct, 0.99)),
        "makespan_s": float(end.max() - read_numbers(block, "submit_time").min()),
        "avg_pending_s": float(read_numbers(block, "pending_time").mean()),
    }
    name = found.table.stem.removeprefix("physical_").removesuffix("_job")
    how = "over jobs, from submission to completion"
    return make_statistics(f"muri.physical_64gpu_400jobs.{name}", values, how, found.table.label)


def summarize_pai_tasks(found: list[RecognizedTable]) -> Statistics:
    """Summarise PAI by task as its authors do: the share of a GPU that an instance plans for.

    Runtime is the mean of a task's instances, and its wait is until the first of them starts.
    """
    parts = {one.format.name: one.table for one in found}
    tasks = pai.read_tasks(parts[pai.TASK_FORMAT.name])
    task = ["job_name", "task_name"]
    joined = tasks.join(_instances(parts[pai.INSTANCE_FORMAT.name]), task, join_type="inner")
    words = read_states(joined, "status")
    wait = _array(joined["first"]) - _array(joined["start_s"])
    with np.errstate(invalid="ignore"):
        run = _array(joined["run"]) / _array(joined["runs"])
    jobs = JobSet(_array(joined["gpu_fraction"]), run, wait, np.asarray(words.to_pylist()))
    # How tasks end is not among what was published of it.
    values = {name: value for name, value in summarize_jobs(jobs).items() if "rate" not in name}
    values["cpu_job_num"] = np.nan
    label = parts[pai.TASK_FORMAT.name].label
    how = "by task: mean runtime of its instances, share of a GPU that one plans for"
    return make_statistics(f"{_ACME}.PAI", values, how, label) | make_statistics(
        "alibaba_v2020.pai_published_row", values, how, label
    )


def _instances(part: TraceTable) -> pa.Table:
    """Add up the instances of each task, block by block: there are millions."""
    task = ["job_name", "task_name"]
    sums = [("run", "sum"), ("runs", "sum"), ("first", "min")]
    partial = []
    for block in part.iter_blocks((*task, "start_time", "end_time")):
        start, end = read_numbers(block, "start_time"), read_numbers(block, "end_time")
        known = (start > 0) & (end > 0)
        rows = pa.table(
            {
                "job_name": read_text(block, "job_name"),
                "task_name": read_text(block, "task_name"),
                "run": np.where(known, end - start, 0.0),
                "runs": known.astype(np.float64),
                "first": pa.array(np.where(start > 0, start, np.nan), from_pandas=True),
            }
        )
        partial.append(_grouped(rows, task, sums))
    return _grouped(pa.concat_tables(partial), task, sums)


def _grouped(rows: pa.Table, by: list[str], sums: list[tuple[str, str]]) -> pa.Table:
    found = rows.group_by(by).aggregate(sums)
    return found.select([*by, *(f"{name}_{how}" for name, how in sums)]).rename_columns(
        [*by, *(name for name, _ in sums)]
    )


def read_job_set(block: pa.Table) -> JobSet:
    """Take jobs by what their list says of them: its own duration and queue, where it has them."""
    run, wait = read_numbers(block, "duration"), read_numbers(block, "queue")
    start = read_times(block, "start_time")
    run = np.where(np.isnan(run), read_times(block, "end_time") - start, run)
    wait = np.where(np.isnan(wait), start - read_times(block, "submit_time"), wait)
    return JobSet(
        read_numbers(block, "gpu_num"),
        run,
        wait,
        np.asarray(read_states(block, "state").to_pylist()),
    )


def _array(column: pa.ChunkedArray) -> Floats:
    return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
