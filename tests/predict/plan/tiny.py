"""Questions that a search answers at once."""

from functools import cache
from typing import Any

from msgspec.structs import replace

from meshwright.predict.plan import (
    LayoutSpace,
    PlanAnswer,
    PlanQuestion,
    find_plans,
    parse_fixed_fields,
)
from meshwright.spec import catalog
from meshwright.spec.model import Model, MoESpec, build_decoder_model
from meshwright.spec.workload import TrainingWorkload

DENSE = build_decoder_model(
    "tiny", layers=4, hidden=1024, heads=8, kv_heads=4, ffn=2816, vocab=32000, max_positions=65536
)
SPARSE = build_decoder_model(
    "tiny-moe", layers=4, hidden=1024, heads=8, kv_heads=4, ffn=2816, vocab=32000,
    experts=MoESpec(count=8, top_k=2, width=1024), max_positions=65536,
)  # fmt: skip


def asked(
    gpus: int = 8, *, model: Model = DENSE, cluster: str = "h100-superpod", batch: int = 64,
    fixed: tuple[str, ...] = (), memory_gb: float | None = None, tokens: int = 10**12, **more: Any,
) -> PlanQuestion:  # fmt: skip
    """Return a question; GPUs may have less memory than they do."""
    known = catalog.get_cluster(cluster).with_gpus(gpus)
    if memory_gb is not None:
        gpu = replace(known.gpu, memory_bytes=round(memory_gb * 1e9))
        known = replace(known, gpu=gpu)
    training = TrainingWorkload(tokens=tokens, sequence_length=4096, global_batch=batch, **more)
    space = LayoutSpace(fixed=parse_fixed_fields(fixed))
    return PlanQuestion(model=model, cluster=known, workload=training, space=space)


@cache
def answered(gpus: int = 8, most: int = 4) -> PlanAnswer:
    """Return the best plans of the plain question."""
    return find_plans(asked(gpus), most=most)
