"""What papers say in a sentence, held against the data that they released."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from meshwright.fleet.validation.statistic import Statistic, Statistics


class PaperStatement(NamedTuple):
    """A published figure that stands in a text."""

    name: str
    published: float
    statistic_path: str
    """The path of our figure."""
    method: str
    scale: float = 1.0
    reason: str = ""
    bound: str = ""
    """`at least` or `at most`, where the text gives a bound that ours has to keep."""


_CURVES = "acme.util_quantiles_from_pickles"
STATEMENTS: Final = (
    PaperStatement("median GPU use of Seren (%)", 99, f"{_CURVES}.Seren.gpu_util_pct.p50",
    "median"),
    PaperStatement("median GPU use of Kalos (%)", 97, f"{_CURVES}.Kalos.gpu_util_pct.p50",
    "median"),
    PaperStatement(
        "median SM activity, Seren (%)", 40, f"{_CURVES}.Seren.sm_active_pct.p50", "median",
        reason="the paper's 40 % is the mean (41.6 %) of the released curve, not its median",
    ),
    PaperStatement(
        "median SM activity, Kalos (%)", 40, f"{_CURVES}.Kalos.sm_active_pct.p50", "median",
        reason="the paper's 40 % is the mean (38.5 %) of the released curve, not its median",
    ),
    PaperStatement(
        "half of Kalos' GPUs use more memory than (%)", 75,
        f"{_CURVES}.Kalos.gpu_mem_pct_of_80GB.p50", "median", bound="at least",
    ),
    PaperStatement(
        "NICs of Seren idle (%)", 60, f"{_CURVES}.Seren.ib_send_raw.cdf_at_5",
        "share of samples of at most 5", bound="at least",
    ),
    PaperStatement(
        "GPUs of Seren over 400 W (%)", 22.1, f"{_CURVES}.Seren.gpu_power_w.share_over_400W_pct",
        "share of samples over 400 W",
        reason="the released curve holds one month of power, the paper more",
    ),
    PaperStatement(
        "GPUs of Kalos over 400 W (%)", 12.5, f"{_CURVES}.Kalos.gpu_power_w.share_over_400W_pct",
        "share of samples over 400 W",
    ),
    PaperStatement(
        "GPUs of Seren idle at some 60 W (%)", 30, f"{_CURVES}.Seren.gpu_power_w.share_le_70W_pct",
        "share of samples of at most 70 W",
    ),
    PaperStatement(
        "GPUs of Kalos idle at some 60 W (%)", 30, f"{_CURVES}.Kalos.gpu_power_w.share_le_70W_pct",
        "share of samples of at most 70 W", reason="the paper rounds both clusters to 30 %",
    ),
    PaperStatement(
        "GPU time of Kalos in jobs of 256 GPUs and more (%)", 96,
        "acme.jobs.Kalos.gpu_time_ge256_pct", "share of GPU time", bound="at least",
    ),
    PaperStatement(
        "GPU time of Kalos in jobs of one GPU (%)", 2, "acme.jobs.Kalos.gpu_time_1gpu_pct",
        "share of GPU time", bound="at most",
    ),
    PaperStatement(
        "pretraining jobs of Seren that last over a day (%)", 5,
        "acme.jobs.Seren.pretrain_over_a_day_pct", "share of jobs", bound="at most",
    ),
    PaperStatement(
        "pretraining jobs of Kalos that last over a day (%)", 5,
        "acme.jobs.Kalos.pretrain_over_a_day_pct", "share of jobs", bound="at most",
    ),
    PaperStatement(
        "job 1: worker that becomes slow", 6,
        "alibaba_v2020.minibatch_stragglers.changes.job_1.worker", "largest change of pace",
    ),
    PaperStatement(
        "job 1: window of 20 in which it is slow", 12,
        "alibaba_v2020.minibatch_stragglers.changes.job_1.window", "largest change of pace",
    ),
    PaperStatement(
        "job 1: how slow it is", 1.33,
        "alibaba_v2020.minibatch_stragglers.changes.job_1.ratio", "largest change of pace",
    ),
    PaperStatement(
        "job 2: windows in which a worker becomes slow", 0,
        "alibaba_v2020.minibatch_stragglers.changes.job_2.windows", "changes of pace",
    ),
    *(
        PaperStatement(
            f"Alibaba 2023 packed by {name}: GPUs given away (%)", published,
            f"alibaba_v2023.packed.{scorer}", "mean over orders of arrival",
        )
        for name, scorer, published in (
            ("chance", "random", 87.47),
            ("dot product", "dot-product", 90.85),
            ("clustering", "clustering", 91.88),
            ("packing", "packing", 92.0),
            ("best fit", "best-fit", 93.08),
            ("fragmentation gradient descent", "fragmentation", 95.39),
        )
    ),
)  # fmt: skip


def compare_server_power(figures: Mapping[str, Statistic]) -> Statistics:
    """Compare what servers with and without GPUs draw, where both curves are at hand."""
    gpu = figures.get(f"{_CURVES}.Seren.gpu_server_power_w.mean_from_cdf")
    cpu = figures.get(f"{_CURVES}.Seren.cpu_server_power_w.mean_from_cdf")
    if gpu is None or cpu is None:
        return {}
    value = gpu.value / cpu.value
    return {"acme.server_power_ratio": Statistic(value, "ratio of mean power", gpu.source)}


POWER_RATIO_STATEMENT: Final = PaperStatement(
    "GPU servers draw so many times what CPU servers do", 5, "acme.server_power_ratio",
    "ratio of mean power",
)  # fmt: skip
