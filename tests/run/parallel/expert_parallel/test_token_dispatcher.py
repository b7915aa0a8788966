"""Expert parallelism gives what one device gives, whoever holds experts, their width and tokens."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch
from torch import Tensor

from meshwright.run.nn.decoder import BatchLoss
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.expert_parallel.token_dispatcher import find_expert_parallel_problems
from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.group_coordinator import AsyncWork
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel, shard_model
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, MoESpec, build_decoder_model
from tests.run.parallel.equivalence import Case, check, cut, sequences
from tests.run.parallel.nearness import TOLERANCES

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61}
MIXTRAL = build_decoder_model(
    "mixtral", **SHAPE, kv_heads=2, experts=MoESpec(count=4, top_k=2, width=16)
)
DEEPSEEK = build_decoder_model(
    "deepseek",
    **SHAPE,
    dense_layers=1,
    experts=MoESpec(
        count=8,
        top_k=3,
        width=16,
        shared_width=24,
        shared_gate=True,
        router_bias="balance",
        scoring="sigmoid",
        scale=2.5,
        groups=4,
        groups_used=2,
    ),
)
GPT_OSS = build_decoder_model(
    "gpt-oss",
    **SHAPE,
    experts=MoESpec(count=4, top_k=2, width=16, bias=True, router_bias="linear"),
)
NEMOTRON = build_decoder_model(
    "nemotron",
    **SHAPE,
    experts=MoESpec(count=4, top_k=2, width=16, latent=8, shared_width=16, router_bias="balance"),
)
BALANCED = BuildOptions(moe_aux_loss_coeff=0.05)
LIMITED = BuildOptions(moe_aux_loss_coeff=0.05, capacity_factor=0.6)


def layout(**degrees: Any) -> Layout:
    return Layout(microbatch=2, precision="fp32", **degrees)


TWO = [
    Case("whole experts", MIXTRAL, layout(dp=2, ep=2)),
    Case("shared experts", DEEPSEEK, layout(dp=2, ep=2), options=BALANCED),
    Case("shared experts while rows travel", DEEPSEEK, layout(dp=2, ep=2, overlap_ep=True)),
    Case("tokens of one sequence", DEEPSEEK, layout(tp=2, ep=2, expert_tp=1), options=BALANCED),
    Case("a slice of each expert", GPT_OSS, layout(tp=2), options=BALANCED),
    Case("a slice of narrower ones", NEMOTRON, layout(tp=2, sequence_parallel=True)),
    Case("all experts, some tokens", DEEPSEEK, layout(tp=2, expert_tp=1)),
    Case("half of each sequence", DEEPSEEK, layout(cp=2, ep=2), options=BALANCED),
    Case("limited room", DEEPSEEK, layout(dp=2, ep=2), options=LIMITED),
    Case("limited room of all experts", MIXTRAL, layout(dp=2), options=LIMITED),
]
FOUR = [
    Case("every rank its own", MIXTRAL, layout(dp=4, ep=4), packed=True),
    Case("two of four hold the same", DEEPSEEK, layout(tp=2, dp=2, ep=2, expert_tp=1)),
    Case("experts and width", DEEPSEEK, layout(tp=2, dp=2, ep=2), options=BALANCED),
    Case(
        "experts and width, a share of the tokens on each",
        DEEPSEEK,
        layout(tp=2, dp=2, ep=2, sequence_parallel=True, overlap_ep=True),
        options=BALANCED,
    ),
    Case("biases", GPT_OSS, layout(tp=2, dp=2, ep=2, sequence_parallel=True)),
    Case("width where nothing else is cut", GPT_OSS, layout(dp=4, ep=2, expert_tp=2)),
    Case("a quarter of each", DEEPSEEK, layout(tp=2, cp=2, ep=2), packed=True, options=BALANCED),
    Case("two stages", MIXTRAL, layout(pp=2, dp=2, ep=2), options=BALANCED),
    Case("limited room in stages", MIXTRAL, layout(pp=2, dp=2, ep=2), options=LIMITED),
    Case("another order", NEMOTRON, layout(tp=2, dp=2, ep=2, order="ep-dp-tp-cp-pp")),
]


@pytest.mark.parametrize(
    "cases", [TWO, pytest.param(FOUR, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
)
def test_ranks_that_share_experts_train_as_one_device(cases: list[Case]) -> None:
    found = check(cases)
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_ranks_that_cannot_hold_equal_parts_are_refused() -> None:
    assert find_expert_parallel_problems(MIXTRAL, layout(dp=2, ep=2)) == []
    found = find_expert_parallel_problems(MIXTRAL, layout(dp=3, ep=3))
    assert [problem.where for problem in found] == ["layout.ep"]
    found = find_expert_parallel_problems(MIXTRAL, layout(tp=3))
    assert [problem.where for problem in found] == ["layout.expert_tp"]
    misplaced = layout(tp=2, pp=2, expert_tp=1, order="tp-pp-cp-ep-dp")
    assert [problem.where for problem in find_expert_parallel_problems(MIXTRAL, misplaced)] == [
        "layout.order"
    ]


# What two ranks find when they run a layer of experts in other ways; they are started once.


def gradients(mine: ShardedModel, batch: Microbatch) -> dict[str, Tensor]:
    """Return this rank's gradients of a microbatch."""
    loss = mine.pipeline_stage.forward_one_chunk(0, batch, None)
    assert isinstance(loss, BatchLoss)
    mine.decoder.zero_grad()
    loss.total.backward()  # type: ignore[no-untyped-call]
    named = mine.decoder.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the norm of a gradient."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).norm() / w.norm().clamp(min=1e-9)) for n, w in wanted.items())


def made(described: Layout, model: Model = DEEPSEEK) -> ShardedModel:
    return shard_model(model, Mesh(described), dtype=torch.float32, seed=1, options=BALANCED)


def batch_of(rank: int, count: int = 2) -> Microbatch:
    return cut(sequences(SHAPE["vocab"], 4, 0, packed=False), rank * 2, count)


def limited() -> dict[str, float]:
    mine = made(layout(dp=2, ep=2))
    batch, spec = batch_of(mine.mesh.rank), DEEPSEEK.moe
    assert spec is not None
    wanted, again = gradients(mine, batch), gradients(mine, batch)
    found = {"equal runs": furthest(again, wanted)}
    for name, factor in (("roomy", spec.count / spec.top_k), ("tight", 0.5), ("tight again", 0.5)):
        for experts in mine.decoder.iter_moe_layers():
            experts.capacity_factor = factor
        found[name] = furthest(gradients(mine, batch), wanted)
    return found


def recomputed() -> dict[str, float]:
    found = {}
    for described in (layout(dp=2, ep=2, overlap_ep=True), layout(tp=2, ep=2, expert_tp=1)):
        mine = made(described)
        batch = batch_of(mine.mesh.coordinate.dp)
        wanted = gradients(mine, batch)
        for ops in (("moe",), ("moe_act", "shared_experts"), ()):
            kind = "selective" if ops else "full"
            plan = layout(dp=2, recompute=kind, recompute_ops=ops)
            apply_recompute(mine.decoder.layers, plan)
            found[f"{described.tp} {ops}"] = furthest(gradients(mine, batch), wanted)
    return found


def uneven() -> dict[str, float]:
    """Train on numbers of tokens that two ranks cannot share equally, one of them on none."""
    mine, whole = made(layout(tp=2)), build_decoder(DEEPSEEK, dtype=torch.float32, options=BALANCED)
    materialize(whole, "cpu", seed=1)
    runner, sync = ForwardBackwardRunner(mine), make_gradient_sync(mine)
    found = {}
    for length in (5, 1):
        full = batch_of(0, 1)
        batch = Microbatch(full.tokens_BT[:, :length], full.labels_BT[:, :length])
        sync.begin_step()
        runner([batch], 1.0, sync.mark_last_backward)
        here = {name: grad.clone() for name, grad in sync.reduced_gradients().items()}
        sync.zero_grads_and_unshard()
        whole.zero_grad()
        whole.loss(batch.tokens_BT, batch.labels_BT).total.backward()  # type: ignore[no-untyped-call]
        found[f"{length} tokens"] = furthest(
            here,
            {
                name: mine.shard_specs[name].select_local(each.grad)
                for name, each in whole.named_parameters()
                if each.grad is not None
            },
        )
    return found


def observed() -> list[str]:
    """Return in which order rows travel and shared experts run, forward and backward."""
    mine = made(layout(dp=2, ep=2, overlap_ep=True))
    events: list[str] = []
    group = mine.mesh["ep"]
    start = group.start_all_to_all

    def noted(*given: Any, **named: Any) -> AsyncWork:
        events.append("rows leave")
        pending = start(*given, **named)
        wait = pending.wait

        def waited() -> Tensor:
            events.append("rows arrive")
            return wait()

        pending.wait = waited  # type: ignore[method-assign]
        return pending

    group.start_all_to_all = noted  # type: ignore[method-assign]
    (experts,) = mine.decoder.iter_moe_layers()
    assert experts.shared is not None
    experts.shared.register_forward_hook(lambda *_: events.append("shared experts"))
    weight = experts.shared.down.weight
    weight.register_hook(lambda _: events.append("their gradients"))  # type: ignore[no-untyped-call]
    gradients(mine, batch_of(mine.mesh.rank))
    return events


def found_by_ranks() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {part.__name__: part() for part in (limited, recomputed, uneven, observed)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn_ranks(2, found_by_ranks, timeout_s=120)


def test_equal_inputs_give_equal_bits(ranks: list[dict[str, Any]]) -> None:
    assert [found["limited"]["equal runs"] for found in ranks] == [0, 0]


def test_experts_with_room_for_all_tokens_drop_none(ranks: list[dict[str, Any]]) -> None:
    assert all(found["limited"]["roomy"] < TOLERANCES["gradient"] for found in ranks)


def test_experts_with_too_little_room_drop_the_same_tokens_each_time(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        assert 1e-2 < found["limited"]["tight"] == found["limited"]["tight again"]


def test_recomputed_experts_have_the_same_gradients(ranks: list[dict[str, Any]]) -> None:
    assert [set(found["recomputed"].values()) for found in ranks] == [{0.0}, {0.0}]


def test_ranks_share_any_number_of_tokens(ranks: list[dict[str, Any]]) -> None:
    assert all(max(found["uneven"].values()) < TOLERANCES["gradient"] for found in ranks)


def test_shared_experts_run_while_rows_travel(ranks: list[dict[str, Any]]) -> None:
    there = ["rows leave", "shared experts", "rows arrive", "rows leave", "rows arrive"]
    back = ["rows leave", "rows arrive", "rows leave", "their gradients", "rows arrive"]
    assert [found["observed"] for found in ranks] == [there + back] * 2
