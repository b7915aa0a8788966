"""The cheapest fleet that keeps to an objective, found without simulating them all."""

from math import inf

import msgspec
import pytest

from meshwright.errors import InputError, Problem
from meshwright.predict.serving.engine_flags import TARGETS, command_lines
from meshwright.predict.serving.fleet import Copies, Fleet, default_limits, run_fleet
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.outcome import outcome_of
from meshwright.predict.serving.planned import ServingAnswer, ServingQuestion
from meshwright.predict.serving.planning import STEPS, _Search, plan_serving
from meshwright.predict.serving.replica import Replica
from meshwright.predict.serving.shapes import Shape, Space, asked_of, candidates, shape_of
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.workload import Fixed, Poisson, Prefixes, Request, Requests, Uniform

CLUSTER = catalog.cluster("h200-superpod").with_gpus(16)
MODEL = catalog.model("llama3.1-8b")
OBJECTIVE = {"ttft": 0.5, "itl": 0.05}


def asked(rate: float, count: int = 300) -> tuple[Request, ...]:
    prompt, output = Uniform(low=200, high=2000), Uniform(low=10, high=200)
    stream = Requests(arrival=Poisson(rate_per_s=rate), prompt=prompt, output=output)
    return tuple(stream.generate(0, count))


def question(rate: float = 60, **given: object) -> ServingQuestion:
    known = {
        "model": MODEL, "cluster": CLUSTER, "requests": asked(rate), "objective": OBJECTIVE,
        "most_gpus": 16, "space": Space(tp=(1, 2), pp=(1,)), "apart": False, **given,
    }  # fmt: skip
    return ServingQuestion(**known)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> ServingAnswer:
    return plan_serving(question())


def test_the_best_plan_keeps_to_the_objective_and_one_engine_less_does_not(
    found: ServingAnswer,
) -> None:
    best = found.plans[0]
    again = outcome_of(run_fleet(best.fleet, list(asked(60))), best.fleet, OBJECTIVE)
    assert again == best.outcome
    assert (again.good_share or 0) >= 0.99
    assert found.fewer is not None
    assert found.fewer.fleet.gpus < best.fleet.gpus
    assert (found.fewer.outcome.good_share or 0) < 0.99


def test_no_number_of_engines_is_cheaper_when_all_are_tried(found: ServingAnswer) -> None:
    fewest = inf
    for tp in (1, 2):
        replica = Replica(model=MODEL, cluster=CLUSTER, layout=Layout(tp=tp))
        limits = default_limits(replica)
        for tokens in (8192, *STEPS[1:]):
            own = msgspec.structs.replace(
                limits, batch_tokens=tokens, batch_requests=min(limits.batch_requests, tokens)
            )
            for count in range(1, 8):
                fleet = Fleet(serving=Copies(replica=replica, limits=own, count=count))
                if fleet.gpus >= fewest:
                    break
                shown = outcome_of(run_fleet(fleet, list(asked(60))), fleet, OBJECTIVE)
                if (shown.good_share or 0) >= 0.99:
                    fewest = fleet.gpus
    assert found.plans[0].fleet.gpus == fewest


def test_bounds_are_never_above_what_a_simulation_takes() -> None:
    requests = list(asked(1000, 300))
    about = asked_of(requests)
    for tp in (1, 4):
        one = Replica(model=MODEL, cluster=CLUSTER)
        shape = shape_of(Layout(tp=tp), one, about, {"ttft": inf})
        assert isinstance(shape, Shape)
        fleet = Fleet(serving=Copies(replica=shape.replica, limits=default_limits(shape.replica)))
        served = run_fleet(fleet, requests)
        assert len(requests) * shape.least_s < served.seconds


def shared(rate: float, count: int = 300) -> tuple[Request, ...]:
    """Return requests whose long prompts begin in one of four ways."""
    stream = Requests(
        arrival=Poisson(rate_per_s=rate), prompt=Fixed(tokens=4200), output=Fixed(tokens=20),
        prefix=Prefixes(groups=4, tokens=Fixed(tokens=4096)),
    )  # fmt: skip
    return tuple(stream.generate(0, count))


def test_what_prompts_share_is_no_work_of_a_bound() -> None:
    requests = list(shared(100, 600))
    about = asked_of(requests)
    assert about.prompt == 4200
    assert about.fresh == pytest.approx(104 + 4 * 4096 / 600)
    assert about.long_fresh == 104
    shape = shape_of(Layout(), Replica(model=MODEL, cluster=CLUSTER), about, {"ttft": inf})
    assert isinstance(shape, Shape)
    fleet = Fleet(serving=Copies(replica=shape.replica, limits=default_limits(shape.replica)))
    assert len(requests) * shape.least_s < run_fleet(fleet, requests).seconds


def test_prompts_that_share_their_beginning_take_few_gpus() -> None:
    # Whole prompts would keep more than two GPUs busy.
    answer = plan_serving(question(requests=shared(30), objective={"ttft": 0.2}, most_gpus=2))
    assert answer.plans[0].fleet.gpus == 1


def test_layouts_are_refused_for_no_request_that_may_be_late() -> None:
    lengths = [100] * 79 + [20_000] * 21
    requests = tuple(
        Request(arrival_s=float(at), prompt_tokens=length, output_tokens=5)
        for at, length in enumerate(lengths)
    )
    alone = question(requests=requests, objective={"ttft": 0.3}, space=Space(tp=(1,), pp=(1,)))
    few, most = (
        plan_serving(msgspec.structs.replace(alone, attain=attain)) for attain in (0.75, 0.9)
    )
    assert few.plans[0].fleet.gpus == 1
    assert few.plans[0].outcome.good_share == pytest.approx(0.79)
    assert "20,000 tokens" in most.refused["1 GPU"]


def test_a_fleet_that_is_near_enough_is_the_plan() -> None:
    # Few requests within a moment: their rate is far beyond what one GPU keeps up with.
    burst = tuple(
        Request(arrival_s=1e-3 * at, prompt_tokens=2000, output_tokens=20) for at in range(20)
    )
    answer = plan_serving(
        question(
            requests=burst, objective={"ttft": 30.0}, most_gpus=4, space=Space(tp=(1,), pp=(1,))
        )
    )
    assert answer.beaten == 1
    assert answer.nearest is None
    assert answer.plans[0].fleet.gpus == 1


def test_engines_for_prompts_alone_are_looked_at() -> None:
    steady = {"ttft": 1.0, "itl": 0.02}
    together = plan_serving(question(30, objective=steady))
    either = plan_serving(question(30, objective=steady, apart=True))
    assert any(plan.fleet.prefill is not None for plan in either.plans)
    if together.plans:
        assert either.plans[0].fleet.gpus <= together.plans[0].fleet.gpus


@pytest.mark.parametrize(
    ("name", "kind"), [("rtx-4090-box", "qwen3-30b-a3b"), ("a100-pcie-box", "llama3.1-8b")]
)
def test_a_box_without_a_network_has_plans(name: str, kind: str) -> None:
    box, coded = catalog.cluster(name), Formats(weights="int4")
    answer = plan_serving(
        question(5, model=catalog.model(kind), cluster=box, formats=coded, most_gpus=8, apart=True)
    )
    assert answer.plans
    assert answer.plans[0].fleet.gpus <= 8


def test_keys_and_values_that_cannot_travel_are_no_fault_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(fleet: Fleet) -> None:
        raise InputError([Problem("disaggregate", f"no way between {fleet.gpus} GPUs", "")])

    monkeypatch.setattr("meshwright.predict.serving.fleet.transfer_of", nowhere)
    answer = plan_serving(question(30, apart=True))
    assert answer.plans
    assert all(plan.fleet.prefill is None for plan in answer.plans)
    assert "no way" in answer.refused["1 GPU → 1 GPU"]


def test_no_plan_takes_more_gpus_than_the_cluster_has() -> None:
    small = msgspec.structs.replace(CLUSTER, nodes=1)
    answer = plan_serving(question(400, cluster=small, most_gpus=64))
    assert not [plan for plan in answer.plans if plan.fleet.gpus > 8]


def test_layouts_that_cannot_do_are_refused_with_the_reason() -> None:
    large = catalog.model("llama3.1-405b")
    slow, space = {"ttft": 3.0, "itl": 0.5}, Space(tp=(1, 2, 8), pp=(1,))
    answer = plan_serving(question(0.5, model=large, space=space, objective=slow))
    assert set(answer.refused) == {"1 GPU", "tp 2"}
    assert "no room" in answer.refused["tp 2"]
    assert answer.plans[0].fleet.serving.replica.layout.tp == 8
    late = plan_serving(question(1, objective={"ttft": 0.001}))
    assert not late.plans
    assert "alone" in late.refused["1 GPU"]
    assert "around the engine" in late.refused["1 GPU"]


def test_degrees_that_no_engine_can_have_are_refused_with_the_reason() -> None:
    odd = plan_serving(question(space=Space(tp=(3,), pp=(1,))))
    assert odd.refused == {"tp 3": "3 does not divide the 32 attention heads of block 'dense'"}
    assert odd.impossible
    large = plan_serving(question(space=Space(tp=(32,))))
    assert large.refused == {"tp 32": "takes 32 GPUs, and there may be 16"}
    uneven = Space(tp=(4,), pp=(1,), dp=(1,), ep=(8,))
    spread = plan_serving(question(model=catalog.model("qwen3-30b-a3b"), space=uneven))
    assert "does not divide" in spread.refused["tp 4 ep 8"]


def test_every_degree_asked_for_that_the_gpus_do_not_allow_is_refused() -> None:
    def refused(**asked: tuple[int, ...]) -> set[str]:
        found = candidates(MODEL, CLUSTER, 8, Space(**asked))
        assert found.layouts
        return set(found.refused)

    assert refused(tp=(1, 16)) == {"tp 16"}
    assert refused(tp=(1, 16, 32)) == {"tp 16", "tp 32"}
    assert refused(tp=(4, 8), pp=(1, 2)) == {"tp 8 pp 2"}
    assert refused() == set()
    beside = plan_serving(question(space=Space(tp=(1, 32), pp=(1,))))
    assert beside.refused["tp 32"] == "takes 32 GPUs, and there may be 16"


def test_a_fleet_that_comes_up_again_with_the_same_requests_is_not_simulated_again() -> None:
    search = _Search(question(), lambda _: None)
    replica = Replica(model=MODEL, cluster=CLUSTER)
    one, two = (
        Fleet(serving=Copies(replica=replica, limits=default_limits(replica), count=count))
        for count in (1, 2)
    )
    # A sample of more than there are is all of them.
    assert search._outcome(one) is search._outcome(one, slice(1500))
    assert search._outcome(one, slice(0, 1500, 2)) != search._outcome(one)
    assert search._outcome(two) != search._outcome(one)
    assert search.simulations == 3


def test_without_a_plan_the_fleet_that_comes_nearest_is_named() -> None:
    answer = plan_serving(question(60, objective={"itl": 0.008}, most_gpus=4))
    assert not answer.plans
    assert not answer.impossible
    assert answer.nearest is not None
    assert answer.nearest.fleet.gpus <= 4
    assert 0 < (answer.nearest.outcome.missed or {})["itl"] <= 1
    # Nothing is simulated where bounds alone are too dear, and one fleet all the same.
    crowded = plan_serving(question(2000, most_gpus=2, space=Space(tp=(1,), pp=(1,))))
    assert crowded.beaten == crowded.simulations == 1
    assert crowded.nearest is not None


def test_what_fewer_gpus_miss_is_found_for_a_plan_of_one_engine() -> None:
    large = catalog.model("llama3.1-405b")
    slow, space = {"ttft": 3.0, "itl": 0.08}, Space(tp=(8,), pp=(1, 2))
    answer = plan_serving(question(1, model=large, space=space, objective=slow, apart=True))
    best = answer.plans[0].fleet
    assert (best.serving.count, best.gpus) == (1, 16)
    assert answer.fewer is not None
    assert answer.fewer.fleet.gpus == 8
    assert (answer.fewer.outcome.missed or {})["itl"] > 0.01
    alone = plan_serving(question(0.1, model=large, space=space._replace(tp=(4, 8), pp=(1,)),
                                  objective={"ttft": 9.0}))  # fmt: skip
    assert alone.plans[0].fleet.gpus == 8
    assert alone.fewer is None
    assert alone.unfit is not None
    assert alone.unfit[0] == "tp 4"
    assert "no room" in alone.unfit[1]


def test_experts_are_spread_over_all_gpus_or_none() -> None:
    sparse = catalog.model("qwen3-30b-a3b")
    found = candidates(sparse, CLUSTER, 4, Space()).layouts
    shapes = {(one.tp, one.dp, one.ep, one.experts_tp) for one in found}
    assert (1, 4, 4, 1) in shapes
    assert (1, 4, 1, 4) in shapes
    assert all(tp * dp == ep * inner for tp, dp, ep, inner in shapes)


def test_only_what_the_target_can_run_is_planned_for_it() -> None:
    steady = {"ttft": 1.0, "itl": 0.02}
    own = plan_serving(
        question(30, objective=steady, apart=True, target="meshwright", most_gpus=16,
                 space=Space(tp=(1, 2), pp=(1, 2)))
    )  # fmt: skip
    assert own.plans
    assert own.refused["pp 2"] == "mw serve shares a model by tp alone, without pp, dp or ep"
    shared = question(
        60, objective=steady, apart=True, target="meshwright", space=Space(tp=(2,), pp=(1,))
    )
    assert "one GPU each" in plan_serving(shared).refused["tp 2 → tp 2"]
    for plan in own.plans:
        assert plan.fleet.gpus <= CLUSTER.gpus_per_node
        assert command_lines(plan.fleet, "meshwright", "folder").lines
    quick = {"ttft": 1.0, "itl": 0.015}
    staged = question(50, objective=quick, apart=True, space=Space(tp=(1,), pp=(2,)))
    assert any(plan.fleet.prefill for plan in plan_serving(staged).plans)
    theirs = plan_serving(msgspec.structs.replace(staged, target="vllm"))
    assert [plan.fleet.prefill for plan in theirs.plans] == [None]


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InputError, match="objective"):
        question(objective={})
    at_once = tuple(msgspec.structs.replace(one, arrival_s=0.0) for one in asked(1, 5))
    with pytest.raises(InputError, match="arrive"):
        question(requests=at_once)


@pytest.mark.parametrize("target", [each for each in TARGETS if each != "meshwright"])
def test_command_lines_say_degrees_as_each_engine_means_them(target: str) -> None:
    replica = Replica(
        model=catalog.model("deepseek-v3"), cluster=CLUSTER, formats=Formats(kv="fp8"),
        layout=Layout(dp=8, ep=8, expert_tp=1),
    )  # fmt: skip
    limits = default_limits(replica, batch_requests=512, batch_tokens=16384)
    copies = Copies(replica=replica, limits=limits)
    line = command_lines(Fleet(serving=copies), target, "folder").lines[0]  # type: ignore[arg-type]
    expected = {
        "vllm": ["--data-parallel-size 8", "--enable-expert-parallel", "--max-num-seqs 64 "],
        "sglang": ["--tp-size 8", "--dp-size 8", "--ep-size 8", "--max-running-requests 512 "],
        "tensorrt-llm": ["--tp_size 8", "--ep_size 8", "--max_batch_size 64 "],
    }[target]
    assert all(words in line for words in expected)
    both = command_lines(Fleet(serving=copies, prefill=copies), target, "folder")  # type: ignore[arg-type]
    marks = {
        "vllm": ["kv_producer", "kv_consumer"],
        "sglang": ["--disaggregation-mode prefill", "--disaggregation-mode decode"],
        "tensorrt-llm": ["prefill.yaml", "decode.yaml"],
    }[target]
    assert all(mark in line for mark, line in zip(marks, both.lines, strict=True))


def test_what_tensorrt_llm_has_no_flags_for_stands_in_a_file() -> None:
    replica = Replica(
        model=catalog.model("llama3.1-8b"), cluster=CLUSTER, formats=Formats(kv="fp8"),
        layout=Layout(),
    )  # fmt: skip
    limits = msgspec.structs.replace(default_limits(replica), prefix_cache=False)
    copies = Copies(replica=replica, limits=limits)
    share = f"{replica.engine.memory_share:g}"
    (line,), _, notes = command_lines(Fleet(serving=copies), "tensorrt-llm", "folder")
    assert "--enable_chunked_prefill --extra_llm_api_options options.yaml --port" in line
    cache = f"{{dtype: fp8, enable_block_reuse: false, free_gpu_memory_fraction: {share}}}"
    assert f"options.yaml holds the lines kv_cache_config: {cache}" in notes
    notes = command_lines(Fleet(serving=copies, prefill=copies), "tensorrt-llm", "folder").notes
    assert any("prefill.yaml" in note and "disable_overlap" in note for note in notes)
