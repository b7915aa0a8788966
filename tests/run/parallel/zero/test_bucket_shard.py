"""Shards know where their elements stand in the whole, so that no layout changes a random bit."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains shards of a model")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.run.kernels.optimizer.grad_norm import GradNorm
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.zero.bucket_shard import (
    ShardRange,
    make_global_index_map,
    set_shard_info,
)
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import MoESpec, build_decoder_model

DENSE = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
MOE = build_decoder_model(
    "experts", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61,
    experts=MoESpec(count=4, top_k=2, width=16, shared_width=16),
)  # fmt: skip
MODELS = {"dense": DENSE, "experts": MOE}
STATE: dict[str, Any] = {"master_precision": "none", "moment_precision": "bf16"}
LAYOUTS = {
    "dense": [
        Layout(tp=2, dp=2, **STATE),
        Layout(tp=2, dp=2, zero=2, **STATE),
        Layout(tp=4, **STATE),  # two ranks each hold the same key and value head
        Layout(pp=2, dp=2, zero=1, **STATE),
        Layout(dp=4, zero=3, **STATE),
    ],
    "experts": [
        Layout(dp=4, ep=2, zero=2, **STATE),
        Layout(tp=2, dp=2, ep=2, expert_tp=2, zero=1, **STATE),
    ],
}
STEPS, LR = 2, 1e-2
SETTINGS = OptimizerConfig(lr=LR, warmup_steps=0, ema_decay=0.9, ema_dtype="bf16")


@st.composite
def cut_once(draw: st.DrawFn) -> tuple[ShardSpec, int]:
    """Draw what layouts hold: ranges of one axis, perhaps of some rows only, from a place on."""
    whole = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(whole) - 1))
    ends = sorted(draw(st.lists(st.integers(0, whole[axis]), min_size=2, max_size=6)))
    ranges = tuple(IndexRange(*pair) for pair in zip(ends[::2], ends[1::2], strict=False))
    parts: list[tuple[IndexRange, ...]] = [(IndexRange(0, size),) for size in whole]
    parts[axis] = ranges
    if axis:
        first, last = sorted(draw(st.lists(st.integers(0, whole[0]), min_size=2, max_size=2)))
        parts[0] = (IndexRange(first, last),)
    holding = ShardSpec(whole, tuple(parts))
    return holding, draw(st.integers(0, torch.Size(holding.shape).numel()))


@given(cut_once())
def test_places_are_those_of_the_elements_in_the_whole(drawn: tuple[ShardSpec, int]) -> None:
    holding, start = drawn
    everything = torch.arange(torch.Size(holding.global_shape).numel()).view(holding.global_shape)
    held = holding.select_local(everything).reshape(-1)[start:]
    assert torch.equal(make_global_index_map(holding, start).from_ranges(len(held)), held)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3.1-405b", Layout(tp=2)),
        ("nemotron-h-8b", Layout(tp=8)),
        ("deepseek-v2-lite", Layout(tp=8, dp=2, ep=2, expert_tp=4)),
        ("gpt-oss-20b", Layout(tp=8, dp=2, ep=2, expert_tp=4)),
        ("qwen3-next-80b-a3b", Layout(tp=8, dp=2, ep=2, expert_tp=4)),
    ],
)
def test_every_holding_of_a_known_model_has_places(name: str, layout: Layout) -> None:
    for holding in make_shard_specs(
        build_decoder(catalog.get_model(name)), layout, layout.gpus - 1
    ).values():
        found = make_global_index_map(holding, 3)
        # Whole rows of whole matrices, and rows of one matrix, take no looking up.
        assert found.is_contiguous or not holding.is_unsharded


def test_rows_follow_one_another_and_need_no_looking_up() -> None:
    rows = ShardSpec((8, 4), ((IndexRange(2, 5),), (IndexRange(0, 4),)))
    assert make_global_index_map(rows, 3).is_contiguous
    assert not make_global_index_map(
        ShardSpec((8, 4), ((IndexRange(0, 8),), (IndexRange(0, 2),))), 0
    ).is_contiguous


def test_cuts_that_no_layout_makes_are_refused() -> None:
    with pytest.raises(ValueError, match="no formula"):
        make_global_index_map(
            ShardSpec((4, 4, 4), ((IndexRange(0, 4),), (IndexRange(0, 2),), (IndexRange(0, 2),))), 0
        )


@cache
def whole(model: str, kind: str) -> dict[str, Tensor]:
    """Return numbers for every parameter: first weights, or the gradients of a step."""
    found = {}
    for number, (name, one) in enumerate(build_decoder(MODELS[model]).named_parameters()):
        seed = torch.Generator().manual_seed(1000 * number + len(kind) + int(kind[-1:] == "1"))
        found[name] = torch.randn(one.shape, generator=seed)
    return found


def trained(
    model: str,
    named: list[tuple[str, nn.Parameter]],
    layout: Layout,
    part: dict[str, ShardRange],
) -> dict[str, Tensor]:
    """Update parts of parameters by the same numbers, and return weights, moments, averages."""

    def of(kind: str, name: str) -> Tensor:
        holding, start, stop = part[name]
        return holding.select_local(whole(model, kind)[name]).reshape(-1)[start:stop]

    with torch.no_grad():
        for name, one in named:
            one.copy_(of("weights", name).view(one.shape))
    optimizer = make_optimizer(iter(named), layout, SETTINGS, total_steps=9, seed=5)
    for step in range(STEPS):
        grads = {name: of(f"gradient{step}", name).view(one.shape) for name, one in named}
        norm = GradNorm(torch.tensor(1.0), torch.tensor(0))
        optimizer.step(LR, norm=norm, gradients=grads)
    return {name: one.detach() for name, one in named} | optimizer.state_dict()


@cache
def alone(model: str) -> dict[str, Tensor]:
    """Return the same of whole parameters on one device."""
    made = {
        name: nn.Parameter(torch.empty(one.shape, dtype=torch.bfloat16))
        for name, one in build_decoder(MODELS[model]).named_parameters()
    }
    part = {
        name: ShardRange(ShardSpec.unsharded(tuple(one.shape)), 0, one.numel())
        for name, one in made.items()
    }
    return trained(model, list(made.items()), Layout(**STATE), part)


def wrong(model: str, found: dict[str, Tensor], part: dict[str, ShardRange]) -> Iterator[str]:
    """Name what is not, bit for bit, the part of what one device has."""
    for key, mine in found.items():
        name = key if key in part else key.partition(".")[2]
        if name in part:
            holding, start, stop = part[name]
            expected = holding.select_local(alone(model)[key]).reshape(-1)[start:stop]
            if not torch.equal(mine.view(-1), expected):
                yield key


@pytest.mark.parametrize("model", MODELS)
def test_an_update_of_any_shard_is_that_of_the_whole_bit_for_bit(model: str) -> None:
    for layout in LAYOUTS[model]:
        for rank in range(layout.gpus):
            held = make_shard_specs(build_decoder(MODELS[model]), layout, rank)
            for share in (0.0, 0.4):  # all that is held, or an interval of it
                named: list[tuple[str, nn.Parameter]] = []
                part: dict[str, ShardRange] = {}
                for name, holding in held.items():
                    elements = torch.Size(holding.shape).numel()
                    start = int(elements * share)
                    one = nn.Parameter(torch.empty(elements - start, dtype=torch.bfloat16))
                    set_shard_info(one, holding, start)
                    named.append((name, one))
                    part[name] = ShardRange(holding, start, elements)
                found = trained(model, named, layout, part)
                assert list(wrong(model, found, part)) == [], (layout, rank)


def on_rank() -> list[str]:
    torch.set_num_threads(1)
    faults = []
    for model, layouts in LAYOUTS.items():
        for layout in layouts:
            sync = make_gradient_sync(
                shard_model(MODELS[model], Mesh(layout), dtype=torch.bfloat16)
            )
            part = sync.shard_ranges()
            found = trained(model, list(sync.named_parameters()), layout, part)
            faults += [f"{layout}: {name}" for name in wrong(model, found, part)]
    return faults


def test_what_ranks_update_is_rounded_as_on_one_device() -> None:
    assert spawn_ranks(4, on_rank) == [[], [], [], []]
