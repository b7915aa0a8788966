"""Requests of like length through a replica: nothing is lost, and limits hold."""

import pytest

from meshwright.predict.serving import (  # fmt: skip
    SGLANG,
    TENSORRT_LLM,
    FlowResult,
    Quantization,
    Replica,
    ServingEngine,
    UniformLoad,
    build_step_cost,
    predict_serving_memory,
    simulate_uniform_flow,
)
from meshwright.spec import catalog


def went(load: UniformLoad, engine: ServingEngine = TENSORRT_LLM, **limits: int) -> FlowResult:
    replica = Replica(
        model=catalog.get_model("llama3.1-8b"), cluster=catalog.get_cluster("h200-superpod"),
        quantization=Quantization(weights="fp8", kv="fp8"), engine=engine,
    )  # fmt: skip
    return simulate_uniform_flow(
        build_step_cost(replica), predict_serving_memory(replica), load, **limits
    )


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    alone = went(UniformLoad(prompt_tokens=1000, output_tokens=100, requests=1))
    assert alone.mean_decode_batch == 1
    first = alone.ttft_s - TENSORRT_LLM.frontend_s
    assert alone.total_s == pytest.approx(first + 99 * alone.tpot_s)
    assert alone.output_tok_s == pytest.approx(100 / alone.total_s)


def test_larger_batches_serve_more_and_each_waits_longer() -> None:
    loads = [
        UniformLoad(prompt_tokens=500, output_tokens=200, requests=8 * many, concurrency=many)
        for many in (1, 8, 64)
    ]
    few, some, many = (went(load) for load in loads)
    assert few.output_tok_s < some.output_tok_s < many.output_tok_s
    assert few.tpot_s < some.tpot_s < many.tpot_s


@pytest.mark.parametrize("limit", [1, 16, 100])
def test_batch_stays_within_its_limit(limit: int) -> None:
    load = UniformLoad(prompt_tokens=100, output_tokens=50, requests=200)
    assert went(load, batch_requests=limit).mean_decode_batch <= limit


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_every_output_is_made(spread: float) -> None:
    load = UniformLoad(
        prompt_tokens=64, output_tokens=100, requests=300, concurrency=32, output_half_width=spread
    )
    found = went(load)
    assert found.output_tok_s * found.total_s == pytest.approx(300 * 100, rel=0.02)


def test_slow_arrivals_set_the_pace() -> None:
    load = UniformLoad(prompt_tokens=100, output_tokens=20, requests=100, rate_per_s=10.0)
    assert went(load).output_tok_s == pytest.approx(200, rel=0.05)


def test_outputs_of_one_token_need_no_decoding() -> None:
    found = went(UniformLoad(prompt_tokens=100, output_tokens=1, requests=10))
    assert found.tpot_s == 0
    assert found.output_tok_s > 0


def test_prompts_before_decodes_hold_tokens_up() -> None:
    load = UniformLoad(
        prompt_tokens=4000, output_tokens=100, requests=64, concurrency=16, output_half_width=0.5
    )
    mixed = went(load, TENSORRT_LLM)
    apart = went(load, SGLANG)
    assert mixed.ttft_s > 0
    assert apart.tpot_s > 0


def test_cached_prompts_come_sooner() -> None:
    cold, warm = (
        went(
            UniformLoad(prompt_tokens=4000, output_tokens=10, requests=20, cached_share=share)
        ).total_s
        for share in (0.0, 0.9)
    )
    assert warm < cold / 2


def test_published_rows_of_one_gpu_are_near() -> None:
    # TensorRT-LLM 0.17 to 1.0, Llama-3.1-8B in fp8 on one H200, as its performance page prints.
    rows = {(128, 2048, 3000): 26_221, (1000, 1000, 3000): 17_744, (5000, 500, 1500): 3_988}
    for (prompt, output, requests), measured in rows.items():
        load = UniformLoad(prompt_tokens=prompt, output_tokens=output, requests=requests)
        found = went(load, batch_tokens=8192)
        assert found.output_tok_s == pytest.approx(measured, rel=0.25)


def test_rounds_that_repeat_need_not_be_followed() -> None:
    load = UniformLoad(prompt_tokens=2000, output_tokens=100, requests=400)
    folded = went(load, batch_requests=16)
    followed = went(
        UniformLoad(prompt_tokens=2000, output_tokens=100, requests=400, output_half_width=1e-9),
        batch_requests=16,
    )
    assert folded.total_s == pytest.approx(followed.total_s, rel=0.01)
    assert folded.ttft_s == pytest.approx(followed.ttft_s, rel=0.03)
