"""Statistics of clusters from their lists of jobs, or from those of their parts."""

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.measures.jobs import Jobs, share_of_gpu_time, summary
from meshwright.observe.fleet.measures.spread import share_by
from meshwright.observe.fleet.measures.windows import Floats, numbered
from meshwright.observe.fleet.published.figure import Basis, Doubt, Figures, counts, figures
from meshwright.observe.fleet.sources.public import pai, philly
from meshwright.observe.fleet.sources.public.columns import number, seconds, state, text
from meshwright.observe.fleet.sources.public.files import Part
from meshwright.observe.fleet.sources.public.form import Told
from meshwright.observe.fleet.sources.public.reading import Found, named

_JOBS = (
    "over jobs by the trace's own duration and queue columns; what neither completed nor was "
    "cancelled failed"
)
_ATTEMPT = ("attempt", "ascending")
_HELIOS = ("Venus", "Earth", "Saturn", "Uranus")
_FIG4 = {"Seren": "seren", "Kalos": "kalos"}
_ACME = "acme.cluster_summary_published"
_ROUNDED = Doubt(
    "it is made of figures that were printed rounded, or that do not add up as printed",
    Basis.FIGURES,
)
_COPY = Doubt("the copy holds 82,247 of the 112,956 jobs", Basis.OTHER)


def acme_jobs(found: Found) -> Figures:
    """Summarise a list of jobs of Acme."""
    block, cluster = found.part.whole(), found.form.cluster
    jobs = listed(block)
    path = f"{_ACME}.{cluster}"
    made = figures(path, summary(jobs), _JOBS, found.part.label)
    on_gpus = np.asarray(jobs.gpus > 0)
    kinds = np.asarray(text(block, "type").fill_null("unknown").to_pylist(), dtype=str)[on_gpus]
    for name, weight in (("job_count", None), ("gpu_time", jobs.gpu_s[on_gpus])):
        shares = {kind: 100 * share for kind, share in share_by(kinds, weight).items()}
        where = f"acme.fig4_shares_from_repo_pdf.{_FIG4.get(cluster, cluster)}_{name}_pct"
        made |= figures(where, shares, f"share of GPU jobs' {name} by kind", found.part.label)
    path = f"acme.jobs.{cluster}"
    run_s = jobs.run_s[on_gpus]
    sizes = {
        "gpu_time_ge256_pct": 100 * share_of_gpu_time(jobs, 256),
        "gpu_time_1gpu_pct": 100 * share_of_gpu_time(jobs, 1, 2),
        "pretrain_over_a_day_pct": 100 * _share_over(run_s[kinds == "Pretrain"], 86_400),
    }
    made |= figures(path, sizes, "over GPU jobs", found.part.label)
    if cluster == "Kalos":
        states = counts(text(block, "state").to_pylist())
        where = "acme.kalos_all_job_states_thirdparty"
        states["total"] = block.num_rows
        made |= figures(where, states, "jobs by state", found.part.label)
    return made


def _share_over(run_s: Floats, limit_s: float) -> float:
    known = run_s[~np.isnan(run_s)]
    return float((known > limit_s).mean()) if len(known) else float("nan")


def helios_jobs(found: Found) -> Figures:
    """Summarise a list of jobs of one of Helios' clusters."""
    cluster = named(found.part)
    values = summary(listed(found.part.whole()))
    paths = [f"{_ACME}.{cluster}", f"helios.cluster_summary_published.{cluster}"]
    if cluster == "Philly":
        paths.append("philly.published_row")
    made: Figures = {}
    for path in paths:
        made |= figures(path, values, _JOBS, found.part.label)
    return made


def philly_jobs(found: Found) -> Figures:
    """Summarise Philly as its authors do: jobs that ran, from their first start to their last end.

    A job has the GPUs of its first attempt, and waited until that began.
    """
    told = Told("Philly", 0.0, found.part)
    table = philly.read_jobs(found.part, told)["jobs"].sort_by([("job", "ascending"), _ATTEMPT])
    job = numbered(table["job"])
    first = np.flatnonzero(np.append(True, job[1:] != job[:-1]))
    last = np.append(first[1:], len(job)) - 1
    start, gpus = _array(table["start_s"])[first], _array(table["gpus"])[first]
    run, wait = _array(table["end_s"])[last] - start, start - _array(table["submit_s"])[first]
    ended = np.asarray(table["state"].to_pylist(), dtype=str)[last]
    ran = ~np.isnan(run) & (gpus > 0)
    values = summary(Jobs(gpus, run, wait, ended).where(ran))
    how = "over jobs that ran: GPUs of the first attempt, first start to last end"
    made: Figures = {}
    for path in ("philly.published_row", f"{_ACME}.Philly"):
        made |= figures(path, values, how, found.part.label)
    return made


def helios_capacity(found: Found) -> Figures:
    """Average how many GPUs a cluster had over the days."""
    gpus = number(found.part.whole(), "total")
    path = f"helios.cluster_summary_published.{named(found.part)}"
    why = Doubt("printed without its fraction")
    how = "mean over days of the GPUs of all virtual clusters"
    return figures(path, {"gpu_num": float(np.nanmean(gpus))}, how, found.part.label, why)


def summaries(found: Found) -> Figures:
    """Work out what follows from a table of summaries: sums, means over parts, and shares."""
    block = found.part.whole()
    rows = {
        name: {column: float(number(block, column)[place]) for column in block.column_names[1:]}
        for place, name in enumerate(text(block, "id").to_pylist())
    }
    of_helios = set(_HELIOS) <= set(rows)
    path = "helios" if of_helios else "acme"
    made: Figures = {}
    for name, row in rows.items():
        where = f"{path}.cluster_summary_published.{name}"
        how = "from the other figures of the same row"
        made |= figures(where, _following(row), how, found.part.label, _ROUNDED)
    if of_helios:
        whole = _together([rows[name] for name in _HELIOS])
        how = "from the rows of the four clusters: sums, and means by their jobs"
        for where in ("helios.cluster_summary_published.total", f"{_ACME}.Helios"):
            made |= figures(where, whole, how, found.part.label, _ROUNDED)
        hours = sum(whole[f"{end}_gpu_time"] for end in ("complete", "cancel", "fail")) / 3600
        total = {"gpu_hours_total": hours}
        made |= figures("helios", total, how, found.part.label, _ROUNDED)
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


def philly_durations(found: Found) -> Figures:
    """Summarise the copy of Philly that tells durations alone."""
    block = found.part.whole()
    run, gpus = number(block, "duration"), number(block, "num_gpus")
    jobs = Jobs(gpus, run, np.full(len(run), np.nan), np.full(len(run), "unknown"))
    values = {
        "rows": block.num_rows,
        "vcs": len(set(text(block, "cluster").to_pylist())),
        "gpu_hours": float(np.nansum(jobs.gpu_s)) / 3600,
        "mean_duration_s": float(np.nanmean(run)),
        "median_duration_s": float(np.nanmedian(run)),
        "p90": float(np.nanquantile(run, 0.9)),
        "max_gpus": float(np.nanmax(gpus)),
        "mean_gpus": float(np.nanmean(gpus)),
        "share_1gpu_jobs": float((gpus == 1).mean()),
        "share_gpu_time_ge8": share_of_gpu_time(jobs, 8),
        "zero_dur": int((run == 0).sum()),
    }
    made = figures("philly.philly_sia_csv", values, "over the rows of the copy", found.part.label)
    known = ("job_num", "gpu_job_num", "cpu_job_num", "avg_run_time_gpu", "med_run_time_gpu",
             "max_run_time_gpu", "avg_gpu_num", "med_gpu_num", "max_gpu")  # fmt: skip
    whole = summary(jobs)
    told = {name: whole[name] for name in known}
    for path in ("philly.published_row", f"{_ACME}.Philly"):
        made |= figures(path, told, _JOBS, found.part.label, _COPY)
    return made


def runtimes(found: Found) -> Figures:
    """Summarise a list of nothing but runtimes."""
    run = number(found.part.whole(), "runtime")
    values = {"rows": len(run), "median": float(np.median(run)), "mean": float(run.mean())}
    return figures("philly.philly_runtime_csv", values, "over all rows", found.part.label)


def workload(found: Found) -> Figures:
    """Summarise a simulator's workload by the load that it offers to 64 GPUs."""
    block = found.part.whole()
    run, gpus = number(block, "duration", 1e-3), number(block, "num_gpu")
    submit = number(block, "submit_time", 1e-3)
    hours, span = float((run * gpus).sum()) / 3600, float(submit.max() - submit.min()) / 3600
    values = {"jobs": len(run), "gpu_hours": hours, "span_h": span, "max_gpu": float(gpus.max())}
    if span:
        values["offered_load_64"] = hours / span / 64
    name = found.part.stem.removeprefix("sim_")
    how = "GPU-hours asked for, from the first submission to the last, over 64 GPUs"
    return figures(f"muri.reference_replay_ours.results.{name}", values, how, found.part.label)


def finished_run(found: Found) -> Figures:
    """Summarise jobs that ran on a real cluster."""
    block = found.part.whole()
    jct, end = number(block, "JCT"), number(block, "end_time")
    values = {
        "jobs": len(jct),
        "avg_JCT_s": float(jct.mean()),
        "p99_JCT_s": float(np.quantile(jct, 0.99)),
        "makespan_s": float(end.max() - number(block, "submit_time").min()),
        "avg_pending_s": float(number(block, "pending_time").mean()),
    }
    name = found.part.stem.removeprefix("physical_").removesuffix("_job")
    how = "over jobs, from submission to completion"
    return figures(f"muri.physical_64gpu_400jobs.{name}", values, how, found.part.label)


def pai_tasks(found: list[Found]) -> Figures:
    """Summarise PAI by task as its authors do: the share of a GPU that an instance plans for.

    Runtime is the mean of a task's instances, and its wait is until the first of them starts.
    """
    parts = {one.form.name: one.part for one in found}
    tasks = pai.tasks_of(parts[pai.TASK.name])
    task = ["job_name", "task_name"]
    joined = tasks.join(_instances(parts[pai.INSTANCE.name]), task, join_type="inner")
    words = state(joined, "status")
    wait = _array(joined["first"]) - _array(joined["start_s"])
    with np.errstate(invalid="ignore"):
        run = _array(joined["run"]) / _array(joined["runs"])
    jobs = Jobs(_array(joined["share"]), run, wait, np.asarray(words.to_pylist()))
    # How tasks end is not among what was published of it.
    values = {name: value for name, value in summary(jobs).items() if "rate" not in name}
    values["cpu_job_num"] = np.nan
    label = parts[pai.TASK.name].label
    how = "by task: mean runtime of its instances, share of a GPU that one plans for"
    return figures(f"{_ACME}.PAI", values, how, label) | figures(
        "alibaba_v2020.pai_published_row", values, how, label
    )


def _instances(part: Part) -> pa.Table:
    """Add up the instances of each task, block by block: there are millions."""
    task = ["job_name", "task_name"]
    sums = [("run", "sum"), ("runs", "sum"), ("first", "min")]
    partial = []
    for block in part.blocks((*task, "start_time", "end_time")):
        start, end = number(block, "start_time"), number(block, "end_time")
        known = (start > 0) & (end > 0)
        rows = pa.table(
            {
                "job_name": text(block, "job_name"),
                "task_name": text(block, "task_name"),
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


def listed(block: pa.Table) -> Jobs:
    """Take jobs by what their list says of them: its own duration and queue, where it has them."""
    run, wait = number(block, "duration"), number(block, "queue")
    start = seconds(block, "start_time")
    run = np.where(np.isnan(run), seconds(block, "end_time") - start, run)
    wait = np.where(np.isnan(wait), start - seconds(block, "submit_time"), wait)
    return Jobs(number(block, "gpu_num"), run, wait, np.asarray(state(block, "state").to_pylist()))


def _array(column: pa.ChunkedArray) -> Floats:
    return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
