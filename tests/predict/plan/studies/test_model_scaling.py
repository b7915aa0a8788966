"""Scaled models: about as large as asked for, in the proportions they had."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.plan.studies.model_scaling import list_family, scale_model
from meshwright.spec import catalog
from meshwright.spec.model import AttentionSpec, Model, MoESpec, count_parameters

NAMES = ("llama3.1-8b", "gpt3-13b", "mixtral-8x7b", "deepseek-v3", "nemotron-h-8b",
         "qwen3-next-80b-a3b", "gemma3-27b", "llama2-70b")  # fmt: skip


def body(model: Model) -> int:
    """Parameters of the layers: what scaling scales."""
    whole = count_parameters(model)
    return whole.total - whole.embedding - whole.head - whole.vision


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [0.5, 2, 8])
def test_layers_hold_about_as_many_weights_as_asked_for(name: str, factor: float) -> None:
    model = catalog.get_model(name)
    assert body(scale_model(model, factor)) == pytest.approx(factor * body(model), rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_of_one_changes_nothing(name: str) -> None:
    assert scale_model(catalog.get_model(name), 1) == catalog.get_model(name)


@given(st.floats(0.05, 50))
def test_heads_keep_their_width_and_keys_their_number(factor: float) -> None:
    model = scale_model(catalog.get_model("llama3.1-8b"), factor)
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.head_dim, mixer.kv_heads) == (128, 8)
    assert mixer.heads % 8 == 0
    assert mixer.heads * mixer.head_dim == model.hidden


def test_depth_and_width_grow_alike() -> None:
    small = catalog.get_model("llama3.1-8b")
    large = scale_model(small, 27)
    assert large.hidden == 3 * small.hidden
    assert large.layers == 3 * small.layers
    assert "x27" in large.name


def test_experts_and_the_mix_of_layers_stay() -> None:
    small = catalog.get_model("deepseek-v3")
    large = scale_model(small, 4)
    assert isinstance(small.moe, MoESpec)
    assert isinstance(large.moe, MoESpec)
    assert (large.moe.count, large.moe.top_k) == (small.moe.count, small.moe.top_k)
    dense = [
        sum(name == "dense" for name in one.layer_names) / one.layers for one in (small, large)
    ]
    assert dense[1] == pytest.approx(dense[0], abs=0.02)


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_what_is_no_factor_is_refused(factor: float) -> None:
    with pytest.raises(InputError, match="factor"):
        scale_model(catalog.get_model("llama3.1-8b"), factor)


def test_a_family_is_sorted_by_size_and_holds_the_model() -> None:
    model = catalog.get_model("qwen3-8b")
    found = list_family(model)
    assert model in found
    assert {one.family for one in found} == {"qwen3"}
    sizes = [count_parameters(one).total for one in found]
    assert sizes == sorted(sizes)
