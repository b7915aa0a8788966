"""Our counts and configs against transformers itself, where it is installed."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.model import Model, count_parameters
from meshwright.spec.model.huggingface import list_model_types, read_config, write_config

torch = pytest.importorskip("torch", reason="needs torch to build models on the meta device")
transformers = pytest.importorskip("transformers", reason="needs transformers as the reference")

pytestmark = pytest.mark.real

# Classes that live beside their weights have the shape of one that transformers ships.
STAND_INS = {"internlm": "llama", "internlm2": "llama", "kimi_k2": "deepseek_v3"}
# Their defaults leave None where the class then computes with a number.
CANNOT_BUILD_DEFAULTS = {"dbrx", "nemotron"}


def _known(config: dict[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    if kind.startswith("internlm"):
        config = {**config, "attention_bias": config["bias"]}
    config = {**config, "model_type": STAND_INS.get(kind, kind)}
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    return config


def _built(config: Any) -> int:
    """Count the parameters of the class that a config names, tied tables once."""
    joined = "vision_config" in config.to_dict()
    auto = transformers.AutoModelForImageTextToText if joined else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        network = auto.from_config(config)
    network.tie_weights()
    return sum({id(p): p.numel() for p in network.parameters()}.values())


def _ours(described: Model) -> set[int]:
    """Return our count, with and without the balancing biases that transformers may buffer."""
    balance = sum(
        layers * block.mlp.count_vector_parameters()
        for block, layers in described.count_layers_by_block()
        if block.mlp is not None
    )
    total = count_parameters(described).total
    return {total, total - balance}


@pytest.mark.parametrize("name", list_models())
def test_written_config_builds_a_model_of_our_count(name: str) -> None:
    config = transformers.AutoConfig.for_model(**_known(write_config(get_model(name))))
    assert _built(config) in _ours(get_model(name))


@pytest.mark.parametrize("family", list_model_types())
def test_class_defaults_build_a_model_of_our_count(family: str) -> None:
    try:
        described = read_config({"model_type": family})
    except InputError:
        pytest.skip(f"a {family} config has no defaults for all it needs")
    if family in STAND_INS or family in CANNOT_BUILD_DEFAULTS:
        pytest.skip(f"transformers cannot build {family} from its defaults")
    config = transformers.AutoConfig.for_model(**_known({"model_type": family}))
    assert _built(config) in _ours(described)
