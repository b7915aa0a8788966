"""Every model of the catalog builds without memory, with the parameters it is said to have."""

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch

from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.spec import catalog
from meshwright.spec.model import Model, MtpSpec, build_decoder_model, build_gpt, count_parameters

NAMES = tuple(catalog.list_models())


@pytest.mark.parametrize("name", NAMES)
def test_a_catalog_model_has_as_many_parameters_as_it_counts(name: str) -> None:
    model = catalog.get_model(name)
    counted = count_parameters(model)
    built = build_decoder(model)
    parameters = list(built.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    expected = counted.total - counted.vision + counted.multi_token
    assert sum(parameter.numel() for parameter in parameters) == expected


def small(**changes: object) -> Model:
    model = build_decoder_model("small", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=11)
    return Model(**{field: getattr(model, field) for field in model.__struct_fields__} | changes)


def test_parameters_of_a_llama_shape_have_the_documented_names() -> None:
    layer = {"mixer.qkv", "mixer.o", "mlp.gate_up", "mlp.down", "norm_mixer", "norm_mlp"}
    expected = {"embedding.weight", "final_norm.weight", "head.weight"}
    expected |= {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert {name for name, _ in build_decoder(small()).named_parameters()} == expected


def test_a_tied_head_has_no_weight_of_its_own() -> None:
    names = dict(build_decoder(small(tied=True, head_bias=True)).named_parameters())
    assert "head.weight" not in names
    assert names["head.bias"].shape == (11,)


def test_multi_token_heads_can_be_left_out() -> None:
    model = small(multi_token=MtpSpec(depth=2, block="dense"))
    assert len(build_decoder(model).multi_token) == 2
    without = build_decoder(model, options=BuildOptions(include_mtp=False))
    total = sum(parameter.numel() for parameter in without.parameters())
    assert total == count_parameters(model).total


def test_the_type_of_numbers_is_as_asked() -> None:
    built = build_decoder(build_gpt("g", layers=1, hidden=8, heads=2, vocab=5), dtype=torch.float16)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float16}
