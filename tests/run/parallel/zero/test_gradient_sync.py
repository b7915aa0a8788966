"""Data parallelism with buckets and ZeRO give what one device gives, and reduce during backward."""

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.spec.model.feedforward import MoESpec
from tests.run.parallel.equivalence import Case, check, cut, sequences

DENSE = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
TIED = build_decoder_model(
    "tied", layers=2, hidden=32, heads=4, kv_heads=1, ffn=48, vocab=61, tied=True
)
ROUTED = build_decoder_model(
    "routed",
    layers=2,
    hidden=32,
    heads=4,
    ffn=48,
    vocab=61,
    experts=MoESpec(count=4, top_k=2, width=32, router_bias="balance"),
)
SMALL_BUCKETS = 8 << 10


def layout(**given: Any) -> Layout:
    return Layout(**{"microbatch": 2, "precision": "fp32", **given})


TWO = [
    *(
        Case(f"zero {zero}", DENSE, layout(dp=2, zero=zero), bucket_bytes=SMALL_BUCKETS)
        for zero in range(4)
    ),
    Case(
        "zero 3, recomputing, nothing overlapped",
        DENSE,
        layout(dp=2, zero=3, recompute="full", overlap_parameters=False, overlap_gradients=False),
    ),
    Case("zero 3, recomputing, tied", TIED, layout(dp=2, zero=3, recompute="full")),
    Case("zero 3, experts whose balance moves", ROUTED, layout(dp=2, zero=3)),
    Case(
        "zero 2, nothing overlapped",
        DENSE,
        layout(dp=2, zero=2, overlap_gradients=False, overlap_parameters=False),
    ),
]
FOUR = [
    *(Case(f"zero {zero} over four", DENSE, layout(dp=4, zero=zero)) for zero in (0, 1, 3)),
    *(
        Case(
            f"zero {zero} beside tensor parallelism",
            TIED,
            layout(dp=2, tp=2, zero=zero, sequence_parallel=zero % 2 == 1),
            bucket_bytes=SMALL_BUCKETS,
        )
        for zero in range(4)
    ),
    *(
        Case(f"zero {zero} within pairs of four", DENSE, layout(dp=4, shard=2, zero=zero))
        for zero in (1, 2, 3)
    ),
    Case("zero 2 of experts", ROUTED, layout(dp=4, ep=2, zero=2)),
    Case("zero 3 of experts, in pairs", ROUTED, layout(dp=4, ep=2, zero=3, shard=2)),
    Case("zero 3 in stages", TIED, layout(dp=2, pp=2, zero=3, schedule="zb-h1")),
]


@pytest.mark.parametrize(
    "cases", [TWO, pytest.param(FOUR, marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_replicas_train_as_one_device(cases: list[Case]) -> None:
    found = check(cases)
    assert {name: lines for name, lines in found.items() if lines} == {}


def _train(zero: int, overlap: bool = True) -> dict[str, Any]:
    """Train in formats that round by chance, and note what can be seen on the way."""
    plan = layout(
        dp=2,
        zero=zero,
        precision="bf16",
        master_precision="none",
        moment_precision="int8",
        microbatch=4,
        overlap_gradients=overlap,
    )
    mesh = Mesh(plan)
    mine = shard_model(DENSE, mesh, dtype=torch.bfloat16, seed=1)
    layers = list(mine.decoder.layers)
    watched = layers[0].get_parameter("mlp.down.weight")
    sync, runner = make_gradient_sync(mine, bucket_bytes=SMALL_BUCKETS), ForwardBackwardRunner(mine)
    settings = OptimizerConfig(lr=1e-3, warmup_steps=0, clip_grad=None)
    optimizer = make_optimizer(sync.named_parameters(), plan, settings, total_steps=3, seed=1)
    seen: dict[str, Any] = {}

    def reductions() -> int:
        return sum("reduce" in entry.op for entry in mesh.flight_recorder.records)

    # The embedding's gradient is the last of a step.
    mine.decoder.embedding.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: seen.update(early=reductions() - seen["before"])
    )
    layers[1].register_forward_hook(lambda *_: seen.update(in_forward=_bytes(layers[0])))
    for step in range(3):
        batch = sequences(DENSE.vocab, 8, step, packed=False)
        part = cut(batch, 4 * mesh.coordinate.dp, 4)
        seen["before"] = reductions()
        version = watched._version
        sync.begin_step()
        runner([part], 1 / 128, sync.mark_last_backward)
        seen["held"] = sum(each.grad is not None for each in mine.decoder.parameters())
        seen["after_backward"] = _bytes(layers[0])
        gradients = sync.reduced_gradients()
        seen["all"] = reductions() - seen["before"]
        seen["versions"] = [watched._version - version]
        optimizer.step(1e-3, norm=sync.grad_norm(), gradients=gradients)
        sync.zero_grads_and_unshard()
        seen["versions"] += [watched._version - version]
    seen["loss"] = float(runner.evaluate(part).loss_sum)
    with sync.unsharded_parameters():
        seen["weights"] = {
            name: each.detach().float().numpy() for name, each in mine.decoder.named_parameters()
        }
    seen["lies"] = {name: (lie.start, lie.stop) for name, lie in sync.shard_ranges().items()}
    seen["decays"] = {
        name: state.param_options.weight_decay > 0 for name, state in optimizer.states.items()
    }
    return seen


def _bytes(layer: torch.nn.Module) -> int:
    return max(each.untyped_storage().nbytes() for each in layer.parameters())


def _look() -> list[dict[str, Any]]:
    return [*(_train(zero) for zero in range(4)), _train(0, overlap=False)]


@pytest.fixture(scope="module")
def seen() -> list[list[dict[str, Any]]]:
    """What each of two ranks saw under ZeRO 0 to 3, and under 0 without overlap."""
    found: list[list[dict[str, Any]]] = spawn_ranks(2, _look)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_reductions_are_issued_before_the_last_gradient_is_there(seen: Any, zero: int) -> None:
    for rank in seen:
        assert rank[zero]["all"] >= 4
        assert rank[zero]["early"] >= rank[zero]["all"] - 1


def test_without_overlap_reductions_come_after_backward(seen: Any) -> None:
    assert [rank[4]["early"] for rank in seen] == [0, 0]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_rounded_by_chance_do_not_depend_on_who_updates_them(seen: Any, zero: int) -> None:
    # Bits: two ranks' gradients have the same sum in any order, and blocks and random numbers lie
    # in a part as they lie in the whole.
    whole = seen[0][0]["weights"]
    for rank in seen:
        for name, weight in rank[zero]["weights"].items():
            assert (weight == whole[name]).all(), name
        assert rank[zero]["loss"] == rank[0]["loss"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parts_cover_every_parameter_once(seen: Any, zero: int) -> None:
    sizes = {name: weight.size for name, weight in seen[0][0]["weights"].items()}
    for name, size in sizes.items():
        runs = sorted(rank[zero]["lies"][name] for rank in seen if name in rank[zero]["lies"])
        assert runs[0][0] == 0
        assert runs[-1][1] == size
        assert all(low[1] == high[0] for low, high in pairwise(runs))
        assert all(start % 256 == 0 for start, _ in runs)


def test_a_flat_part_is_treated_as_its_parameter(seen: Any) -> None:
    whole = seen[0][0]["decays"]
    assert set(whole.values()) == {True, False}
    for rank in seen:
        assert rank[1]["decays"] == {name: whole[name] for name in rank[1]["decays"]}


def test_gradients_are_gone_after_backward_where_they_are_cut(seen: Any) -> None:
    assert seen[0][4]["held"] > 0
    assert [seen[0][zero]["held"] for zero in (2, 3)] == [0, 0]


def test_zero_3_lets_go_of_weights_between_uses(seen: Any) -> None:
    assert seen[0][2]["in_forward"] > 0
    assert (seen[0][3]["in_forward"], seen[0][3]["after_backward"]) == (0, 0)


def test_an_update_is_a_new_version_of_a_weight_and_gathering_is_none(seen: Any) -> None:
    for rank in seen:
        for zero in (1, 2, 3):
            assert rank[zero]["versions"] == [0, 1]
