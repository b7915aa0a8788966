"""What a `Model` refuses, and the views it gives of its layers."""

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import model
from meshwright.spec.model import (
    Attention,
    Block,
    Experts,
    GatedDelta,
    LatentAttention,
    Mamba2,
    Mlp,
    Model,
    MultiToken,
    Norm,
    Projector,
    VisionTower,
    decoder,
    gpt,
)

ATTENTION = Attention(heads=4, kv_heads=2, head_dim=8)
DENSE = Block(name="dense", mixer=ATTENTION, mlp=Mlp(width=16))


def build(**changes: object) -> Model:
    values: dict[str, object] = {
        "name": "x", "hidden": 32, "vocab": 10, "blocks": (DENSE,), "pattern": "2*dense", **changes,
    }  # fmt: skip
    return Model(**values)  # type: ignore[arg-type]


def test_layers_are_seen_one_by_one_and_by_kind() -> None:
    moe = Block(name="moe", mixer=ATTENTION, mlp=Experts(count=4, top_k=2, width=8))
    both = build(blocks=(DENSE, moe), pattern="dense 3*moe")
    assert both.layers == 4
    assert both.layer_names == ("dense", "moe", "moe", "moe")
    assert both.layer_blocks() == (DENSE, moe, moe, moe)
    assert both.block_counts() == ((DENSE, 1), (moe, 3))
    assert both.block("moe") is moe
    assert both.experts is moe.mlp
    assert build().experts is None


def test_block_that_no_layer_uses_is_not_counted() -> None:
    spare = Block(name="spare", mlp=Mlp(width=4))
    assert build(blocks=(DENSE, spare)).block_counts() == ((DENSE, 2),)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"hidden": 0}, "hidden: 0 is not a whole number of at least 1"),
        ({"hidden": 10**400}, "hidden: .* is not a whole number up to 1,0"),
        ({"vocab": -1}, "vocab: -1"),
        ({"pattern": "2*danse"}, "no block named 'danse'.*did you mean dense"),
        ({"blocks": (DENSE, DENSE)}, "2 blocks are named 'dense'"),
        ({"multi_token": MultiToken(depth=1, block="moe")}, "no block named 'moe'"),
        ({"pattern": "2*"}, "pattern: 2\\* is not followed"),
    ],
)
def test_model_that_cannot_be_is_refused(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        build(**changes)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: Attention(heads=6, kv_heads=4, head_dim=8), {"kv_heads"}),
        (lambda: Attention(heads=0, kv_heads=0, head_dim=0), {"heads", "kv_heads", "head_dim"}),
        (lambda: Attention(heads=1, kv_heads=1, head_dim=1, window=0, chunk=-1),
         {"window", "chunk"}),
        (lambda: Attention(heads=1, kv_heads=10**12, head_dim=1), {"kv_heads"}),
        (lambda: LatentAttention(heads=1, kv_rank=0, nope_dim=1, rope_dim=0, value_dim=1),
         {"kv_rank", "rope_dim"}),
        (lambda: LatentAttention(heads=1, kv_rank=1, nope_dim=1, rope_dim=1, value_dim=1, q_rank=0),
         {"q_rank"}),
        (lambda: GatedDelta(key_heads=0, value_heads=1, key_dim=1, value_dim=1), {"key_heads"}),
        (lambda: Mamba2(heads=1, head_dim=1, state_dim=0, groups=1), {"state_dim"}),
        (lambda: Mlp(width=0), {"width"}),
        (lambda: Experts(count=2, top_k=3, width=4), {"top_k"}),
        (lambda: Experts(count=2, top_k=1, width=4, shared_width=-1, groups=1, groups_used=2),
         {"shared_width", "groups_used"}),
        (lambda: Norm(eps=-1.0), {"eps"}),
        (lambda: Block(name="a b", mlp=Mlp(width=1)), {"name"}),
        (lambda: Block(name="a"), {"mixer"}),
        (lambda: MultiToken(depth=0, block="a"), {"depth"}),
        (lambda: VisionTower(hidden=8, layers=1, block=DENSE, patch=3, image=10,
                             projector=Projector(), norm=Norm()), {"image"}),
    ],
)  # fmt: skip
def test_part_that_cannot_be_is_refused_with_every_field(make: object, fields: set[str]) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert {problem.where for problem in caught.value.problems} == fields
    assert all(problem.fix for problem in caught.value.problems)


def test_decoder_has_the_shape_of_llama() -> None:
    built = decoder(
        "llama2-7b", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000
    )  # fmt: skip
    assert built == model("llama2-7b")


def test_decoder_puts_dense_layers_first() -> None:
    experts = Experts(count=4, top_k=1, width=8)
    sparse = decoder(
        "x", layers=5, hidden=16, heads=2, ffn=8, vocab=9, experts=experts, dense_layers=2
    )
    assert sparse.pattern == "2*dense 3*moe"
    assert (
        decoder("x", layers=5, hidden=16, heads=2, ffn=8, vocab=9, experts=experts).pattern
        == "5*moe"
    )


def test_gpt_has_the_shape_of_gpt2() -> None:
    built = gpt(
        "gpt2", layers=12, hidden=768, heads=12, vocab=50257, max_positions=1024,
        activation="gelu-tanh",
    )  # fmt: skip
    assert built == model("gpt2")


def test_projector_chains_its_widths() -> None:
    projector = Projector(merge=2, inner_widths=(20, 30), bias=False)
    shapes = [(w.fan_in, w.fan_out) for w in projector.weights(8, 40)]
    assert shapes == [(32, 20), (20, 30), (30, 40)]


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        build().hidden = 3  # type: ignore[misc]
    assert msgspec.structs.replace(build(), hidden=64).hidden == 64
