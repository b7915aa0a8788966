"""Predicts what each kind of overlap is worth on 64 to 16,384 H100s, as tables in Markdown.

    python -m scripts.overlap_table

The first column of times is a step with everything overlapped that the layout can overlap; each of
the others says how much longer it takes with one kind switched off, the last with all of them off.
docs/guide/overlap.md shows the tables as they are when the site is built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from meshwright.predict import TrainingFramework, TrainingRun, predict_memory, predict_step
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_seconds
from meshwright.spec.workload import TrainingWorkload

CLUSTER = "h100-superpod"
KINDS = ("gradients", "parameters", "tp", "pp", "ep")
SOFTWARE: TrainingFramework = replace(MESHWRIGHT, tp_async=False)
"""Our trainer: tensor-parallel exchanges that are not cut into pieces are waited for at once."""


@dataclass(frozen=True)
class Case:
    """A model on so many GPUs."""

    model: str
    gpus: int
    batch: int
    length: int
    degrees: Mapping[str, Any] = field(default_factory=dict)

    def work(self) -> JobSpec:
        """Return the whole description, with everything overlapped that can be."""
        model = catalog.get_model(self.model)
        given = dict(self.degrees)
        pp, tp = given.get("pp", 1), given.get("tp", 1)
        if pp > 1:
            given["stage_layers"] = even(model.layers, pp * given.get("virtual_stages", 1))
        layout = Layout(
            **given,
            dp=self.gpus // (pp * tp),
            overlap_tp=tp > 1,
            overlap_ep=given.get("ep", 1) > 1,
        )
        tokens = self.batch * self.length
        workload = TrainingWorkload(
            tokens=tokens, sequence_length=self.length, global_batch=self.batch
        )
        cluster = catalog.get_cluster(CLUSTER).with_gpus(self.gpus)
        return JobSpec(model=model, cluster=cluster, layout=layout, workload=workload)


def even(layers: int, chunks: int) -> tuple[int, ...]:
    """Cut layers into chunks as equal as can be, smaller ones at the ends of the pipeline."""
    small, more = divmod(layers, chunks)
    first = (chunks - more + 1) // 2
    return (small,) * first + (small + 1,) * more + (small,) * (chunks - more - first)


_TENSORS = {
    "tp": 8, "sequence_parallel": True, "zero": 1, "recompute": "selective",
    "recompute_ops": ("mlp_act", "layernorm"),
}  # fmt: skip
_70B = _TENSORS | {"pp": 4, "virtual_stages": 5, "schedule": "interleaved"}
_405B = _TENSORS | {"pp": 16}
_SHARDED = {"zero": 3, "recompute": "full"}
_QWEN = {
    "ep": 8, "zero": 1, "recompute": "selective", "recompute_ops": ("layernorm", "moe_act"),
}  # fmt: skip
_DEEPSEEK = {
    "pp": 16, "ep": 64, "zero": 1, "precision": "fp8-blockwise", "moment_precision": "bf16",
    "recompute": "selective", "recompute_ops": ("layernorm", "mla_up_proj", "moe_act"),
}  # fmt: skip

CASES: dict[str, tuple[Case, ...]] = {
    "Dense, sharing tensors and stages": (
        Case("llama3-70b", 64, 128, 8192, _70B),
        Case("llama3-70b", 256, 512, 8192, _70B),
        Case("llama3.1-405b", 1024, 512, 8192, _405B),
        Case("llama3.1-405b", 4096, 2048, 8192, _405B),
        Case("llama3.1-405b", 16384, 2048, 8192, _405B),
    ),
    "Dense, sharing weights": (
        Case("llama3-70b", 64, 128, 4096, _SHARDED),
        Case("llama3-70b", 256, 512, 4096, _SHARDED),
        *(
            Case("llama3-70b", gpus, 2 * gpus, 4096, _SHARDED | {"shard": 256})
            for gpus in (1024, 4096, 16384)
        ),
    ),
    "Experts": (
        Case("qwen3-30b-a3b", 64, 1024, 4096, _QWEN),
        Case("qwen3-30b-a3b", 256, 4096, 4096, _QWEN),
        Case("deepseek-v3", 1024, 4096, 4096, _DEEPSEEK),
        Case("deepseek-v3", 4096, 15360, 4096, _DEEPSEEK),
        Case("deepseek-v3", 16384, 32768, 4096, _DEEPSEEK),
    ),
}


@dataclass(frozen=True)
class Row:
    """The predicted steps of one case."""

    case: Case
    work: JobSpec
    all_s: float
    """With everything overlapped."""
    without_s: Mapping[str, float]
    """With one kind switched off, where the layout has it."""
    none_s: float
    """With nothing overlapped."""


def row_of(case: Case) -> Row:
    """Predict a case with each kind of overlap on and off; one that cannot run is an error."""
    work = case.work()
    problems = work.check()
    assert not problems, f"{case.model} on {case.gpus} GPUs: {problems[0]}"
    assert predict_memory(TrainingRun(work, framework=SOFTWARE)).fits, (
        f"{case.model} on {case.gpus}: memory"
    )
    kinds = [kind for kind in KINDS if _applies(kind, work.layout)]
    return Row(
        case,
        work,
        _step_s(work, ()),
        {kind: _step_s(work, (kind,)) for kind in kinds},
        _step_s(work, kinds),
    )


def _applies(kind: str, layout: Layout) -> bool:
    sharded = layout.zero > 0 and layout.shard_degree > 1
    there = {
        "gradients": layout.dp > 1,
        "parameters": sharded,
        "tp": layout.tp > 1,
        "pp": layout.pp > 1,
        "ep": layout.ep > 1,
    }
    return there[kind]


def _step_s(work: JobSpec, off: tuple[str, ...] | list[str]) -> float:
    layout = replace(work.layout, **{f"overlap_{kind}": False for kind in off})
    return predict_step(TrainingRun(replace(work, layout=layout), framework=SOFTWARE)).step_s


def markdown() -> str:
    """Return all tables."""
    return "\n\n".join("\n".join(_table(title, cases)) for title, cases in CASES.items())


def _table(title: str, cases: tuple[Case, ...]) -> Iterator[str]:
    rows = [row_of(case) for case in cases]
    kinds = [kind for kind in KINDS if any(kind in row.without_s for row in rows)]
    yield f"**{title}**"
    yield ""
    heads = ["GPUs", "model", "layout", "sequences × tokens", "all overlapped"]
    heads += [f"without `overlap_{kind}`" for kind in kinds] + ["without any"]
    yield _line(heads)
    yield _line(["---:", "---", "---", "---:", *["---:"] * (len(kinds) + 2)])
    for row in rows:
        case, base = row.case, row.all_s
        cells = [f"{case.gpus:,}", case.model, _words(row.work.layout)]
        cells += [f"{case.batch:,} × {case.length:,}", format_seconds(base)]
        cells += [_longer(row.without_s[k], base) if k in row.without_s else "" for k in kinds]
        yield _line([*cells, _longer(row.none_s, base)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _longer(step_s: float, base_s: float) -> str:
    return f"{step_s / base_s - 1:+.1%}".replace("%", " %")


def _words(layout: Layout) -> str:
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "ep", "dp")}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.pp > 1:
        words.append(layout.schedule)
    shard = f" over {layout.shard}" if layout.shard and layout.shard < layout.dp else ""
    return ", ".join([*words, f"ZeRO {layout.zero}{shard}", layout.precision])


if __name__ == "__main__":
    print(markdown())
