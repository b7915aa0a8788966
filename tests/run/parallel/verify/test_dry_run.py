"""A layout of hundreds of ranks is played on one processor, and ranks that part are named."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="plays ranks by torch's fake process group")

import torch
import torch.distributed as dist

from meshwright.policy.pipeline import build_schedule, verify_schedule
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.sharded_model import ShardedModel, shard_model
from meshwright.run.parallel.verify import dry_run
from meshwright.run.parallel.verify.dry_run import (
    DryRun,
    dry_run_layout,
    find_min_microbatches,
    list_representative_ranks,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_coordinate
from meshwright.spec.model import MoESpec, build_decoder_model
from tests.policy.pipeline.test_transfers import naive
from tests.run.parallel.covering import olmo2

DENSE = build_decoder_model("dense", layers=4, hidden=32, heads=8, kv_heads=4, ffn=64, vocab=61)
ROUTED = build_decoder_model(
    "routed",
    layers=4,
    hidden=32,
    heads=8,
    ffn=64,
    vocab=61,
    experts=MoESpec(count=8, top_k=2, width=16, shared_width=16),
)


def play(model: Any = DENSE, *, length: int = 64, **degrees: Any) -> DryRun:
    layout = Layout(**degrees)
    count = find_min_microbatches(layout)
    return dry_run_layout(model, layout, sequence_length=length, microbatches=count)


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 4, "sequence_parallel": True, "dp": 64, "zero": 1},
        {"cp": 4, "dp": 4, "zero": 3},
        {"cp": 4, "cp_kind": "ulysses", "tp": 2},
        {"pp": 4, "tp": 2, "dp": 4, "zero": 2, "recompute": "full"},
        {"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "dp": 2},
        {"pp": 2, "schedule": "dualpipe-v", "virtual_stages": 2},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "tp": 2},
    ],
    ids=str,
)
def test_sound_layouts_play_through(degrees: dict[str, Any]) -> None:
    found = play(**degrees)
    assert found.problems == ()
    assert not dist.is_initialized()


def test_norms_of_all_heads_are_added_up_forward_and_backward() -> None:
    found = play(olmo2(), tp=4, sequence_parallel=True, pp=2)
    assert found.problems == ()
    sums = [entry for entry in found.rank_runs[0].records if "sharded_norm" in str(entry.call_site)]
    # Two layers of the first stage and two microbatches: queries' and keys' sums of 64 tokens.
    assert [entry.elements for entry in sums] == [2 * 64] * (2 * 2 * 2)


def test_experts_exchange_as_if_all_got_equally_many() -> None:
    found = play(ROUTED, dp=8, ep=8)
    assert found.problems == ()
    traffic = {(one.group, one.op): one for one in found.traffic()}
    moved = traffic["ep", "all_to_all"]
    # Two microbatches, four layers: rows go and come, forward and backward.
    assert moved.calls == 2 * 4 * 4
    assert moved.size_bytes == moved.calls * 64 * 2 * 32 * 2
    found = play(ROUTED, tp=2, dp=4, ep=4, expert_tp=2, sequence_parallel=True)
    assert found.problems == ()


def test_what_ranks_hold_adds_up_to_the_model() -> None:
    layout = Layout(tp=2, pp=2)
    found = dry_run_layout(
        DENSE, layout, sequence_length=32, microbatches=2, ranks=range(layout.gpus)
    )
    whole = 61 * 32 * 2 + 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    norms = (4 * 2 + 1) * 32
    assert sum(one.parameters for one in found.rank_runs) == whole + 2 * norms


def test_some_ranks_of_every_stage_stand_for_all() -> None:
    layout = Layout(tp=8, pp=4, dp=16)
    chosen = list_representative_ranks(layout)
    assert len(chosen) == 4 * 3
    assert {get_coordinate(layout, rank).pp for rank in chosen} == {0, 1, 2, 3}
    assert {get_coordinate(layout, rank).tp for rank in chosen} == {0, 7}


def forgetful(*args: Any, **kwargs: Any) -> ShardedModel:
    """Let one rank reduce a norm over its tensor-parallel group less than the others."""
    mine = shard_model(*args, **kwargs)
    if mine.mesh.rank == 1:
        for name, holding in mine.shard_specs.items():
            if name.endswith("norm_mlp.weight"):
                mine.shard_specs[name] = ShardSpec(holding.global_shape, holding.ranges)
    return mine


def test_ranks_that_part_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "shard_model", forgetful)
    found = play(tp=2, sequence_parallel=True, dp=2)
    assert found.problems
    assert "group tp of 2 ranks" in found.problems[0]
    assert "rank 0 " in found.problems[0]
    assert "rank 1 " in found.problems[0]


def test_sends_that_would_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sent where made and received where used: neighbours both wait for the other to receive.
    crossing = naive(build_schedule("1f1b", 4, 8))
    assert verify_schedule(crossing, sends="buffered") == ()
    monkeypatch.setattr(dry_run, "make_step_schedule", lambda *_: crossing)
    found = dry_run_layout(DENSE, Layout(pp=4), sequence_length=32, microbatches=8, ranks=[])
    assert "deadlock with rendezvous sends" in found.problems[0]
    assert "sound" not in found.schedule


@pytest.mark.slow
def test_a_70b_model_on_512_ranks_is_played() -> None:
    model = catalog.get_model("llama3.1-70b")
    layout = Layout(tp=8, sequence_parallel=True, pp=8, dp=8, zero=1)
    stages = [
        rank for rank in list_representative_ranks(layout) if get_coordinate(layout, rank).dp == 0
    ]
    ends = [rank for rank in stages if get_coordinate(layout, rank).pp in {0, 1}]
    found = dry_run_layout(model, layout, sequence_length=4096, microbatches=8, ranks=ends)
    assert found.problems == ()
    assert found.schedule.endswith("sound")
    assert torch.get_default_device() == torch.device("cpu")
