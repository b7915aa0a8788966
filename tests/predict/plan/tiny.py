"""Questions that a search answers at once."""

from functools import cache
from typing import Any

from msgspec.structs import replace

from meshwright.predict.plan import Answer, Question, Space, find_plans, read_fixed
from meshwright.spec import catalog
from meshwright.spec.model import Experts, Model, decoder
from meshwright.spec.workload import Training

DENSE = decoder(
    "tiny", layers=4, hidden=1024, heads=8, kv_heads=4, ffn=2816, vocab=32000, max_positions=65536
)
SPARSE = decoder(
    "tiny-moe", layers=4, hidden=1024, heads=8, kv_heads=4, ffn=2816, vocab=32000,
    experts=Experts(count=8, top_k=2, width=1024), max_positions=65536,
)  # fmt: skip


def asked(
    gpus: int = 8, *, model: Model = DENSE, cluster: str = "h100-superpod", batch: int = 64,
    fixed: tuple[str, ...] = (), memory_gb: float | None = None, tokens: int = 10**12, **more: Any,
) -> Question:  # fmt: skip
    """Return a question; GPUs may have less memory than they do."""
    known = catalog.cluster(cluster).with_gpus(gpus)
    if memory_gb is not None:
        gpu = replace(known.gpu, memory_bytes=round(memory_gb * 1e9))
        known = replace(known, gpu=gpu)
    training = Training(tokens=tokens, sequence_length=4096, global_batch=batch, **more)
    space = Space(fixed=read_fixed(fixed))
    return Question(model=model, cluster=known, workload=training, space=space)


@cache
def answered(gpus: int = 8, most: int = 4) -> Answer:
    """Return the best plans of the plain question."""
    return find_plans(asked(gpus), most=most)
