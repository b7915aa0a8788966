"""Peak memory of the trainer's own steps on an H200, as `benchmarks/train_step.py` measured it."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model
from meshwright.spec.workload import TrainingWorkload

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-16-train_step.json"
PURE: dict[str, Any] = {
    "master_precision": "none",
    "moment_precision": "bf16",
    "gradient_precision": "bf16",
}
ONE = build_decoder_model(
    "1b", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256
)
EIGHT = build_decoder_model(
    "8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256
)
FP8 = {**PURE, "precision": "fp8-tensorwise"}
LIGHT = {"recompute": "selective", "recompute_ops": ("layernorm", "mlp_act")}
LONG = {"recompute": "selective", "recompute_ops": ("layernorm", "mlp")}


@pytest.mark.parametrize(
    ("row", "model", "batch", "length", "words"),
    [
        ("1b bf16 ours, 8 × 4096", ONE, 8, 4096, PURE),
        ("1b bf16 ours, 16 × 4096", ONE, 16, 4096, PURE),
        ("1b bf16-masters ours, 8 × 4096", ONE, 8, 4096, {}),
        ("1b fp8-tensorwise ours, 8 × 4096", ONE, 8, 4096, FP8),
        ("8b bf16 ours, 5 × 4096", EIGHT, 5, 4096, PURE),
        ("8b fp8-tensorwise ours, 4 × 4096", EIGHT, 4, 4096, FP8),
        (
            "8b fp8-tensorwise ours, 4 × 4096, layernorm,mlp_act recomputed",
            EIGHT, 4, 4096, FP8 | LIGHT,
        ),
        ("8b bf16 ours, 4 × 8192, layernorm,mlp recomputed", EIGHT, 4, 8192, PURE | LONG),
    ],
)  # fmt: skip
def test_peak_memory_is_within_a_twentieth(
    row: str, model: Model, batch: int, length: int, words: dict[str, Any]
) -> None:
    figures = json.loads(RESULT.read_text())["measured"]["figures"]
    measured = next(one["value"] for one in figures if one["name"] == f"{row}: peak memory")
    predicted = predict_memory(one_gpu(model, batch, length, **words)).worst_stage
    assert predicted.allocated_bytes / 2**30 == pytest.approx(measured, rel=0.05)


def test_accumulated_gradients_stay() -> None:
    once = predict_memory(one_gpu(EIGHT, 2, 4096, **PURE)).worst_stage
    twice = predict_memory(one_gpu(EIGHT, 2, 4096, batches=2, **PURE)).worst_stage
    assert twice.allocated_bytes - once.allocated_bytes == twice.gradients_bytes


def test_logits_of_many_tokens_come_in_chunks() -> None:
    some, many = (predict_memory(one_gpu(ONE, batch, 4096)).worst_stage for batch in (8, 32))
    assert many.logits_bytes < 2 * some.logits_bytes


def one_gpu(
    model: Model, batch: int, length: int, *, batches: int = 1, **words: Any
) -> TrainingRun:
    step = TrainingWorkload(sequence_length=length, global_batch=batch * batches, tokens=10**9)
    work = JobSpec(
        model=model,
        cluster=catalog.get_cluster("h200-superpod"),
        layout=Layout(microbatch=batch, **words),
        workload=step,
    )
    return TrainingRun(work, framework=MESHWRIGHT)
