"""The cheapest fleet that keeps to an objective, found without simulating them all."""

from math import inf

import msgspec
import pytest

from meshwright.errors import InputError, Problem
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.plan.engine_candidates import (
    EngineCandidate,
    EngineSpace,
    build_candidate,
    compute_request_stats,
    list_engine_layouts,
)
from meshwright.predict.serving.plan.engine_command import ENGINE_TARGETS, build_command_lines
from meshwright.predict.serving.plan.serving_question import ServingAnswer, ServingQuestion
from meshwright.predict.serving.plan.serving_search import STEP_TOKEN_LIMITS, _Search, plan_serving
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    ServingFleet,
    default_scheduler_config,
    simulate_fleet,
)
from meshwright.predict.serving.sim.serving_metrics import compute_serving_metrics
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.workload import (
    FixedLength,
    PoissonArrivals,
    PrefixSharing,
    ServingWorkload,
    UniformLength,
    WorkloadRequest,
)

CLUSTER = catalog.get_cluster("h200-superpod").with_gpus(16)
MODEL = catalog.get_model("llama3.1-8b")
OBJECTIVE = {"ttft": 0.5, "itl": 0.05}


def asked(rate: float, count: int = 300) -> tuple[WorkloadRequest, ...]:
    prompt, output = UniformLength(low=200, high=2000), UniformLength(low=10, high=200)
    stream = ServingWorkload(arrival=PoissonArrivals(rate_per_s=rate), prompt=prompt, output=output)
    return tuple(stream.generate(0, count))


def question(rate: float = 60, **given: object) -> ServingQuestion:
    known = {
        "model": MODEL,
        "cluster": CLUSTER,
        "requests": asked(rate),
        "slo": OBJECTIVE,
        "max_gpus": 16,
        "space": EngineSpace(tp=(1, 2), pp=(1,)),
        "allow_disaggregated": False,
        **given,
    }
    return ServingQuestion(**known)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> ServingAnswer:
    return plan_serving(question())


def test_the_best_plan_keeps_to_the_objective_and_one_engine_less_does_not(
    found: ServingAnswer,
) -> None:
    best = found.plans[0]
    again = compute_serving_metrics(
        simulate_fleet(best.fleet, list(asked(60))), best.fleet, OBJECTIVE
    )
    assert again == best.metrics
    assert (again.slo_attainment or 0) >= 0.99
    assert found.smaller_fleet is not None
    assert found.smaller_fleet.fleet.gpus < best.fleet.gpus
    assert (found.smaller_fleet.metrics.slo_attainment or 0) < 0.99


def test_no_number_of_engines_is_cheaper_when_all_are_tried(found: ServingAnswer) -> None:
    fewest = inf
    for tp in (1, 2):
        replica = Replica(model=MODEL, cluster=CLUSTER, layout=Layout(tp=tp))
        limits = default_scheduler_config(replica)
        for tokens in (8192, *STEP_TOKEN_LIMITS[1:]):
            own = msgspec.structs.replace(
                limits, max_num_batched_tokens=tokens, max_num_seqs=min(limits.max_num_seqs, tokens)
            )
            for count in range(1, 8):
                fleet = ServingFleet(
                    serving_pool=ReplicaPool(replica=replica, scheduler_config=own, count=count)
                )
                if fleet.gpus >= fewest:
                    break
                shown = compute_serving_metrics(
                    simulate_fleet(fleet, list(asked(60))), fleet, OBJECTIVE
                )
                if (shown.slo_attainment or 0) >= 0.99:
                    fewest = fleet.gpus
    assert found.plans[0].fleet.gpus == fewest


def test_bounds_are_never_above_what_a_simulation_takes() -> None:
    requests = list(asked(1000, 300))
    about = compute_request_stats(requests)
    for tp in (1, 4):
        one = Replica(model=MODEL, cluster=CLUSTER)
        shape = build_candidate(Layout(tp=tp), one, about, {"ttft": inf})
        assert isinstance(shape, EngineCandidate)
        fleet = ServingFleet(
            serving_pool=ReplicaPool(
                replica=shape.replica, scheduler_config=default_scheduler_config(shape.replica)
            )
        )
        served = simulate_fleet(fleet, requests)
        assert len(requests) * shape.bound_s < served.seconds


def shared(rate: float, count: int = 300) -> tuple[WorkloadRequest, ...]:
    """Return requests whose long prompts begin in one of four ways."""
    stream = ServingWorkload(
        arrival=PoissonArrivals(rate_per_s=rate),
        prompt=FixedLength(tokens=4200),
        output=FixedLength(tokens=20),
        prefix=PrefixSharing(groups=4, tokens=FixedLength(tokens=4096)),
    )
    return tuple(stream.generate(0, count))


def test_what_prompts_share_is_no_work_of_a_bound() -> None:
    requests = list(shared(100, 600))
    about = compute_request_stats(requests)
    assert about.prompt_tokens == 4200
    assert about.uncached_tokens == pytest.approx(104 + 4 * 4096 / 600)
    assert about.long_uncached_tokens == 104
    shape = build_candidate(Layout(), Replica(model=MODEL, cluster=CLUSTER), about, {"ttft": inf})
    assert isinstance(shape, EngineCandidate)
    fleet = ServingFleet(
        serving_pool=ReplicaPool(
            replica=shape.replica, scheduler_config=default_scheduler_config(shape.replica)
        )
    )
    assert len(requests) * shape.bound_s < simulate_fleet(fleet, requests).seconds


def test_prompts_that_share_their_beginning_take_few_gpus() -> None:
    # Whole prompts would keep more than two GPUs busy.
    answer = plan_serving(question(requests=shared(30), slo={"ttft": 0.2}, max_gpus=2))
    assert answer.plans[0].fleet.gpus == 1


def test_layouts_are_refused_for_no_request_that_may_be_late() -> None:
    lengths = [100] * 79 + [20_000] * 21
    requests = tuple(
        WorkloadRequest(arrival_s=float(at), prompt_tokens=length, output_tokens=5)
        for at, length in enumerate(lengths)
    )
    alone = question(requests=requests, slo={"ttft": 0.3}, space=EngineSpace(tp=(1,), pp=(1,)))
    few, most = (
        plan_serving(msgspec.structs.replace(alone, slo_attainment=attain))
        for attain in (0.75, 0.9)
    )
    assert few.plans[0].fleet.gpus == 1
    assert few.plans[0].metrics.slo_attainment == pytest.approx(0.79)
    assert "20,000 tokens" in most.infeasible["1 GPU"]


def test_a_fleet_that_is_near_enough_is_the_plan() -> None:
    # Few requests within a moment: their rate is far beyond what one GPU keeps up with.
    burst = tuple(
        WorkloadRequest(arrival_s=1e-3 * at, prompt_tokens=2000, output_tokens=20)
        for at in range(20)
    )
    answer = plan_serving(
        question(
            requests=burst, slo={"ttft": 30.0}, max_gpus=4, space=EngineSpace(tp=(1,), pp=(1,))
        )
    )
    assert answer.pruned == 1
    assert answer.best_effort is None
    assert answer.plans[0].fleet.gpus == 1


def test_engines_for_prompts_alone_are_looked_at() -> None:
    steady = {"ttft": 1.0, "itl": 0.02}
    together = plan_serving(question(30, slo=steady))
    either = plan_serving(question(30, slo=steady, allow_disaggregated=True))
    assert any(plan.fleet.prefill_pool is not None for plan in either.plans)
    if together.plans:
        assert either.plans[0].fleet.gpus <= together.plans[0].fleet.gpus


@pytest.mark.parametrize(
    ("name", "kind"), [("rtx-4090-box", "qwen3-30b-a3b"), ("a100-pcie-box", "llama3.1-8b")]
)
def test_a_box_without_a_network_has_plans(name: str, kind: str) -> None:
    box, coded = catalog.get_cluster(name), Quantization(weights="int4")
    answer = plan_serving(
        question(
            5,
            model=catalog.get_model(kind),
            cluster=box,
            quantization=coded,
            max_gpus=8,
            allow_disaggregated=True,
        )
    )
    assert answer.plans
    assert answer.plans[0].fleet.gpus <= 8


def test_keys_and_values_that_cannot_travel_are_no_fault_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(fleet: ServingFleet) -> None:
        raise InputError([Problem("disaggregate", f"no way between {fleet.gpus} GPUs", "")])

    monkeypatch.setattr(
        "meshwright.predict.serving.sim.serving_fleet.build_kv_transfer_time", nowhere
    )
    answer = plan_serving(question(30, allow_disaggregated=True))
    assert answer.plans
    assert all(plan.fleet.prefill_pool is None for plan in answer.plans)
    assert "no way" in answer.infeasible["1 GPU → 1 GPU"]


def test_no_plan_takes_more_gpus_than_the_cluster_has() -> None:
    small = msgspec.structs.replace(CLUSTER, nodes=1)
    answer = plan_serving(question(400, cluster=small, max_gpus=64))
    assert not [plan for plan in answer.plans if plan.fleet.gpus > 8]


def test_layouts_that_cannot_do_are_refused_with_the_reason() -> None:
    large = catalog.get_model("llama3.1-405b")
    slow, space = {"ttft": 3.0, "itl": 0.5}, EngineSpace(tp=(1, 2, 8), pp=(1,))
    answer = plan_serving(question(0.5, model=large, space=space, slo=slow))
    assert set(answer.infeasible) == {"1 GPU", "tp 2"}
    assert "no room" in answer.infeasible["tp 2"]
    assert answer.plans[0].fleet.serving_pool.replica.layout.tp == 8
    late = plan_serving(question(1, slo={"ttft": 0.001}))
    assert not late.plans
    assert "alone" in late.infeasible["1 GPU"]
    assert "around the engine" in late.infeasible["1 GPU"]


def test_degrees_that_no_engine_can_have_are_refused_with_the_reason() -> None:
    odd = plan_serving(question(space=EngineSpace(tp=(3,), pp=(1,))))
    assert odd.infeasible == {"tp 3": "3 does not divide the 32 attention heads of block 'dense'"}
    assert odd.impossible
    large = plan_serving(question(space=EngineSpace(tp=(32,))))
    assert large.infeasible == {"tp 32": "takes 32 GPUs, and there may be 16"}
    uneven = EngineSpace(tp=(4,), pp=(1,), dp=(1,), ep=(8,))
    spread = plan_serving(question(model=catalog.get_model("qwen3-30b-a3b"), space=uneven))
    assert "does not divide" in spread.infeasible["tp 4 ep 8"]


def test_every_degree_asked_for_that_the_gpus_do_not_allow_is_refused() -> None:
    def refused(**asked: tuple[int, ...]) -> set[str]:
        found = list_engine_layouts(MODEL, CLUSTER, 8, EngineSpace(**asked))
        assert found.layouts
        return set(found.infeasible)

    assert refused(tp=(1, 16)) == {"tp 16"}
    assert refused(tp=(1, 16, 32)) == {"tp 16", "tp 32"}
    assert refused(tp=(4, 8), pp=(1, 2)) == {"tp 8 pp 2"}
    assert refused() == set()
    beside = plan_serving(question(space=EngineSpace(tp=(1, 32), pp=(1,))))
    assert beside.infeasible["tp 32"] == "takes 32 GPUs, and there may be 16"


def test_a_fleet_that_comes_up_again_with_the_same_requests_is_not_simulated_again() -> None:
    search = _Search(question(), lambda _: None)
    replica = Replica(model=MODEL, cluster=CLUSTER)
    one, two = (
        ServingFleet(
            serving_pool=ReplicaPool(
                replica=replica, scheduler_config=default_scheduler_config(replica), count=count
            )
        )
        for count in (1, 2)
    )
    # A sample of more than there are is all of them.
    assert search._outcome(one) is search._outcome(one, slice(1500))
    assert search._outcome(one, slice(0, 1500, 2)) != search._outcome(one)
    assert search._outcome(two) != search._outcome(one)
    assert search.simulations == 3


def test_without_a_plan_the_fleet_that_comes_nearest_is_named() -> None:
    answer = plan_serving(question(60, slo={"itl": 0.008}, max_gpus=4))
    assert not answer.plans
    assert not answer.impossible
    assert answer.best_effort is not None
    assert answer.best_effort.fleet.gpus <= 4
    assert 0 < (answer.best_effort.metrics.slo_violations or {})["itl"] <= 1
    # Nothing is simulated where bounds alone are too dear, and one fleet all the same.
    crowded = plan_serving(question(2000, max_gpus=2, space=EngineSpace(tp=(1,), pp=(1,))))
    assert crowded.pruned == crowded.simulations == 1
    assert crowded.best_effort is not None


def test_what_fewer_gpus_miss_is_found_for_a_plan_of_one_engine() -> None:
    large = catalog.get_model("llama3.1-405b")
    slow, space = {"ttft": 3.0, "itl": 0.08}, EngineSpace(tp=(8,), pp=(1, 2))
    answer = plan_serving(question(1, model=large, space=space, slo=slow, allow_disaggregated=True))
    best = answer.plans[0].fleet
    assert (best.serving_pool.count, best.gpus) == (1, 16)
    assert answer.smaller_fleet is not None
    assert answer.smaller_fleet.fleet.gpus == 8
    assert (answer.smaller_fleet.metrics.slo_violations or {})["itl"] > 0.01
    alone = plan_serving(question(0.1, model=large, space=space._replace(tp=(4, 8), pp=(1,)),
                                  slo={"ttft": 9.0}))  # fmt: skip
    assert alone.plans[0].fleet.gpus == 8
    assert alone.smaller_fleet is None
    assert alone.largest_infeasible is not None
    assert alone.largest_infeasible[0] == "tp 4"
    assert "no room" in alone.largest_infeasible[1]


def test_experts_are_spread_over_all_gpus_or_none() -> None:
    sparse = catalog.get_model("qwen3-30b-a3b")
    found = list_engine_layouts(sparse, CLUSTER, 4, EngineSpace()).layouts
    shapes = {(one.tp, one.dp, one.ep, one.effective_expert_tp) for one in found}
    assert (1, 4, 4, 1) in shapes
    assert (1, 4, 1, 4) in shapes
    assert all(tp * dp == ep * inner for tp, dp, ep, inner in shapes)


def test_only_what_the_target_can_run_is_planned_for_it() -> None:
    steady = {"ttft": 1.0, "itl": 0.02}
    own = plan_serving(
        question(30, slo=steady, allow_disaggregated=True, target="meshwright", max_gpus=16,
                 space=EngineSpace(tp=(1, 2), pp=(1, 2)))
    )  # fmt: skip
    assert own.plans
    assert own.infeasible["pp 2"] == "mw serve shares a model by tp alone, without pp, dp or ep"
    shared = question(
        60,
        slo=steady,
        allow_disaggregated=True,
        target="meshwright",
        space=EngineSpace(tp=(2,), pp=(1,)),
    )
    assert "one GPU each" in plan_serving(shared).infeasible["tp 2 → tp 2"]
    for plan in own.plans:
        assert plan.fleet.gpus <= CLUSTER.gpus_per_node
        assert build_command_lines(plan.fleet, "meshwright", "folder").lines
    quick = {"ttft": 1.0, "itl": 0.015}
    staged = question(50, slo=quick, allow_disaggregated=True, space=EngineSpace(tp=(1,), pp=(2,)))
    assert any(plan.fleet.prefill_pool for plan in plan_serving(staged).plans)
    theirs = plan_serving(msgspec.structs.replace(staged, target="vllm"))
    assert [plan.fleet.prefill_pool for plan in theirs.plans] == [None]


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InputError, match="slo"):
        question(slo={})
    at_once = tuple(msgspec.structs.replace(one, arrival_s=0.0) for one in asked(1, 5))
    with pytest.raises(InputError, match="arrive"):
        question(requests=at_once)


@pytest.mark.parametrize("target", [each for each in ENGINE_TARGETS if each != "meshwright"])
def test_command_lines_say_degrees_as_each_engine_means_them(target: str) -> None:
    replica = Replica(
        model=catalog.get_model("deepseek-v3"),
        cluster=CLUSTER,
        quantization=Quantization(kv="fp8"),
        layout=Layout(dp=8, ep=8, expert_tp=1),
    )
    limits = default_scheduler_config(replica, max_num_seqs=512, max_num_batched_tokens=16384)
    copies = ReplicaPool(replica=replica, scheduler_config=limits)
    line = build_command_lines(ServingFleet(serving_pool=copies), target, "folder").lines[0]  # type: ignore[arg-type]
    expected = {
        "vllm": ["--data-parallel-size 8", "--enable-expert-parallel", "--max-num-seqs 64 "],
        "sglang": ["--tp-size 8", "--dp-size 8", "--ep-size 8", "--max-running-requests 512 "],
        "tensorrt-llm": ["--tp_size 8", "--ep_size 8", "--max_batch_size 64 "],
    }[target]
    assert all(words in line for words in expected)
    both = build_command_lines(
        ServingFleet(serving_pool=copies, prefill_pool=copies),
        target,  # type: ignore[arg-type]
        "folder",
    )
    marks = {
        "vllm": ["kv_producer", "kv_consumer"],
        "sglang": ["--disaggregation-mode prefill", "--disaggregation-mode decode"],
        "tensorrt-llm": ["prefill.yaml", "decode.yaml"],
    }[target]
    assert all(mark in line for mark, line in zip(marks, both.lines, strict=True))


def test_what_tensorrt_llm_has_no_flags_for_stands_in_a_file() -> None:
    replica = Replica(
        model=catalog.get_model("llama3.1-8b"),
        cluster=CLUSTER,
        quantization=Quantization(kv="fp8"),
        layout=Layout(),
    )
    limits = msgspec.structs.replace(default_scheduler_config(replica), enable_prefix_caching=False)
    copies = ReplicaPool(replica=replica, scheduler_config=limits)
    share = f"{replica.engine.gpu_memory_utilization:g}"
    (line,), _, notes = build_command_lines(
        ServingFleet(serving_pool=copies), "tensorrt-llm", "folder"
    )
    assert "--enable_chunked_prefill --extra_llm_api_options options.yaml --port" in line
    cache = f"{{dtype: fp8, enable_block_reuse: false, free_gpu_memory_fraction: {share}}}"
    assert f"options.yaml holds the lines kv_cache_config: {cache}" in notes
    notes = build_command_lines(
        ServingFleet(serving_pool=copies, prefill_pool=copies), "tensorrt-llm", "folder"
    ).notes
    assert any("prefill.yaml" in note and "disable_overlap" in note for note in notes)
