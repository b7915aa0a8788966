"""A layout of hundreds of ranks is played on one processor, and ranks that part are named."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="plays ranks by torch's fake process group")

import torch
import torch.distributed as dist

from meshwright.policy.pipeline import build, verify
from meshwright.run.nn.holding import Holding
from meshwright.run.parallel import rehearsal
from meshwright.run.parallel.rehearsal import (
    Rehearsal,
    fewest_microbatches,
    rehearse,
    representatives,
)
from meshwright.run.parallel.spread import Spread, spread
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import coordinate
from meshwright.spec.model import Experts, decoder
from tests.policy.pipeline.test_transfers import naive
from tests.run.parallel.covering import olmo2

DENSE = decoder("dense", layers=4, hidden=32, heads=8, kv_heads=4, ffn=64, vocab=61)
ROUTED = decoder(
    "routed",
    layers=4,
    hidden=32,
    heads=8,
    ffn=64,
    vocab=61,
    experts=Experts(count=8, top_k=2, width=16, shared_width=16),
)


def play(model: Any = DENSE, *, length: int = 64, **degrees: Any) -> Rehearsal:
    layout = Layout(**degrees)
    count = fewest_microbatches(layout)
    return rehearse(model, layout, sequence_length=length, microbatches=count)


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
    sums = [entry for entry in found.played[0].entries if "norm_across" in str(entry.where)]
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
    found = rehearse(DENSE, layout, sequence_length=32, microbatches=2, ranks=range(layout.gpus))
    whole = 61 * 32 * 2 + 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    norms = (4 * 2 + 1) * 32
    assert sum(one.parameters for one in found.played) == whole + 2 * norms


def test_some_ranks_of_every_stage_stand_for_all() -> None:
    layout = Layout(tp=8, pp=4, dp=16)
    chosen = representatives(layout)
    assert len(chosen) == 4 * 3
    assert {coordinate(layout, rank).pp for rank in chosen} == {0, 1, 2, 3}
    assert {coordinate(layout, rank).tp for rank in chosen} == {0, 7}


def forgetful(*args: Any, **kwargs: Any) -> Spread:
    """Let one rank reduce a norm over its tensor-parallel group less than the others."""
    mine = spread(*args, **kwargs)
    if mine.mesh.rank == 1:
        for name, holding in mine.holdings.items():
            if name.endswith("norm_mlp.weight"):
                mine.holdings[name] = Holding(holding.whole, holding.parts)
    return mine


def test_ranks_that_part_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "spread", forgetful)
    found = play(tp=2, sequence_parallel=True, dp=2)
    assert found.problems
    assert "group tp of 2 ranks" in found.problems[0]
    assert "rank 0 " in found.problems[0]
    assert "rank 1 " in found.problems[0]


def test_sends_that_would_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sent where made and received where used: neighbours both wait for the other to receive.
    crossing = naive(build("1f1b", 4, 8))
    assert verify(crossing, sends="buffered") == ()
    monkeypatch.setattr(rehearsal, "step_schedule", lambda *_: crossing)
    found = rehearse(DENSE, Layout(pp=4), sequence_length=32, microbatches=8, ranks=[])
    assert "deadlock with rendezvous sends" in found.problems[0]
    assert "sound" not in found.schedule


@pytest.mark.slow
def test_a_70b_model_on_512_ranks_is_played() -> None:
    model = catalog.model("llama3.1-70b")
    layout = Layout(tp=8, sequence_parallel=True, pp=8, dp=8, zero=1)
    stages = [rank for rank in representatives(layout) if coordinate(layout, rank).dp == 0]
    ends = [rank for rank in stages if coordinate(layout, rank).pp in {0, 1}]
    found = rehearse(model, layout, sequence_length=4096, microbatches=8, ranks=ends)
    assert found.problems == ()
    assert found.schedule.endswith("sound")
    assert torch.get_default_device() == torch.device("cpu")
