"""Rows of published serving runs: names, layouts, loads and formats as sources spell them."""

from typing import Any

import pytest

from meshwright.predict.validation.serving.case_prediction import predict_case
from meshwright.predict.validation.serving.serving_case import ServingCase, read_case
from meshwright.predict.validation.serving.serving_model import (
    find_gpu,
    find_model,
    normalize_model_name,
)
from meshwright.predict.validation.serving.serving_recipes import find_recipes
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec.layout import Layout
from meshwright.spec.model import count_parameters

QUEUED: dict[str, Any] = {
    "source": "perf-overview.md", "engine": "TensorRT-LLM", "engine_version": "0.17",
    "model": "LLaMA v3.1 8B", "gpu": "H200 141GB HBM3", "gpus": 1, "tp": 1, "pp": 1,
    "precision_weights": "FP8", "isl": 1000, "osl": 1000,
    "concurrency_or_batch_or_rate": "max (all requests queued)", "output_tok_s": 17744.0,
}  # fmt: skip
SAMPLE: dict[str, Any] = {
    "source": "silicon_sample.csv run_tp8_ep8_1", "engine": "SGLang", "engine_version": "0.5.9",
    "model": "deepseek-ai/DeepSeek-R1", "gpu": "b200_sxm", "gpus": 64, "tp": 64, "pp": 1, "ep": 8,
    "precision_weights": "fp8", "isl": 1024, "osl": 1024,
    "concurrency_or_batch_or_rate": "concurrency 64", "ttft_ms": {"mean": 500.0},
    "tpot_or_itl_ms": {"mean": 20.0}, "notes": "mode agg; attention_dp 1; moe_tp 8",
}  # fmt: skip


def only(row: dict[str, Any], **changes: Any) -> ServingCase:
    return read_case({**row, **changes})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LLaMA v3.1 70B", "llama3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama3.1-70b"),
        ("llama3_1-70b-fp8_dyn", "llama3.1-70b"),
        ("llama2-70b-99.9", "llama2-70b"),
        ("LLaMA 7B", "llama2-7b"),
        ("GPTJ 6B", "gpt-j-6b"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-v3"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2"),
        ("GPT-OSS 120B", "gpt-oss-120b"),
    ],
)
def test_one_model_has_many_spellings(text: str, name: str) -> None:
    assert normalize_model_name(text) == name
    assert find_model(text).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100 80GB HBM3", "h100-80g-sxm"),
        ("NVIDIA H100-PCIe-80GB", "h100-80g-pcie"),
        ("b200_sxm", "b200-180g-sxm"),
        ("GH200 480GB", "gh200-96g"),
        ("RTX 6000 Pro Blackwell SE", "rtx-pro-6000-server"),
        ("AMD Instinct MI300X 192GB HBM3", "mi300x"),
    ],
)
def test_gpus_by_their_spellings(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_variant_has_its_own_memory() -> None:
    assert find_gpu("NVIDIA H100-NVL-94GB").memory_bytes == 94 * 10**9


@pytest.mark.parametrize("name", ["not named", "8B (Llama)", "google/gemma-4-31B-it"])
def test_unknown_model_is_said(name: str) -> None:
    with pytest.raises(UnusableRowError, match="is not known"):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gpt-j-6b", 6.05e9, 6.05e9),
        ("minimax-m2", 229e9, 10e9),
        ("qwen3.5-397b-a17b", 397e9, 17e9),
        ("glm-5", 744e9, 40e9),
    ],
)
def test_shapes_beside_the_catalog_have_their_published_size(
    name: str, total: float, active: float
) -> None:
    counted = count_parameters(find_model(name))
    assert counted.total == pytest.approx(total, rel=0.005)
    assert counted.active == pytest.approx(active, rel=0.12)


def test_requests_that_the_page_sends_are_known() -> None:
    case = only(QUEUED)
    assert case.load.request_load.requests == 3000
    assert case.load.request_load.concurrency is None
    assert case.replicas[0].quantization.kv == "fp8"
    assert case.measured.output_tok_s == 17744.0


def test_gpus_counted_twice_are_counted_once() -> None:
    assert only(SAMPLE).replicas[0].layout == Layout(tp=8, ep=8, expert_tp=1)
    grouped = only(SAMPLE, gpus=64, tp=1, notes="mode agg; attention_dp 64; moe_tp 8")
    assert grouped.replicas[0].layout == Layout(dp=8, ep=8, expert_tp=1)


def test_throughput_follows_from_latencies() -> None:
    measured = only(SAMPLE).measured
    output = 0.9 * 1024
    assert measured.derived
    assert measured.output_tok_s == pytest.approx(64 * output / (0.5 + (output - 1) * 0.02))


def test_workers_of_a_disaggregated_run() -> None:
    notes = (
        "mode disagg; prefill 1x(tp1 pp1 adp4 mtp1 ep4 bs1), "
        "decode 4x(tp8 pp1 adp1 mtp1 ep8 bs1); gpus computed"
    )
    case = only(SAMPLE, notes=notes)
    assert case.copies == (4,)
    assert case.prefill is not None
    assert case.prefill.layout.dp == 4
    assert not case.assumed
    unsaid = only(SAMPLE, notes=notes.replace("1x(", "Nonex(").replace("4x(", "Nonex("))
    assert unsaid.assumed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": None}, "does not say its model"),
        ({"gpu": "a toaster"}, "no GPU of the catalog"),
        ({"engine": "gpt-fast"}, "no costs are known"),
        ({"isl": None}, "does not say isl"),
        ({"tp": 3, "gpus": 3}, "heads cannot be shared"),
        ({"concurrency_or_batch_or_rate": "a few"}, "is not understood"),
        ({"concurrency_or_batch_or_rate": "batch 1, MTP 3"}, "speculative"),
        ({"tp": None, "gpus": None}, "how many GPUs"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRowError, match=reason):
        only(QUEUED, **changes)


EARLY = {**QUEUED, "engine_version": "0.13.0", "model": "LLaMA v3 70B", "gpus": 4, "tp": 4}


@pytest.mark.parametrize(
    ("row", "built"),
    [
        ({}, (2048, 1024)),
        ({"engine_version": "0.10.0"}, (2048, 2048)),
        ({"tp": 8, "gpus": 8}, (8192, 16384)),
        ({"model": "LLaMA v3.1 70B"}, (2048, 1024)),
        ({"model": "LLaMA v2 70B", "isl": 128, "osl": 4096}, (256, 8192)),
        ({"model": "LLaMA v2 70B", "isl": 128, "osl": 2048}, (4096, 8192)),
        ({"model": "Mixtral 8x22B", "tp": 8, "gpus": 8}, None),  # not in the table that was kept
        ({"engine_version": "0.15.0"}, None),  # works its bounds out
        ({"source": "a blog"}, None),
    ],
)
def test_compiled_engines_have_the_bounds_they_were_built_for(
    row: dict[str, Any], built: tuple[int, int] | None
) -> None:
    assert only(EARLY, **row).load.compiled_limits == built


def test_no_step_goes_past_what_an_engine_was_built_for() -> None:
    case = only(EARLY, model="GPTJ 6B", gpus=1, tp=1)
    unbound = case._replace(load=case.load._replace(compiled_limits=None))
    assert predict_case(case).batch <= 128 < predict_case(unbound).batch


APART: dict[str, Any] = {
    **SAMPLE, "engine": "TensorRT-LLM", "engine_version": "0.8.1.post1", "precision_weights": "fp4",
    "concurrency_or_batch_or_rate": "concurrency 1214",
    "notes": "mode disagg; prefill Nonex(tp4 pp1 adp1 mtp1 ep4 bsNone), "
    "decode Nonex(tp8 pp1 adp1 mtp2 ep4 bsNone)",
}  # fmt: skip


def test_workers_that_a_row_does_not_tell_are_those_of_its_recipe() -> None:
    case = only(APART)
    assert case.replicas[0].layout == Layout(dp=8, ep=8, expert_tp=1)
    assert case.prefill is not None
    assert case.prefill.layout == Layout(dp=4, ep=4, expert_tp=1)
    assert (case.copies, case.prefill_copies, case.num_speculative_tokens, case.assumed) == (
        (2,),
        1,
        2,
        (),
    )


def test_a_row_that_tells_its_workers_is_believed() -> None:
    case = only(APART, notes=APART["notes"].replace("None", "3"))
    assert (case.copies, case.prefill_copies, case.num_speculative_tokens) == ((3,), 3, 0)


def test_workers_are_assumed_where_no_recipe_has_so_many_requests() -> None:
    case = only(APART, concurrency_or_batch_or_rate="concurrency 1213")
    assert case.assumed == ("one decode worker of attention data parallel",)


def test_recipes_that_differ_in_their_drafts_alone_leave_the_drafts_open() -> None:
    row = {**APART, "concurrency_or_batch_or_rate": "concurrency 10"}
    assert {recipe.drafts for recipe in find_recipes(row)} == {0, 3}
    assert only(row).assumed == ("no drafts",)


def test_drafts_bring_tokens_sooner_but_not_as_many_times_as_are_checked() -> None:
    with_drafts = only(APART)
    slow, fast = (
        predict_case(case).tpot_s
        for case in (with_drafts._replace(num_speculative_tokens=0), with_drafts)
    )
    assert slow is not None
    assert fast is not None
    assert slow / 3 < fast < slow
