"""The cost of a step: what it grows with, and that closed forms equal steps one by one."""

import json
import math
from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.cost.device_costs import build_device_costs
from meshwright.predict.serving import (
    SGLANG,
    VLLM,
    Quantization,
    Replica,
    StepCost,
    build_step_cost,
)
from meshwright.predict.serving.cost.layer_cost import expected_active_experts, token_cost
from meshwright.predict.serving.cost.quantization import WeightFormat
from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT, ServingEngine
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    build_engines,
    default_scheduler_config,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.scheduler_config import SchedulerConfig


def replica(model: str = "llama3.1-8b", **changes: object) -> Replica:
    given: dict[str, object] = {"cluster": catalog.get_cluster("h200-superpod"), **changes}
    return Replica(model=catalog.get_model(model), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cluster", "ahead"), [("h200-superpod", True), ("cpu", False)])
def test_a_processor_that_computes_decides_no_step_ahead(cluster: str, ahead: bool) -> None:
    given = replica(cluster=catalog.get_cluster(cluster), engine=MESHWRIGHT)
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, num_gpu_blocks=8)
    (station,) = build_engines(ReplicaPool(replica=given, scheduler_config=limits), 64)
    assert station.async_scheduling == ahead


def test_weights_set_the_least_time_of_a_step() -> None:
    step = build_step_cost(replica()).step_s(decodes=1, context_sum=1000)
    weights = 2 * 7.5e9 / 4.8e12
    assert weights < step < 2.5 * weights


def test_a_captured_step_is_padded_and_launched_at_once() -> None:
    cost = build_step_cost(replica(engine=MESHWRIGHT))
    asked = {"prefill_tokens": 60, "decodes": 200, "context_sum": 200 * 500.0}
    singly, at_once = cost.step_s(**asked), cost.step_s(**asked, captured=288)  # type: ignore[arg-type]
    assert singly == pytest.approx(MESHWRIGHT.launch_s * 32, rel=0.1), "the host sets the pace"
    assert at_once < 0.6 * singly
    assert at_once > cost.step_s(**asked, captured=260)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [("llama3.1-8b", VLLM, "vLLM is not known"), ("qwen3-next-80b-a3b", MESHWRIGHT, "recurrent")],
)
def test_captured_prompts_are_refused_where_nobody_has_them(
    model: str, engine: ServingEngine, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        default_scheduler_config(replica(model, engine=engine), max_cudagraph_capture_size=256)


def test_gpus_of_a_tensor_group_share_what_goes_to_experts() -> None:
    prompt = {"prefill_tokens": 2000, "prefill_pairs": 2e6, "sampled": 1}
    cluster = catalog.get_cluster("h200-superpod").with_gpus(16)
    apart, together = (
        build_step_cost(
            replica("deepseek-v3", cluster=cluster,
            quantization=Quantization(weights="fp8-blockwise"),
                    layout=Layout(tp=tp, dp=16 // tp, ep=16, expert_tp=1))
        ).step_s(**prompt)  # type: ignore[arg-type]
        for tp in (1, 8)
    )  # fmt: skip
    assert together < 1.3 * apart


def test_small_kernels_of_experts_have_the_rows_of_all_attention_groups() -> None:
    model = catalog.get_model("deepseek-v3")
    device = build_device_costs(catalog.get_gpu("h200-141g-sxm"))
    shared, groups, whole = (
        token_cost(device, model, layout, Quantization(), 4096).small_kernels_s
        for layout in (
            Layout(dp=8, ep=8, expert_tp=1), Layout(dp=8, ep=1, expert_tp=8), Layout(ep=1)
        )
    )  # fmt: skip
    # Eight GPUs have an eighth of all rows each; cut into eight, each has all of them in part.
    assert shared == pytest.approx(whole / 8)
    assert groups > shared


def test_decoding_reads_each_key_once() -> None:
    cost = build_step_cost(replica())
    few, many = (cost.step_s(decodes=64, context_sum=keys) for keys in (64_000, 128_000))
    read = 64_000 * 2 * 32 * 8 * 128 * 2 / (VLLM.kv_bandwidth_share * 4.8e12)
    assert many - few == pytest.approx(read)


def test_keys_of_eight_bits_are_read_in_half_the_time() -> None:
    wide, narrow = (
        build_step_cost(replica(quantization=Quantization(kv=kv))).fit_decode_cost(64, 1000)[1]
        for kv in ("bf16", "fp8")
    )
    assert narrow == pytest.approx(wide / 2)


@pytest.mark.parametrize("model", ["llama3.1-8b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_closed_form_equals_steps_one_by_one(model: str) -> None:
    cost = build_step_cost(replica(model, layout=Layout(tp=8)))
    batch, keys = 32, 32 * 700.0
    one_by_one = sum(cost.step_s(decodes=batch, context_sum=keys + batch * k) for k in range(50))
    assert cost.decode_steps_s(batch, keys, 50) == pytest.approx(one_by_one)


def test_layers_with_a_window_read_no_further() -> None:
    cost = build_step_cost(replica("gpt-oss-20b"))
    near, far = (cost.fit_decode_cost(8, context)[1] for context in (100.0, 1000.0))
    assert far == pytest.approx(near / 2)
    steps = sum(cost.step_s(decodes=8, context_sum=8 * (1000.0 + k)) for k in range(20))
    assert cost.decode_steps_s(8, 8000.0, 20) == pytest.approx(steps)


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
@pytest.mark.parametrize(("model", "context"), [("gpt-oss-20b", 100.0), ("qwen3-0.6b", 10.0)])
def test_closed_form_changes_where_windows_and_hosts_end(
    model: str, context: float, engine: ServingEngine
) -> None:
    # The window is 128; the host of the small model is the longer one at first.
    cost = build_step_cost(replica(model, engine=replace(engine, request_s=4e-5)))
    batch, steps = 64, 900
    one_by_one = sum(
        cost.step_s(decodes=batch, context_sum=batch * (context + k)) for k in range(steps)
    )
    assert cost.decode_steps_s(batch, batch * context, steps) == pytest.approx(one_by_one)
    if engine.overlaps_host or model == "gpt-oss-20b":
        assert context < cost.fit_decode_cost(batch, context)[2] < context + steps


def test_latent_of_attention_is_read_whole_on_every_gpu() -> None:
    one, eight = (
        build_step_cost(replica("deepseek-v3", layout=Layout(tp=tp))).attention_cost.key_s
        for tp in (4, 8)
    )
    assert eight == pytest.approx(one)


def test_attention_data_parallel_shares_the_requests() -> None:
    shared = build_step_cost(replica("deepseek-v3", layout=Layout(dp=8, ep=8, expert_tp=1)))
    whole = build_step_cost(replica("deepseek-v3", layout=Layout(tp=8)))
    assert shared.attention_cost.key_s < whole.attention_cost.key_s / 4


def test_prompts_cost_by_tokens_and_by_pairs() -> None:
    cost = build_step_cost(replica())
    short = cost.step_s(prefill_tokens=8192, prefill_pairs=8192 * 512.0, sampled=8)
    long = cost.step_s(prefill_tokens=8192, prefill_pairs=8192 * 4096.0, sampled=1)
    assert 0.05 < short < 0.25
    assert long > short


def test_more_gpus_make_steps_shorter_and_pay_for_it() -> None:
    times = [
        build_step_cost(replica("llama3.1-70b", layout=Layout(tp=tp))).step_s(
            decodes=64, context_sum=64e3
        )
        for tp in (2, 4, 8)
    ]
    assert times[0] > times[1] > times[2] > times[0] / 4


def test_stages_pass_parts_of_the_batch() -> None:
    whole = build_step_cost(replica("llama3.1-70b", layout=Layout(tp=2)))
    staged = build_step_cost(replica("llama3.1-70b", layout=Layout(tp=2, pp=2)))
    assert staged.step_s(decodes=64, context_sum=0) == pytest.approx(
        whole.step_s(decodes=32, context_sum=0), rel=0.02
    )


@pytest.mark.parametrize("model", ["llama3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_stages_share_what_contexts_take(model: str) -> None:
    whole, staged = (build_step_cost(replica(model, layout=Layout(pp=pp))) for pp in (1, 4))

    def keys_s(cost: StepCost, decodes: int) -> float:
        many, few = (
            cost.step_s(decodes=decodes, context_sum=decodes * tokens) for tokens in (8000.0, 1.0)
        )
        return many - few

    def pairs_s(cost: StepCost) -> float:
        many, few = (
            cost.step_s(prefill_tokens=4096, prefill_pairs=4096 * seen) for seen in (4000.0, 1.0)
        )
        return many - few

    assert keys_s(staged, 256) == pytest.approx(keys_s(whole, 256) / 4)
    assert pairs_s(staged) == pytest.approx(pairs_s(whole) / 4)
    # One request passes all stages, one after the other; two are in two of them.
    assert keys_s(staged, 1) == pytest.approx(keys_s(whole, 1))
    assert keys_s(staged, 2) == pytest.approx(keys_s(whole, 2) / 2)


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_closed_form_equals_steps_where_stages_share(model: str, batch: int) -> None:
    cost = build_step_cost(replica(model, layout=Layout(pp=4)))
    for tokens in (100.0, 1000.0):
        fixed, slope, _ = cost.fit_decode_cost(batch, tokens)
        assert fixed + slope * batch * tokens == pytest.approx(
            cost.step_s(decodes=batch, context_sum=batch * tokens)
        )


def test_host_hides_behind_the_gpu_or_adds_to_it() -> None:
    cost = build_step_cost(replica("qwen3-0.6b", engine=SGLANG))
    assert cost.step_s(decodes=1, context_sum=10) >= SGLANG.step_s


@pytest.mark.parametrize("base", [SGLANG, VLLM])
@pytest.mark.parametrize("tokens", [16, 8192])
def test_launches_of_prompts_hide_behind_the_gpu_or_add_to_it(
    base: ServingEngine, tokens: int
) -> None:
    engine = replace(base, launch_s=1e-3)
    whole, gpu = (
        build_step_cost(replica(engine=each)).step_s(
            prefill_tokens=tokens, prefill_pairs=50.0 * tokens, sampled=1
        )
        for each in (engine, replace(base, step_s=0.0, request_s=0.0))
    )
    host = engine.step_s + engine.request_s + 32 * engine.launch_s
    assert whole == pytest.approx(max(gpu, host) if base.overlaps_host else gpu + host)


def test_casts_are_of_narrow_products_alone() -> None:
    fused, apart = (replace(MESHWRIGHT, cast_kernels=casts, launch_s=0.0) for casts in (0.0, 1.0))
    for formats, inputs in ((Quantization(), 0), (Quantization(weights="fp8"), 3 * 4096 + 14336)):
        less, more = (
            build_step_cost(replica(engine=engine, quantization=formats)).step_s(
                prefill_tokens=8192
            )
            for engine in (fused, apart)
        )
        floor = 32 * 3 * 8192 * inputs / 4.8e12
        assert floor <= more - less <= 1.5 * floor


def test_each_cast_is_a_launch_more() -> None:
    engine = replace(MESHWRIGHT, launch_s=1.0)
    wide, narrow = (
        build_step_cost(replica(engine=engine, quantization=Quantization(weights=weights))).step_s(
            prefill_tokens=1
        )
        for weights in ("bf16", "fp8")
    )
    assert narrow / wide == pytest.approx(15 / 11, rel=1e-3)


def test_heat_slows_products_that_compute_and_not_those_that_read() -> None:
    cool, hot = (
        build_step_cost(replica(engine=replace(MESHWRIGHT, power_limit_exponent=heat)))
        for heat in (0.0, 1.0)
    )
    assert hot.step_s(decodes=1) == pytest.approx(cool.step_s(decodes=1), rel=0.01)
    slower = hot.step_s(prefill_tokens=8192) / cool.step_s(prefill_tokens=8192)
    assert 1.1 < slower < 1.17


def test_shares_of_the_bandwidth_are_the_engine_s() -> None:
    few, many = (
        build_step_cost(replica(engine=replace(MESHWRIGHT, weight_bandwidth_share=share))).step_s(
            decodes=1
        )
        for share in (0.9, 0.6)
    )
    weights = 2 * (6.98e9 + 128256 * 4096) / 4.8e12
    # A little of it hides behind what the products compute.
    assert many - few == pytest.approx(weights * (1 / 0.6 - 1 / 0.9), rel=0.02)
    wide, narrow = (
        build_step_cost(
            replica(engine=MESHWRIGHT, quantization=Quantization(kv=kv))
        ).attention_cost.key_s
        for kv in ("bf16", "fp8")
    )
    assert MESHWRIGHT.fp8_kv_bandwidth_share
    assert narrow / wide == pytest.approx(
        MESHWRIGHT.kv_bandwidth_share / MESHWRIGHT.fp8_kv_bandwidth_share / 2
    )


def test_our_engine_s_profile_is_that_of_its_measured_steps() -> None:
    path = Path(__file__).parents[4] / "validation/serving/h200_steps.json"
    sizes = []
    for step in json.loads(path.read_text(encoding="utf-8"))["steps"]:
        if step.get("alone"):
            continue
        narrow = Quantization(weights="fp8", kv="fp8") if step.get("fp8") else Quantization()
        engine = replace(MESHWRIGHT, power_limit_exponent=0.0) if step.get("cool") else MESHWRIGHT
        if not step.get("streamed"):
            engine = replace(engine, max_prefetch_rows=0)
        predicted = build_step_cost(replica(step["model"], quantization=narrow,
            engine=engine)).step_s(
            prefill_tokens=step.get("prompt_tokens", 0), prefill_pairs=step.get("pairs", 0),
            decodes=step.get("decodes", 0), context_sum=step.get("keys", 0),
            sampled=max(1, step.get("decodes", 0)),
        )  # fmt: skip
        sizes.append(abs(math.log(predicted / step["seconds"])))
    assert median(sizes) < 0.03
    assert max(sizes) < 0.12


def test_attention_takes_what_its_kernels_took_alone() -> None:
    path = Path(__file__).parents[4] / "validation/serving/h200_steps.json"
    measured = json.loads(path.read_text(encoding="utf-8"))
    off: dict[bool, list[float]] = {False: [], True: []}
    for fp8, sizes in off.items():
        narrow = Quantization(kv="fp8" if fp8 else "bf16")
        about = build_step_cost(replica(quantization=narrow, engine=MESHWRIGHT)).attention_cost
        # 32 layers of 32 heads, as the one that was measured has.
        for row in measured["prompt_attention"]:
            if row["fp8"] == fp8:
                layers = about.pair_s * row["pairs"] + about.token_s * row["tokens"]
                sizes.append(abs(layers / 32 / row["seconds"] - 1))
        for row in measured["decode_attention"]:
            if row["fp8"] == fp8:
                layer = MESHWRIGHT.attention_s + about.key_s * row["keys"] / 32
                sizes.append(abs(layer / row["seconds"] - 1))
    assert max(off[False]) < 0.09
    assert max(off[True]) < 0.12


def test_edges_of_tiles_are_paid_by_tokens_of_prompts_alone() -> None:
    plain, edged = (
        build_step_cost(replica(engine=replace(MESHWRIGHT, tile_overhead_keys=keys)))
        for keys in (0.0, 500.0)
    )
    assert edged.attention_cost.token_s == pytest.approx(500 * plain.attention_cost.pair_s)
    assert edged.step_s(decodes=8, context_sum=800) == plain.step_s(decodes=8, context_sum=800)


def test_few_rows_of_sixteen_bits_are_streamed() -> None:
    plain = replace(MESHWRIGHT, max_prefetch_rows=0)

    def gained(rows: int, weights: WeightFormat = "bf16") -> float:
        formats = Quantization(weights=weights)
        without, streamed = (
            build_step_cost(replica(quantization=formats, engine=engine)).step_s(
                decodes=rows, context_sum=100
            )
            for engine in (plain, MESHWRIGHT)
        )
        return without - streamed

    # Four products of each layer begin 2.5 µs earlier.
    assert gained(64) == pytest.approx(32 * 4 * 2.5e-6)
    assert gained(128) == pytest.approx(gained(64))
    assert gained(256) == 0.0
    assert gained(64, "fp8") == 0.0


def test_scales_by_row_leave_few_tiles_to_long_sums() -> None:
    def took(rows: int, *, by_row: bool) -> float:
        cost = replica(
            quantization=Quantization(weights="fp8"),
            engine=replace(MESHWRIGHT, per_channel_scales=by_row),
        )
        return build_step_cost(cost).step_s(decodes=rows, context_sum=rows)

    assert took(96, by_row=True) > 1.15 * took(96, by_row=False)
    assert took(2048, by_row=True) == pytest.approx(took(2048, by_row=False), rel=0.05)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (10**6, 256)])
def test_tokens_visit_some_experts_and_many_visit_all(tokens: int, experts: int) -> None:
    assert expected_active_experts(256, 8, tokens) == pytest.approx(experts)


def test_costs_are_worked_out_once() -> None:
    assert build_step_cost(replica()) is build_step_cost(replica())
    assert isinstance(build_step_cost(replica()), StepCost)


def test_replica_that_cannot_be_says_why() -> None:
    with pytest.raises(InputError, match="the replica takes"):
        replica(layout=Layout(dp=2 * catalog.get_cluster("h200-superpod").gpus))
    with pytest.raises(InputError, match="context parallel"):
        replica(layout=Layout(cp=2))
