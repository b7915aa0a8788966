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

from meshwright.run.kernels.gradient_norm import GradientNorm
from meshwright.run.nn.build import build
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.holdings import holdings
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.shards import Lie, mark, places
from meshwright.run.parallel.spread import spread
from meshwright.run.parallel.sync import make_sync
from meshwright.run.train.optimizer import OptimizerSettings, make_optimizer
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Experts, decoder

DENSE = decoder("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
MOE = decoder(
    "experts", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61,
    experts=Experts(count=4, top_k=2, width=16, shared_width=16),
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
SETTINGS = OptimizerSettings(lr=LR, warmup_steps=0, average=0.9, average_precision="bf16")


@st.composite
def cut_once(draw: st.DrawFn) -> tuple[Holding, int]:
    """Draw what layouts hold: ranges of one axis, perhaps of some rows only, from a place on."""
    whole = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(whole) - 1))
    ends = sorted(draw(st.lists(st.integers(0, whole[axis]), min_size=2, max_size=6)))
    ranges = tuple(Range(*pair) for pair in zip(ends[::2], ends[1::2], strict=False))
    parts: list[tuple[Range, ...]] = [(Range(0, size),) for size in whole]
    parts[axis] = ranges
    if axis:
        first, last = sorted(draw(st.lists(st.integers(0, whole[0]), min_size=2, max_size=2)))
        parts[0] = (Range(first, last),)
    holding = Holding(whole, tuple(parts))
    return holding, draw(st.integers(0, torch.Size(holding.shape).numel()))


@given(cut_once())
def test_places_are_those_of_the_elements_in_the_whole(drawn: tuple[Holding, int]) -> None:
    holding, start = drawn
    everything = torch.arange(torch.Size(holding.whole).numel()).view(holding.whole)
    held = holding.take(everything).reshape(-1)[start:]
    assert torch.equal(places(holding, start).of(len(held)), held)


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
    for holding in holdings(build(catalog.model(name)), layout, layout.gpus - 1).values():
        found = places(holding, 3)
        # Whole rows of whole matrices, and rows of one matrix, take no looking up.
        assert found.is_run or not holding.is_whole


def test_rows_follow_one_another_and_need_no_looking_up() -> None:
    rows = Holding((8, 4), ((Range(2, 5),), (Range(0, 4),)))
    assert places(rows, 3).is_run
    assert not places(Holding((8, 4), ((Range(0, 8),), (Range(0, 2),))), 0).is_run


def test_cuts_that_no_layout_makes_are_refused() -> None:
    with pytest.raises(ValueError, match="no formula"):
        places(Holding((4, 4, 4), ((Range(0, 4),), (Range(0, 2),), (Range(0, 2),))), 0)


@cache
def whole(model: str, kind: str) -> dict[str, Tensor]:
    """Return numbers for every parameter: first weights, or the gradients of a step."""
    found = {}
    for number, (name, one) in enumerate(build(MODELS[model]).named_parameters()):
        seed = torch.Generator().manual_seed(1000 * number + len(kind) + int(kind[-1:] == "1"))
        found[name] = torch.randn(one.shape, generator=seed)
    return found


def trained(
    model: str,
    named: list[tuple[str, nn.Parameter]],
    layout: Layout,
    part: dict[str, Lie],
) -> dict[str, Tensor]:
    """Update parts of parameters by the same numbers, and return weights, moments, averages."""

    def of(kind: str, name: str) -> Tensor:
        holding, start, stop = part[name]
        return holding.take(whole(model, kind)[name]).reshape(-1)[start:stop]

    with torch.no_grad():
        for name, one in named:
            one.copy_(of("weights", name).view(one.shape))
    optimizer = make_optimizer(iter(named), layout, SETTINGS, total_steps=9, seed=5)
    for step in range(STEPS):
        grads = {name: of(f"gradient{step}", name).view(one.shape) for name, one in named}
        norm = GradientNorm(torch.tensor(1.0), torch.tensor(0))
        optimizer.step(LR, norm=norm, gradients=grads)
    return {name: one.detach() for name, one in named} | optimizer.state_dict()


@cache
def alone(model: str) -> dict[str, Tensor]:
    """Return the same of whole parameters on one device."""
    made = {
        name: nn.Parameter(torch.empty(one.shape, dtype=torch.bfloat16))
        for name, one in build(MODELS[model]).named_parameters()
    }
    part = {
        name: Lie(Holding.all_of(tuple(one.shape)), 0, one.numel()) for name, one in made.items()
    }
    return trained(model, list(made.items()), Layout(**STATE), part)


def wrong(model: str, found: dict[str, Tensor], part: dict[str, Lie]) -> Iterator[str]:
    """Name what is not, bit for bit, the part of what one device has."""
    for key, mine in found.items():
        name = key if key in part else key.partition(".")[2]
        if name in part:
            holding, start, stop = part[name]
            expected = holding.take(alone(model)[key]).reshape(-1)[start:stop]
            if not torch.equal(mine.view(-1), expected):
                yield key


@pytest.mark.parametrize("model", MODELS)
def test_an_update_of_any_shard_is_that_of_the_whole_bit_for_bit(model: str) -> None:
    for layout in LAYOUTS[model]:
        for rank in range(layout.gpus):
            held = holdings(build(MODELS[model]), layout, rank)
            for share in (0.0, 0.4):  # all that is held, or an interval of it
                named: list[tuple[str, nn.Parameter]] = []
                part: dict[str, Lie] = {}
                for name, holding in held.items():
                    elements = torch.Size(holding.shape).numel()
                    start = int(elements * share)
                    one = nn.Parameter(torch.empty(elements - start, dtype=torch.bfloat16))
                    mark(one, holding, start)
                    named.append((name, one))
                    part[name] = Lie(holding, start, elements)
                found = trained(model, named, layout, part)
                assert list(wrong(model, found, part)) == [], (layout, rank)


def on_rank() -> list[str]:
    torch.set_num_threads(1)
    faults = []
    for model, layouts in LAYOUTS.items():
        for layout in layouts:
            sync = make_sync(spread(MODELS[model], Mesh(layout), dtype=torch.bfloat16))
            part = sync.lies()
            found = trained(model, list(sync.named_parameters()), layout, part)
            faults += [f"{layout}: {name}" for name in wrong(model, found, part)]
    return faults


def test_what_ranks_update_is_rounded_as_on_one_device() -> None:
    assert launch(4, on_rank) == [[], [], [], []]
