"""Work bound by memory: every class is measured, and its bytes are those that predictions count."""

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.kernels.bench_kernel import BenchKernel, TensorFactory
from meshwright.observe.bench.kernels.memory_bound import (
    KERNELS,
    MEMORY_BOUND_FAMILY,
    list_memory_bound_cases,
    list_validation_memory_bound,
    prepare_memory_bound,
)
from meshwright.observe.bench.timing import LAST_LEVEL_CACHE_BYTES
from meshwright.predict.cost import memory_s
from meshwright.predict.cost.curves import MEMORY_OPS, MemoryOp
from meshwright.predict.step.block_time import list_block_kernels
from meshwright.predict.step.optimizer_step import update_kernel_times_s
from meshwright.predict.step.stage_time import embedding_passes, list_head_kernels
from meshwright.predict.training_run.training_framework import (
    MEGATRON,
    MESHWRIGHT,
    TrainingFramework,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.workload import TrainingWorkload

torch = pytest.importorskip("torch", reason="the bench measures with torch")

HERE = BenchTarget(torch.device("cpu"))
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
TOKENS = 4096


def test_every_class_that_predictions_know_is_measured_on_a_gpu_even_in_a_quick_bench() -> None:
    assert {case.name for case in list_memory_bound_cases("quick", on_gpu=True)} >= set(MEMORY_OPS)


def test_a_full_bench_begins_with_the_quick_one_and_repeats_nothing() -> None:
    quick, full = (
        list_memory_bound_cases("quick", on_gpu=True),
        list_memory_bound_cases("full", on_gpu=True),
    )
    assert full[: len(quick)] == quick
    assert len({case.key for case in full}) == len(full)


def test_held_out_cases_are_none_of_those_measured() -> None:
    measured = {case.key for case in list_memory_bound_cases("full", on_gpu=True)}
    others = {case.key for case in list_validation_memory_bound()}
    assert len(others) > len(KERNELS)
    assert not measured & others


def tiny(kernel: BenchKernel) -> list[dict[str, Any]]:
    """Return the host's sizes, smaller, in every form that a GPU is asked for."""
    small = {name: min(value, 256) if isinstance(value, int) else value
             for name, value in kernel.cpu_sizes.items()}  # fmt: skip
    words = [{name: value for name, value in sizes.items() if isinstance(value, str)}
             for sizes in kernel.gpu_sizes]  # fmt: skip
    return [small, *({**small, **each} for each in words if each)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_runs_in_all_its_forms(kernel: BenchKernel) -> None:
    draw = TensorFactory(HERE.device, torch.float32)
    for sizes in tiny(kernel):
        case = kernel.build_case(sizes)
        call = kernel.make(case, draw)
        call()
        call()  # what works in place has to work again
        assert kernel.count_bytes(case, 4) > 0


def test_small_inputs_come_in_several_sets_that_no_cache_holds() -> None:
    made = prepare_memory_bound(BY_NAME["add"].build_case({"tokens": 64, "width": 64}), HERE)
    assert made is not None
    assert len(made.calls) == 8
    large = LAST_LEVEL_CACHE_BYTES // 3 // 4
    made = prepare_memory_bound(
        BY_NAME["add"].build_case({"tokens": large // 1024, "width": 1024}), HERE
    )
    assert made is not None
    assert len(made.calls) < 3


def test_a_processor_is_not_asked_for_numbers_of_eight_bits() -> None:
    assert "quantise" not in {case.name for case in list_memory_bound_cases("full", on_gpu=False)}
    assert (
        prepare_memory_bound(
            BY_NAME["quantize_fp8"].build_case(BY_NAME["quantize_fp8"].cpu_sizes), HERE
        )
        is None
    )


def test_a_gpu_is_at_its_power_limit_meanwhile() -> None:
    assert MEMORY_BOUND_FAMILY.under_load


def run_of(
    model: str = "llama3-8b", software: TrainingFramework = MESHWRIGHT, **layout: Any
) -> TrainingRun:
    one = JobSpec(
        model=catalog.get_model(model),
        cluster=catalog.get_cluster("dgx-h200"),
        layout=Layout(microbatch=1, **layout),
        workload=TrainingWorkload(sequence_length=TOKENS, global_batch=1, tokens=10**9),
    )
    return TrainingRun(one, framework=software)


def bench_s(run: TrainingRun, name: str, **sizes: Any) -> float:
    """Return what predictions say of a kernel with the bytes that the bench counts."""
    kernel = BY_NAME[name]
    op: MemoryOp = kernel.op  # type: ignore[assignment]
    return memory_s(run.device_costs, op, kernel.count_bytes(kernel.build_case(sizes), 2))


def term(run: TrainingRun, name: str, way: Callable[[Any], float]) -> float:
    """Return the seconds of one kind of work in a layer."""
    return sum(
        way(one) for what, one in list_block_kernels(run, run.model.blocks[0]) if what == name
    )


def test_bytes_within_a_layer_are_those_that_predictions_count() -> None:
    run = run_of()
    stream = {"tokens": TOKENS, "width": 4096}
    heads = {"tokens": TOKENS, "heads": 32, "kv_heads": 8, "head_dim": 128}
    inner = {"tokens": TOKENS, "width": 14336}
    for what, times, forward, backward, sizes in (
        ("norms", 2, "add_rms_norm", "add_rms_norm backward", stream),
        ("activations", 1, "glu", "glu backward", inner),
        ("rotary", 1, "split_rotate", "split_rotate backward", heads),
    ):
        found = term(run, what, lambda one: one.forward_s)
        assert found == pytest.approx(times * bench_s(run, forward, **sizes)), what
        found = term(run, what, lambda one: one.backward_s)
        assert found == pytest.approx(times * bench_s(run, backward, **sizes)), what


def test_bytes_of_experts_are_those_that_predictions_count() -> None:
    run = run_of("mixtral-8x7b")
    routed = {"tokens": TOKENS, "width": 4096, "experts": 8, "top_k": 2}
    moves = bench_s(run, "dispatch", **routed) + bench_s(run, "combine", **routed)
    scores = bench_s(run, "softmax", tokens=TOKENS, experts=8)
    # What is left of routing is one product of the router.
    assert term(run, "routing", lambda one: one.forward_s) > moves + scores
    assert term(run, "routing", lambda one: one.forward_s) < 1.5 * (moves + scores)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_bytes_of_casts_are_those_that_predictions_count(scaling: str) -> None:
    run = run_of(precision=f"fp8-{scaling}")
    weights = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    found = term(run, "casts", lambda one: one.forward_s)
    own = sum(  # rows of inputs, and those of weights
        bench_s(run, "quantize_fp8", scaling=scaling, tokens=TOKENS + out, width=into)
        for out, into in weights
    )
    # Predictions start a kernel for every pass, the bench counts one call.
    assert found == pytest.approx(own, abs=2 * len(weights) * run.device_costs.launch.kernel_s)


def test_bytes_around_the_layers_are_those_that_predictions_count() -> None:
    run, other = run_of(gradient_precision="bf16"), run_of(software=MEGATRON)
    words = {"tokens": TOKENS, "vocab": 128256}
    losses = [one for what, one in list_head_kernels(run) if what == "loss"]
    assert losses[0].forward_s == pytest.approx(bench_s(run, "linear_cross_entropy rows", **words))
    losses = [one for what, one in list_head_kernels(other) if what == "loss"]
    assert losses[0].forward_s == pytest.approx(bench_s(other, "cross_entropy", **words))
    assert losses[0].backward_s == pytest.approx(bench_s(other, "cross_entropy backward", **words))
    rows = bench_s(run, "embedding", tokens=TOKENS, width=4096, vocab=128256)
    assert embedding_passes(run).forward_s == pytest.approx(rows)
    update_s, norm_s = update_kernel_times_s(run, 1e9)
    states = {"parameters": 10**9, "masters": "fp32", "moments": "fp32"}
    assert update_s == pytest.approx(bench_s(run, "adamw", **states))
    assert norm_s == pytest.approx(bench_s(run, "gradient_norm", parameters=10**9))
