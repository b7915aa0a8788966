"""Statistics of nodes, of pods and of what others' simulators made of them."""

import numpy as np

from meshwright.fleet.sources.public_traces.columns import read_numbers, read_text
from meshwright.fleet.sources.public_traces.public_trace_source import RecognizedTable
from meshwright.fleet.validation.statistic import Statistics, count_values, make_statistics

_2023 = "alibaba_v2023.facts"
_RESULTS = "alibaba_v2023.fgd_expected_results"
_CLUSTER = "frag_pct_of_cluster"
_SEEDS = "mean over seeds of the results that the authors released"


def count_nodes_2023(found: RecognizedTable) -> Statistics:
    """Count nodes and GPUs, where the list holds nodes without GPUs as well."""
    block = found.table.read_all()
    gpus, model = read_numbers(block, "gpu"), read_text(block, "model").to_pylist()
    if not (gpus == 0).any():
        return {}
    values = {"nodes": len(gpus), "gpu_nodes": int((gpus > 0).sum()), "gpus": float(gpus.sum())}
    made = make_statistics(_2023, values, "over the list of all nodes", found.table.label)
    return made | _by_model(f"{_2023}.by_model", model, gpus, found)


def summarize_pods_2023(found: RecognizedTable) -> Statistics:
    """Summarise the workload as it was recorded; others were made from it."""
    block = found.table.read_all()
    if "pod_phase" not in block.column_names or not found.table.stem.endswith("default"):
        return {}
    gpus, milli = read_numbers(block, "num_gpu"), read_numbers(block, "gpu_milli")
    submit, start = read_numbers(block, "creation_time"), read_numbers(block, "scheduled_time")
    run, wait = read_numbers(block, "deletion_time") - start, start - submit
    on_gpus = gpus > 0
    values = {
        "pods": block.num_rows,
        "gpu_pods": int(on_gpus.sum()),
        "share_fractional": float((milli[on_gpus] < 1000).mean()),
        "sum_gpu_req": float((gpus * milli).sum()) / 1000,
        "median_run_s": float(np.nanmedian(run)),
        "median_wait_s": float(np.nanmedian(wait)),
        "mean_wait_s": float(np.nanmean(wait)),
        "unscheduled": int(np.isnan(start).sum()),
    }
    made = make_statistics(
        _2023, values, "over pods, times of those that were placed", found.table.label
    )
    for name, column in (("phase", "pod_phase"), ("qos", "qos"), ("num_gpu", "num_gpu")):
        found_counts = count_values(read_text(block, column).to_pylist())
        made |= make_statistics(f"{_2023}.{name}", found_counts, "pods", found.table.label)
    return made


def summarize_recommenders_2025(found: RecognizedTable) -> Statistics:
    """Count instances of recommenders."""
    block = found.table.read_all()
    values = {
        "rows": block.num_rows,
        "apps": len(set(read_text(block, "app_name").to_pylist())),
        "gpu_req_total": float(np.nansum(read_numbers(block, "gpu_request"))),
        "with_creation": int((~np.isnan(read_numbers(block, "creation_time"))).sum()),
    }
    made = make_statistics("alibaba_v2025", values, "over instances", found.table.label)
    roles = count_values(read_text(block, "role").to_pylist())
    return made | make_statistics("alibaba_v2025.roles", roles, "instances", found.table.label)


def count_nodes_2026(found: RecognizedTable) -> Statistics:
    """Count nodes and GPUs."""
    block = found.table.read_all()
    gpus = read_numbers(block, "gpu_capacity_num")
    path = "alibaba_v2026_spot.nodes"
    values = {"rows": len(gpus), "gpus": float(gpus.sum())}
    made = make_statistics(path, values, "over nodes", found.table.label)
    return made | _by_model(
        f"{path}.by_model", read_text(block, "gpu_model").to_pylist(), gpus, found
    )


def _by_model(
    path: str, model: list[str | None], gpus: np.ndarray, found: RecognizedTable
) -> Statistics:
    sums: dict[str, float] = {}
    for name, much in zip(model, gpus.tolist(), strict=True):
        if name and much > 0:
            sums[name] = sums.get(name, 0) + much
    return make_statistics(path, sums, "GPUs", found.table.label)


def average_packing(found: RecognizedTable) -> Statistics:
    """Average the results of packing over seeds, at each share of GPUs asked for."""
    block = found.table.read_all()
    # Which of three results it holds, only the file's name tells.
    stem = found.table.stem
    kind = "allo" if "_allo" in stem else "ratio" if "ratio" in stem else "frag"
    name = {"allo": "alloc_pct_mean10seeds", "ratio": "frag_ratio_pct"}.get(kind, _CLUSTER)
    loads = [column for column in block.column_names if column.isdigit()]
    values = {load: read_numbers(block, load) for load in loads}
    work = np.asarray(read_text(block, "workload").to_pylist(), dtype=str)
    policy = np.asarray(read_text(block, "sc_policy").to_pylist(), dtype=str)
    tune = read_numbers(block, "tune")
    made: Statistics = {}
    for one in np.unique(work):
        for rule in np.unique(policy):
            chosen = (work == one) & (policy == rule) & (tune == 1.3)
            if not chosen.any():
                continue
            means = {load: float(np.nanmean(values[load][chosen])) for load in loads
                     if not np.isnan(values[load][chosen]).all()}  # fmt: skip
            if str(one).endswith("default"):
                made |= make_statistics(
                    f"{_RESULTS}.default_{name}.{rule}", means, _SEEDS, found.table.label
                )
            if kind == "allo" and loads:
                last = {str(rule): means[loads[-1]]}
                path = f"{_RESULTS}.final_alloc_pct_at_130.{one}"
                made |= make_statistics(path, last, _SEEDS, found.table.label)
    return made
