"""Pipelines run the schedules that the simulator times, and give what one device gives."""

# Autograd's own functions are untyped.
# mypy: allow-untyped-calls

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.policy.pipeline.schedule import PipelineAction
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.forward_backward import (
    ForwardBackwardRunner,
    find_last_gradient_actions,
    find_pipeline_problems,
    make_step_schedule,
)
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model
from meshwright.spec.model.feedforward import MoESpec
from meshwright.spec.model.model import MtpSpec
from tests.run.parallel.equivalence import Case, check

DENSE = build_decoder_model("dense", layers=8, hidden=16, heads=2, ffn=24, vocab=31)
SMALL = build_decoder_model("dense", layers=4, hidden=16, heads=2, ffn=24, vocab=31)
TIED = msgspec.structs.replace(SMALL, tied=True)
EXPERTS = MoESpec(count=4, top_k=2, width=8, shared_width=8)
ROUTED = build_decoder_model(
    "routed", layers=4, hidden=16, heads=2, ffn=24, vocab=31, experts=EXPERTS
)
FURTHER = msgspec.structs.replace(
    SMALL,
    multi_token=MtpSpec(depth=1, block=SMALL.blocks[0].name),
    embedding_norm=True,
)
CHUNKED = {"interleaved", "zb-v", "dualpipe-v"}
SCHEDULES = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "zb-v",
    "dualpipe-v",
    "dualpipe",
)


def layout(pp: int, schedule: str = "1f1b", **others: object) -> Layout:
    stages = 2 if schedule in CHUNKED else 1
    return msgspec.convert(
        {"pp": pp, "schedule": schedule, "virtual_stages": stages, "precision": "fp32"} | others,
        Layout,
    )


def differing(cases: list[Case]) -> dict[str, list[str]]:
    return {name: lines for name, lines in check(cases).items() if lines}


def test_two_stages_train_as_one_device_under_every_schedule() -> None:
    cases = [Case(kind, SMALL, layout(2, kind), sequences=4) for kind in SCHEDULES]
    assert differing(cases) == {}


def test_two_stages_train_what_spans_them_as_one_device() -> None:
    balanced = BuildOptions(moe_aux_loss_coeff=0.05)
    recomputed = {"recompute": "full", "recompute_layers": 1}
    cases = [
        Case("tied", TIED, layout(2), sequences=4),
        Case("tied, both ends on one rank", TIED, layout(2, "zb-v"), sequences=4),
        Case("further tokens", FURTHER, layout(2, "zb-h1"), sequences=4),
        Case("further tokens, both ends twice", FURTHER, layout(2, "dualpipe"), sequences=4),
        Case("balanced experts", ROUTED, layout(2, "zb-v"), sequences=4, options=balanced),
        Case("experts at both ends", ROUTED, layout(2, "dualpipe"), sequences=4, options=balanced),
        Case("uneven", SMALL, layout(2, stage_layers=(3, 1)), sequences=4, packed=True),
        Case("ends without layers", SMALL, layout(2, stage_layers=(4, 0)), sequences=2),
        Case("recomputed", SMALL, layout(2, "interleaved", **recomputed), sequences=4),
        Case("waits at once", SMALL, layout(2, "zb-h1", overlap_pp=False), sequences=4),
    ]
    assert differing(cases) == {}


@pytest.mark.slow
def test_four_stages_train_as_one_device() -> None:
    uneven = (1, 2, 0, 1, 1, 0, 2, 1)
    cases = [
        Case("gpipe", SMALL, layout(4, "gpipe"), sequences=4),
        Case("1f1b", TIED, layout(4)),
        Case("zb-h1", SMALL, layout(4, "zb-h1"), sequences=6),
        Case("interleaved, uneven", DENSE, layout(4, "interleaved", stage_layers=uneven)),
        Case("zb-v", DENSE, layout(4, "zb-v", microbatch=2)),
        Case("dualpipe-v", DENSE, layout(4, "dualpipe-v"), sequences=5),
        Case("dualpipe", TIED, layout(4, "dualpipe"), sequences=5),
    ]
    assert differing(cases) == {}


@pytest.mark.slow
def test_stages_compose_with_tensor_and_data_parallelism() -> None:
    cases = [
        Case("1f1b", TIED, layout(2, sequence_parallel=True, tp=2, dp=2)),
        Case("zb-v", SMALL, layout(2, "zb-v", zero=2, tp=2, dp=2)),
    ]
    assert differing(cases) == {}


LENGTHS = (12, 5, 16, 9)


def mixed(vocab: int) -> list[Microbatch]:
    """Return microbatches of different lengths."""
    made = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, vocab, (2, length + 1), generator=made) for length in LENGTHS]
    return [Microbatch(each[:, :-1].clone(), each[:, 1:].clone()) for each in rows]


def run_mixed(
    model: Model, asked: Layout
) -> tuple[list[str], list[PipelineAction], list[int], bool]:
    """Run one step; return wrong gradients, what was done, whose gradients were complete when."""
    mesh = Mesh(asked)
    mine = shard_model(model, mesh, dtype=torch.float32, seed=1)
    runner, sync = ForwardBackwardRunner(mine), make_gradient_sync(mine)
    evaluated = mesh.world.all_reduce(runner.evaluate(mixed(model.vocab)[0]).loss_sum.reshape(1))
    completed: list[int] = []
    sync.begin_step()
    runner(mixed(model.vocab), 0.01, completed.append)
    assert runner.schedule_runner is not None
    performed = runner.schedule_runner.executed_actions
    gradients = sync.reduced_gradients()
    whole = build_decoder(model, dtype=torch.float32)
    materialize(whole, "cpu", seed=1)
    for each in mixed(model.vocab):
        (whole.loss(each.tokens_BT, each.labels_BT).total * 0.01).backward()
    first = mixed(model.vocab)[0]
    wanted = whole.loss(first.tokens_BT, first.labels_BT).loss_sum
    exact = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    wrong = [
        name
        for name, found in gradients.items()
        if not torch.allclose(found, exact[name], rtol=1e-4, atol=1e-7)
    ]
    if not torch.allclose(evaluated, wanted):
        wrong.append(f"evaluation: {float(evaluated)}, {float(wanted)}")
    starts = [one.start_s for one in performed]
    return wrong, [one.action for one in performed], completed, starts == sorted(starts)


def test_ranks_do_what_the_schedule_says_also_with_microbatches_of_different_lengths() -> None:
    asked = layout(2, "zb-v")
    schedule = make_step_schedule(asked, len(LENGTHS))
    for rank, (wrong, did, completed, in_order) in enumerate(
        spawn_ranks(2, run_mixed, SMALL, asked)
    ):
        lane = schedule.actions[rank]
        assert wrong == []
        assert tuple(did) == lane
        assert in_order
        assert sorted(completed) == list(schedule.chunks_of(rank))


def test_a_chunk_is_complete_with_the_last_pass_that_touches_its_weights() -> None:
    lane = (
        PipelineAction("F", 0, 0),
        PipelineAction("F", 3, 0),
        PipelineAction("B", 3, 0),
        PipelineAction("I", 0, 0),
        PipelineAction("W", 0, 0),
        PipelineAction("I", 3, 1),
        PipelineAction("W", 3, 1),
    )
    assert find_last_gradient_actions(lane) == {
        PipelineAction("W", 0, 0),
        PipelineAction("W", 3, 1),
    }


def test_a_rank_without_any_layer_is_refused() -> None:
    idle = layout(4, stage_layers=(2, 0, 1, 1))
    (problem,) = find_pipeline_problems(SMALL, idle)
    assert "pipeline rank 1" in problem.what
    assert find_pipeline_problems(SMALL, layout(4, stage_layers=(0, 2, 2, 0))) == []
    assert find_pipeline_problems(SMALL, Layout()) == []
