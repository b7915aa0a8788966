"""Rank maps against their references: Megatron-Core's `RankGenerator` and torch's device mesh."""

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.spec.layout.choices import AXIS_ORDERS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.ranks import (
    MeshShape,
    get_coordinate,
    get_expert_coordinate,
    get_expert_mesh_shape,
    get_mesh_shape,
    get_process_group,
    has_matching_expert_stages,
    list_process_groups,
)

pytestmark = pytest.mark.real

DENSE = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-dp", "tp-dp-cp", "tp-pp", "tp-cp-dp-pp")
EXPERT = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp", "ep-dp")

# (tp, cp, dp, pp, ep, expert_tp); sizes differ so that no two axes can be mistaken for each other.
SIZES = [
    (1, 1, 1, 1, 1, None),
    (2, 1, 1, 1, 1, None),
    (2, 3, 4, 5, 1, None),
    (4, 2, 3, 2, 6, 4),
    (2, 2, 6, 3, 4, 1),
    (1, 2, 8, 4, 8, 2),
    (8, 1, 4, 2, 32, 1),
    (3, 1, 5, 2, 5, 3),
]


def layout_of(sizes: tuple[Any, ...], order: str) -> Layout:
    tp, cp, dp, pp, ep, expert_tp = sizes
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, expert_tp=expert_tp, order=order)


def megatron() -> Any:
    """Return Megatron's module of process groups, or skip."""
    # Its import warns of parts that are not installed; which ones varies by release.
    with warnings.catch_warnings(action="ignore"):
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            pytest.skip(f"megatron-core is not importable here: {error}")
    return parallel_state


def generators(layout: Layout) -> tuple[Any, Any]:
    """Build the two generators that Megatron's `initialize_model_parallel` builds."""
    make = megatron().RankGenerator
    dense = make(
        tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=layout.order
    )  # fmt: skip
    expert = make(
        tp=layout.effective_expert_tp, ep=layout.ep, dp=layout.expert_dp, pp=layout.pp, cp=1,
        order=layout.order,
    )  # fmt: skip
    return dense, expert


def as_lists(found: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [list(group) for group in found]


def expert_words(token: str) -> str:
    return "-".join({"tp": "expert_tp", "dp": "expert_dp"}.get(w, w) for w in token.split("-"))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_equal_megatron_for_every_order(sizes: tuple[Any, ...]) -> None:
    for order in sorted(AXIS_ORDERS):
        layout = layout_of(sizes, order)
        dense, expert = generators(layout)
        for token in DENSE:
            assert as_lists(list_process_groups(layout, token)) == dense.get_ranks(token), (
                order,
                token,
            )
        for token in EXPERT:
            if token == "pp" and not has_matching_expert_stages(layout):
                continue  # Megatron refuses these layouts; ours takes pp from the dense part
            found = as_lists(list_process_groups(layout, expert_words(token)))
            assert found == expert.get_ranks(token), (order, token)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pipelines_agree_as_megatron_demands(sizes: tuple[Any, ...]) -> None:
    for order in sorted(AXIS_ORDERS):
        layout = layout_of(sizes, order)
        dense, expert = generators(layout)
        assert has_matching_expert_stages(layout) is (
            dense.get_ranks("pp") == expert.get_ranks("pp")
        )


def test_embedding_groups_equal_megatron() -> None:
    state = megatron()
    for pp in (1, 2, 5):
        layout = Layout(tp=2, dp=3, pp=pp)
        lines = generators(layout)[0].get_ranks("pp")
        assert as_lists(list_process_groups(layout, "embedding")) == [
            state.default_embedding_ranks(line) for line in lines
        ]
        assert as_lists(list_process_groups(layout, "position_embedding")) == [
            state.default_position_embedding_ranks(line) for line in lines
        ]


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[Any]:
    """Give torch a process group of `size` ranks in which nobody else takes part."""
    pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


def device_mesh(shape: MeshShape) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)


def cases(count: int) -> list[tuple[tuple[Any, ...], str]]:
    """Pick orders at random, the same ones each time, and every size in turn."""
    orders = random.Random(7).choices(sorted(AXIS_ORDERS), k=count)
    return [(SIZES[at % len(SIZES)], order) for at, order in enumerate(orders)]


@pytest.mark.parametrize(("sizes", "order"), cases(24), ids=str)
def test_coordinates_and_groups_equal_the_device_mesh(sizes: tuple[Any, ...], order: str) -> None:
    layout = layout_of(sizes, order)
    parts = (
        (get_mesh_shape(layout), get_coordinate),
        (get_expert_mesh_shape(layout), get_expert_coordinate),
    )
    for shape, place_of in parts:
        for rank in {0, layout.gpus // 2, layout.gpus - 1}:
            with fake_world(rank, layout.gpus) as dist:
                mesh = device_mesh(shape)
                place = place_of(layout, rank)
                assert tuple(mesh.get_coordinate()) == tuple(getattr(place, n) for n in shape.names)
                for name in shape.names:
                    if name == "pp" and not has_matching_expert_stages(layout):
                        continue
                    members = dist.get_process_group_ranks(mesh.get_group(name))
                    assert list(get_process_group(layout, rank, name)) == members, name


def test_all_ranks_of_a_large_layout_equal_the_device_mesh() -> None:
    layout = Layout(tp=8, cp=2, dp=16, pp=4)
    with fake_world(0, layout.gpus):
        mesh = device_mesh(get_mesh_shape(layout)).mesh
        for rank in range(layout.gpus):
            place = get_coordinate(layout, rank)
            assert int(mesh[place.pp, place.dp, place.cp, place.tp]) == rank


@pytest.mark.parametrize(
    ("layout", "sharded"),
    [
        (Layout(tp=2, dp=8, shard=4, zero=3), ("dp_shard",)),
        (Layout(tp=2, cp=2, dp=8, pp=2, shard=8, zero=3), ("dp_shard", "cp")),
        (Layout(cp=4, dp=2, shard=2, zero=3), ("cp_shard",)),
        (Layout(tp=2, cp=2, dp=8, shard=4, zero=3, order="tp-dp-cp-ep-pp"), ("dp_shard",)),
    ],
)
def test_hybrid_sharding_equals_the_device_mesh(layout: Layout, sharded: tuple[str, ...]) -> None:
    for rank in range(0, layout.gpus, 5):
        with fake_world(rank, layout.gpus):
            mesh = device_mesh(get_mesh_shape(layout))
            flat = mesh[sharded].mesh.flatten().tolist()
            assert list(get_process_group(layout, rank, "shard")) == flat


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-cp-tp-ep-pp"])
def test_a_rank_joins_the_groups_that_megatron_creates_for_it(order: str) -> None:
    state = megatron()
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=2, expert_tp=2, order=order)
    assert has_matching_expert_stages(layout)
    for rank in (0, 5, layout.gpus // 2, layout.gpus - 1):
        with fake_world(rank, layout.gpus) as dist:
            state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                context_parallel_size=layout.cp,
                pipeline_model_parallel_size=layout.pp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.effective_expert_tp,
                order=order,
                create_gloo_process_groups=False,
            )
            created = {
                "tp": state.get_tensor_model_parallel_group(),
                "cp": state.get_context_parallel_group(),
                "dp": state.get_data_parallel_group(),
                "pp": state.get_pipeline_model_parallel_group(),
                "dp-cp": state.get_data_parallel_group(with_context_parallel=True),
                "tp-pp": state.get_model_parallel_group(),
                "ep": state.get_expert_model_parallel_group(),
                "expert_tp": state.get_expert_tensor_parallel_group(),
                "expert_dp": state.get_expert_data_parallel_group(),
                "expert_tp-ep": state.get_expert_tensor_and_model_parallel_group(),
                "embedding": state.get_embedding_group(),
            }
            for words, group in created.items():
                members = dist.get_process_group_ranks(group)
                assert list(get_process_group(layout, rank, words)) == members, words
            state.destroy_model_parallel()
