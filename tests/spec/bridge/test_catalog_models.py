"""Real models through the bridges that describe architectures."""

import pytest

from meshwright.spec.bridge import BRIDGES
from meshwright.spec.bridge.spec_diff import diff_models
from meshwright.spec.catalog import get_model
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import count_parameters

WHOLE = [
    "deepseek-v3", "glm-4.5", "gpt-oss-20b", "gpt3-175b", "llama2-70b", "llama3.1-405b",
    "megatron-530b", "mistral-7b", "mixtral-8x7b", "nemotron-h-8b", "nemotron4-340b",
    "qwen1.5-moe-a2.7b", "qwen2.5-72b", "qwen3-next-80b-a3b", "yi-34b",
]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_megatron_s_flags_hold_the_model_whole(name: str) -> None:
    model = get_model(name)
    exported = BRIDGES["megatron"].export_config(Layout(), model)
    assert exported.unexpressed == ()
    back = BRIDGES["megatron"].import_config(exported.text).model
    assert back is not None
    assert diff_models(model, back) == ()
    assert count_parameters(back) == count_parameters(model)


@pytest.mark.parametrize("name", WHOLE)
def test_recipe_fields_hold_the_model_whole(name: str) -> None:
    model = get_model(name)
    exported = BRIDGES["nemo"].export_config(Layout(), model, sequence_length=model.max_positions)
    assert exported.unexpressed == ()
    back = BRIDGES["nemo"].import_config(exported.text, gpus=1).model
    assert back is not None
    assert count_parameters(back) == count_parameters(model)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gemma2-9b", "model.blocks.local.mixer.softcap"),
        ("falcon-40b", "model.blocks.dense.norms"),
        ("bloom-176b", "model.positions"),
        ("llama4-scout", "model.vision"),
        ("olmo2-7b", "model.blocks.dense.mixer.qk_norm"),
    ],
)
def test_what_the_flags_cannot_hold_of_a_model_is_listed(name: str, field: str) -> None:
    exported = BRIDGES["megatron"].export_config(Layout(), get_model(name))
    assert field in {problem.where for problem in exported.unexpressed}


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("llama3.1-8b", ("llama3", "8B")),
        ("llama3.1-405b", ("llama3", "405B")),
        ("qwen3-32b", ("qwen3", "32B")),
        ("deepseek-v3", ("deepseek_v3", "671B")),
        ("gpt-oss-120b", ("gpt_oss", "120b")),
    ],
)
def test_a_torchtitan_flavor_has_the_parameters_of_the_real_model(
    name: str, flavor: tuple[str, str]
) -> None:
    model = get_model(name)
    exported = BRIDGES["torchtitan"].export_config(Layout(), model)
    assert (exported.data["model"]["name"], exported.data["model"]["flavor"]) == flavor
    back = BRIDGES["torchtitan"].import_config(exported.text, gpus=1).model
    assert back is not None
    counts, wanted = count_parameters(back), count_parameters(model)
    assert (counts.mixer, counts.experts, counts.mlp) == (wanted.mixer, wanted.experts, wanted.mlp)
