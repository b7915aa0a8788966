"""Runs for the tests of simulated steps: a layout and a batch are all they need."""

from typing import Any

from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout, ScheduleKind
from meshwright.spec.model import build_gpt
from meshwright.spec.workload import LoRASpec, TrainingWorkload

CLUSTER = catalog.get_cluster("h100-superpod")
# A tiny vocabulary makes all stages equal but for some microseconds.
EQUAL = build_gpt("equal", layers=48, hidden=4096, heads=32, vocab=8)
LLAMA = catalog.get_model("llama3.1-8b")
MIXTRAL = catalog.get_model("mixtral-8x7b")
KINDS: tuple[ScheduleKind, ...] = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe",
    "dualpipe-v",
)
CHUNKED = ("interleaved", "zb-v", "dualpipe-v")


def run_of(
    kind: ScheduleKind = "1f1b",
    *,
    batch: int = 8,
    model: Any = EQUAL,
    pp: int = 4,
    frozen: bool = False,
    **more: Any,
) -> TrainingRun:
    """Return a run; chunked schedules get two chunks per rank unless told otherwise."""
    chunks = more.pop("virtual_stages", 2 if kind in CHUNKED and pp > 1 else 1)
    layout = Layout(pp=pp, virtual_stages=chunks, schedule=kind, **more)
    cluster = CLUSTER.with_gpus(max(8, layout.gpus))
    step = TrainingWorkload(
        tokens=4096 * batch,
        sequence_length=4096,
        global_batch=batch,
        adapter=LoRASpec(rank=16) if frozen else None,
    )
    work = JobSpec(model=model, cluster=cluster, layout=layout, workload=step)
    return TrainingRun(work)
