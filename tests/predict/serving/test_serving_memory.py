"""Memory of a serving GPU: bytes per token, weights by format, and what fits."""

import pytest

from meshwright.predict.serving import (
    TENSORRT_LLM,
    VLLM,
    Quantization,
    Replica,
    ServingEngine,
    predict_serving_memory,
)
from meshwright.predict.serving.cost.attention_cost import count_kv_bytes
from meshwright.predict.serving.cost.quantization import KvFormat, WeightFormat
from meshwright.predict.serving.cost.serving_engine import TENSORRT_LLM_EARLY
from meshwright.spec import catalog
from meshwright.spec.layout import Layout


def replica(
    model: str,
    weights: WeightFormat = "bf16",
    layout: Layout | None = None,
    engine: ServingEngine = VLLM,
) -> Replica:
    return Replica(
        model=catalog.get_model(model), cluster=catalog.get_cluster("h200-superpod"),
        layout=layout or Layout(), quantization=Quantization(weights=weights), engine=engine,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "kv", "tp", "size"),
    [
        ("llama3.1-8b", "bf16", 1, 131_072),
        ("llama3.1-8b", "fp8", 1, 65_536),
        ("llama3.1-70b", "bf16", 8, 40_960),
        ("llama3.1-70b", "bf16", 16, 40_960),  # heads run out: the rest are copies
        ("deepseek-v3", "bf16", 8, 61 * 576 * 2),
    ],
)
def test_bytes_of_a_token(model: str, kv: KvFormat, tp: int, size: int) -> None:
    formats = Quantization(kv=kv)
    assert (
        count_kv_bytes(catalog.get_model(model), Layout(tp=tp), formats).request_kv_bytes(1) == size
    )


def test_window_bounds_what_a_request_keeps() -> None:
    sizes = count_kv_bytes(catalog.get_model("gpt-oss-20b"), Layout(), Quantization())
    assert sizes.request_kv_bytes(2000) - sizes.request_kv_bytes(1000) == pytest.approx(
        1000 * 12 * 2 * 512 * 2
    )


def test_recurrent_states_do_not_grow() -> None:
    sizes = count_kv_bytes(catalog.get_model("qwen3-next-80b-a3b"), Layout(), Quantization())
    assert sizes.bytes_per_request == 36 * 4 * 32 * 128 * 128


@pytest.mark.parametrize(
    ("model", "weights", "gigabytes"),
    [
        ("llama3.1-8b", "bf16", 16.06),
        ("llama3.1-8b", "fp8", 9.08),
        ("llama3.1-70b", "nvfp4", 42.6),
        ("gpt-oss-120b", "mxfp4", 65.0),
    ],
)
def test_weights_by_format(model: str, weights: WeightFormat, gigabytes: float) -> None:
    found = predict_serving_memory(replica(model, weights))
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_shares_of_free_memory_and_of_all_of_it() -> None:
    free = predict_serving_memory(replica("llama3.1-8b", engine=TENSORRT_LLM))
    rest = free.device_bytes - free.weight_bytes - free.buffer_bytes
    assert free.kv_bytes == pytest.approx(0.95 * rest)
    whole = predict_serving_memory(replica("llama3.1-8b"))
    kept = whole.kv_bytes + whole.weight_bytes + whole.buffer_bytes
    assert kept == pytest.approx(VLLM.gpu_memory_utilization * whole.device_bytes)


def test_model_that_is_too_large_does_not_fit() -> None:
    found = predict_serving_memory(replica("llama3.1-405b"))
    assert not found.fits
    assert found.requests(1000) == 0
    assert found.blocks(16) == 0


def test_experts_are_spread_over_expert_parallel_gpus() -> None:
    whole, spread = (
        predict_serving_memory(replica("deepseek-v3", "fp8", layout)).weight_bytes
        for layout in (Layout(tp=8), Layout(dp=8, ep=8, expert_tp=1))
    )
    assert 84e9 < whole < 92e9
    assert whole < spread < whole + 20e9


def test_requests_that_may_run_take_room_for_every_word() -> None:
    one = replica("llama3.1-8b", engine=TENSORRT_LLM_EARLY)
    few = predict_serving_memory(one, 2048, 256).buffer_bytes
    many = predict_serving_memory(one, 2048, 8192).buffer_bytes
    words = 4 * TENSORRT_LLM_EARLY.logit_copies * one.model.vocab
    assert many - few == pytest.approx(words * (8192 - 256))
    assert predict_serving_memory(replica("llama3.1-8b"), 2048, 8192) == predict_serving_memory(
        replica("llama3.1-8b"), 2048
    )
