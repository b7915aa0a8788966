"""The vision tower: its matrices, and what a rank of a tensor-parallel group holds of it."""

import pytest

from meshwright.spec.catalog import model, models
from meshwright.spec.model import Attention, Block, Mlp, Norm, Projector, VisionTower

TOWER = VisionTower(
    hidden=8,
    layers=3,
    block=Block(
        name="vit",
        mixer=Attention(heads=4, kv_heads=4, head_dim=2, causal=False, qkv_bias=True),
        mlp=Mlp(width=16, gated=False, bias=True),
    ),
    patch=2,
    patch_bias=True,
    positions=9,
    class_token=True,
    post_norm=True,
    projector=Projector(),
    norm=Norm(kind="layer", bias=True),
)
MULTIMODAL = [name for name, entry in models().items() if entry.model.vision is not None]


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
    assert TOWER.per_rank(2) == (patches + 3 * (attention + mlp), 10 * 8 + 16 + 3 * 2 * 16)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_one_rank_holds_the_whole_tower(name: str) -> None:
    tower = model(name).vision
    assert tower is not None
    assert sum(tower.per_rank(1)) == tower.parameters()
    assert sum(tower.per_rank(4)) < tower.parameters()
