"""Layouts and models are compared by what they mean."""

from typing import Any

import msgspec
import pytest

from meshwright.spec.bridge.spec_diff import diff_layouts, diff_models
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import Rotary, build_decoder_model


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"tp": 4, "expert_tp": 4}, {"tp": 4}),
        ({"dp": 8, "zero": 1, "shard": 8}, {"dp": 8, "zero": 1}),
        ({"dp": 8, "zero": 3, "shard": 1}, {"dp": 8}),
        ({"dp": 8, "shard": 4}, {"dp": 8}),
        ({"pp": 2, "stage_layers": (4, 4)}, {"pp": 2}),
        ({"cp_kind": "ulysses"}, {}),
        ({"schedule": "gpipe"}, {}),
        ({"overlap_parameters": False, "dp": 2}, {"dp": 2}),
        ({"precision": "fp32"}, {"precision": "fp32", "master_precision": "none"}),
        ({"tp": 2, "order": "pp-tp-cp-ep-dp"}, {"tp": 2}),
        ({"offload": ("optimizer", "gradients")}, {"offload": ("gradients", "optimizer")}),
    ],
)
def test_two_ways_to_say_one_thing_do_not_differ(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert diff_layouts(Layout(**one), Layout(**two)) == ()


@pytest.mark.parametrize(
    ("one", "two", "field"),
    [
        ({"tp": 4, "expert_tp": 1}, {"tp": 4}, "expert_tp"),
        ({"dp": 8, "zero": 1, "shard": 4}, {"dp": 8, "zero": 1}, "shard"),
        ({"pp": 2, "stage_layers": (3, 5)}, {"pp": 2}, "stage_layers"),
        ({"tp": 2, "dp": 2, "order": "dp-tp-cp-ep-pp"}, {"tp": 2, "dp": 2}, "order"),
    ],
)
def test_a_different_meaning_is_found(one: dict[str, Any], two: dict[str, Any], field: str) -> None:
    found = diff_layouts(Layout(**one), Layout(**two))
    assert [difference.path for difference in found] == [field]


def test_names_and_families_of_models_are_labels() -> None:
    model = build_decoder_model("a", layers=2, hidden=64, heads=4, ffn=128, vocab=256)
    assert diff_models(model, msgspec.structs.replace(model, name="b", family="c")) == ()


def test_a_field_of_a_block_is_named_by_its_path() -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}
    one, two = (
        build_decoder_model("a", ffn=128, **sizes),
        build_decoder_model("b", ffn=256, **sizes),
    )
    found = diff_models(one, two)
    assert [(d.path, d.original, d.converted) for d in found] == [
        ("blocks.dense.mlp.width", 128, 256)
    ]


def test_what_a_rotary_rule_implies_may_be_left_out() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}
    short = Rotary(scaling="yarn", factor=4.0, original_positions=4096)
    full = msgspec.structs.replace(short, beta_fast=32.0, beta_slow=1.0, mscale=1.0)
    one, two = (
        build_decoder_model("a", rotary=short, **sizes),
        build_decoder_model("b", rotary=full, **sizes),
    )
    assert diff_models(one, two) == ()
