"""Statistics of nodes, of pods and of what others' simulators made of them."""

import numpy as np

from meshwright.observe.fleet.published.figure import Figures, counts, figures
from meshwright.observe.fleet.sources.public.columns import number, text
from meshwright.observe.fleet.sources.public.reading import Found

_2023 = "alibaba_v2023.facts"
_RESULTS = "alibaba_v2023.fgd_expected_results"
_CLUSTER = "frag_pct_of_cluster"
_SEEDS = "mean over seeds of the results that the authors released"


def nodes_2023(found: Found) -> Figures:
    """Count nodes and GPUs, where the list holds nodes without GPUs as well."""
    block = found.part.whole()
    gpus, model = number(block, "gpu"), text(block, "model").to_pylist()
    if not (gpus == 0).any():
        return {}
    values = {"nodes": len(gpus), "gpu_nodes": int((gpus > 0).sum()), "gpus": float(gpus.sum())}
    made = figures(_2023, values, "over the list of all nodes", found.part.label)
    return made | _by_model(f"{_2023}.by_model", model, gpus, found)


def pods_2023(found: Found) -> Figures:
    """Summarise the workload as it was recorded; others were made from it."""
    block = found.part.whole()
    if "pod_phase" not in block.column_names or not found.part.stem.endswith("default"):
        return {}
    gpus, milli = number(block, "num_gpu"), number(block, "gpu_milli")
    submit, start = number(block, "creation_time"), number(block, "scheduled_time")
    run, wait = number(block, "deletion_time") - start, start - submit
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
    made = figures(_2023, values, "over pods, times of those that were placed", found.part.label)
    for name, column in (("phase", "pod_phase"), ("qos", "qos"), ("num_gpu", "num_gpu")):
        found_counts = counts(text(block, column).to_pylist())
        made |= figures(f"{_2023}.{name}", found_counts, "pods", found.part.label)
    return made


def recommenders_2025(found: Found) -> Figures:
    """Count instances of recommenders."""
    block = found.part.whole()
    values = {
        "rows": block.num_rows,
        "apps": len(set(text(block, "app_name").to_pylist())),
        "gpu_req_total": float(np.nansum(number(block, "gpu_request"))),
        "with_creation": int((~np.isnan(number(block, "creation_time"))).sum()),
    }
    made = figures("alibaba_v2025", values, "over instances", found.part.label)
    roles = counts(text(block, "role").to_pylist())
    return made | figures("alibaba_v2025.roles", roles, "instances", found.part.label)


def nodes_2026(found: Found) -> Figures:
    """Count nodes and GPUs."""
    block = found.part.whole()
    gpus = number(block, "gpu_capacity_num")
    path = "alibaba_v2026_spot.nodes"
    values = {"rows": len(gpus), "gpus": float(gpus.sum())}
    made = figures(path, values, "over nodes", found.part.label)
    return made | _by_model(f"{path}.by_model", text(block, "gpu_model").to_pylist(), gpus, found)


def _by_model(path: str, model: list[str | None], gpus: np.ndarray, found: Found) -> Figures:
    sums: dict[str, float] = {}
    for name, much in zip(model, gpus.tolist(), strict=True):
        if name and much > 0:
            sums[name] = sums.get(name, 0) + much
    return figures(path, sums, "GPUs", found.part.label)


def packing(found: Found) -> Figures:
    """Average the results of packing over seeds, at each share of GPUs asked for."""
    block = found.part.whole()
    # Which of three results it holds, only the file's name tells.
    stem = found.part.stem
    kind = "allo" if "_allo" in stem else "ratio" if "ratio" in stem else "frag"
    name = {"allo": "alloc_pct_mean10seeds", "ratio": "frag_ratio_pct"}.get(kind, _CLUSTER)
    loads = [column for column in block.column_names if column.isdigit()]
    values = {load: number(block, load) for load in loads}
    work = np.asarray(text(block, "workload").to_pylist(), dtype=str)
    policy = np.asarray(text(block, "sc_policy").to_pylist(), dtype=str)
    tune = number(block, "tune")
    made: Figures = {}
    for one in np.unique(work):
        for rule in np.unique(policy):
            chosen = (work == one) & (policy == rule) & (tune == 1.3)
            if not chosen.any():
                continue
            means = {load: float(np.nanmean(values[load][chosen])) for load in loads
                     if not np.isnan(values[load][chosen]).all()}  # fmt: skip
            if str(one).endswith("default"):
                made |= figures(
                    f"{_RESULTS}.default_{name}.{rule}", means, _SEEDS, found.part.label
                )
            if kind == "allo" and loads:
                last = {str(rule): means[loads[-1]]}
                path = f"{_RESULTS}.final_alloc_pct_at_130.{one}"
                made |= figures(path, last, _SEEDS, found.part.label)
    return made
