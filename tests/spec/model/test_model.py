"""What a `Model` refuses, and the views it gives of its layers."""

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import get_model
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    MoESpec,
    MtpSpec,
    NormSpec,
    VisionProjector,
    VisionTower,
    build_decoder_model,
    build_gpt,
)

ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=8)
DENSE = BlockSpec(name="dense", mixer=ATTENTION, mlp=MLPSpec(width=16))


def build(**changes: object) -> Model:
    values: dict[str, object] = {
        "name": "x", "hidden": 32, "vocab": 10, "blocks": (DENSE,), "pattern": "2*dense", **changes,
    }  # fmt: skip
    return Model(**values)  # type: ignore[arg-type]


def test_layers_are_seen_one_by_one_and_by_kind() -> None:
    moe = BlockSpec(name="moe", mixer=ATTENTION, mlp=MoESpec(count=4, top_k=2, width=8))
    both = build(blocks=(DENSE, moe), pattern="dense 3*moe")
    assert both.layers == 4
    assert both.layer_names == ("dense", "moe", "moe", "moe")
    assert both.layer_blocks() == (DENSE, moe, moe, moe)
    assert both.count_layers_by_block() == ((DENSE, 1), (moe, 3))
    assert both.block("moe") is moe
    assert both.moe is moe.mlp
    assert build().moe is None


def test_block_that_no_layer_uses_is_not_counted() -> None:
    spare = BlockSpec(name="spare", mlp=MLPSpec(width=4))
    assert build(blocks=(DENSE, spare)).count_layers_by_block() == ((DENSE, 2),)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"hidden": 0}, "hidden: 0 is not a whole number of at least 1"),
        ({"hidden": 10**400}, "hidden: .* is not a whole number up to 1,0"),
        ({"vocab": -1}, "vocab: -1"),
        ({"pattern": "2*danse"}, "no block named 'danse'.*did you mean dense"),
        ({"blocks": (DENSE, DENSE)}, "2 blocks are named 'dense'"),
        ({"multi_token": MtpSpec(depth=1, block="moe")}, "no block named 'moe'"),
        ({"pattern": "2*"}, "pattern: 2\\* is not followed"),
    ],
)
def test_model_that_cannot_be_is_refused(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        build(**changes)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: AttentionSpec(heads=6, kv_heads=4, head_dim=8), {"kv_heads"}),
        (lambda: AttentionSpec(heads=0, kv_heads=0, head_dim=0), {"heads", "kv_heads", "head_dim"}),
        (lambda: AttentionSpec(heads=1, kv_heads=1, head_dim=1, window=0, chunk=-1),
         {"window", "chunk"}),
        (lambda: AttentionSpec(heads=1, kv_heads=10**12, head_dim=1), {"kv_heads"}),
        (lambda: LatentAttentionSpec(heads=1, kv_rank=0, nope_dim=1, rope_dim=0, value_dim=1),
         {"kv_rank", "rope_dim"}),
        (lambda: LatentAttentionSpec(heads=1, kv_rank=1, nope_dim=1, rope_dim=1, value_dim=1,
                                     q_rank=0), {"q_rank"}),
        (lambda: GatedDeltaNetSpec(key_heads=0, value_heads=1, key_dim=1, value_dim=1),
         {"key_heads"}),
        (lambda: Mamba2Spec(heads=1, head_dim=1, state_dim=0, groups=1), {"state_dim"}),
        (lambda: MLPSpec(width=0), {"width"}),
        (lambda: MoESpec(count=2, top_k=3, width=4), {"top_k"}),
        (lambda: MoESpec(count=2, top_k=1, width=4, shared_width=-1, groups=1, groups_used=2),
         {"shared_width", "groups_used"}),
        (lambda: NormSpec(eps=-1.0), {"eps"}),
        (lambda: BlockSpec(name="a b", mlp=MLPSpec(width=1)), {"name"}),
        (lambda: BlockSpec(name="a"), {"mixer"}),
        (lambda: MtpSpec(depth=0, block="a"), {"depth"}),
        (lambda: VisionTower(hidden=8, layers=1, block=DENSE, patch=3, image=10,
                             projector=VisionProjector(), norm=NormSpec()), {"image"}),
    ],
)  # fmt: skip
def test_part_that_cannot_be_is_refused_with_every_field(make: object, fields: set[str]) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert {problem.where for problem in caught.value.problems} == fields
    assert all(problem.fix for problem in caught.value.problems)


def test_decoder_has_the_shape_of_llama() -> None:
    built = build_decoder_model(
        "llama2-7b", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000
    )  # fmt: skip
    assert built == get_model("llama2-7b")


def test_decoder_puts_dense_layers_first() -> None:
    experts = MoESpec(count=4, top_k=1, width=8)
    sparse = build_decoder_model(
        "x", layers=5, hidden=16, heads=2, ffn=8, vocab=9, experts=experts, dense_layers=2
    )
    assert sparse.pattern == "2*dense 3*moe"
    assert (
        build_decoder_model(
            "x", layers=5, hidden=16, heads=2, ffn=8, vocab=9, experts=experts
        ).pattern
        == "5*moe"
    )


def test_gpt_has_the_shape_of_gpt2() -> None:
    built = build_gpt(
        "gpt2", layers=12, hidden=768, heads=12, vocab=50257, max_positions=1024,
        activation="gelu-tanh",
    )  # fmt: skip
    assert built == get_model("gpt2")


def test_projector_chains_its_widths() -> None:
    projector = VisionProjector(merge=2, inner_widths=(20, 30), bias=False)
    shapes = [(w.fan_in, w.fan_out) for w in projector.list_weights(8, 40)]
    assert shapes == [(32, 20), (20, 30), (30, 40)]


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        build().hidden = 3  # type: ignore[misc]
    assert msgspec.structs.replace(build(), hidden=64).hidden == 64
