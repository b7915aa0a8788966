"""The vision tower: its matrices, and what a rank of a tensor-parallel group holds of it."""

import pytest

from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    NormSpec,
    VisionProjector,
    VisionTower,
)

TOWER = VisionTower(
    hidden=8,
    layers=3,
    block=BlockSpec(
        name="vit",
        mixer=AttentionSpec(heads=4, kv_heads=4, head_dim=2, causal=False, qkv_bias=True),
        mlp=MLPSpec(width=16, gated=False, bias=True),
    ),
    patch=2,
    patch_bias=True,
    positions=9,
    class_token=True,
    post_norm=True,
    projector=VisionProjector(),
    norm=NormSpec(kind="layer", bias=True),
)
MULTIMODAL = [name for name, entry in list_models().items() if entry.model.vision is not None]


def test_tower_by_hand() -> None:
    patches = 3 * 2 * 2 * 8 + 8
    attention = 4 * 8 * 8 + 3 * 8
    mlp = 2 * 8 * 16 + 16 + 8
    norms = 2 * 16
    assert TOWER.parameters() == patches + 10 * 8 + 16 + 3 * (attention + mlp + norms)


def test_rank_holds_its_part_of_the_blocks_and_the_whole_of_the_rest() -> None:
    patches = 3 * 2 * 2 * 8 + 8
    # Column biases are cut, the biases after row products are whole.
    attention = (4 * 8 * 8 + 3 * 8) // 2
    mlp = 2 * 8 * 16 // 2 + 16 // 2 + 8
    assert TOWER.count_rank_parameters(2) == (
        patches + 3 * (attention + mlp),
        10 * 8 + 16 + 3 * 2 * 16,
    )


@pytest.mark.parametrize("name", MULTIMODAL)
def test_one_rank_holds_the_whole_tower(name: str) -> None:
    tower = get_model(name).vision
    assert tower is not None
    assert sum(tower.count_rank_parameters(1)) == tower.parameters()
    assert sum(tower.count_rank_parameters(4)) < tower.parameters()
