"""The tables of names against what transformers writes, and as bijections."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file

from meshwright.errors import InputError
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.huggingface import list_model_types, load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.nn.huggingface.model_registry import get_weight_map
from meshwright.run.nn.huggingface.weight_map import ParameterMapping, map_all_parameters
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import read_config
from tests.run.nn.huggingface.drawn import DRAWS, draw

# Names and shapes in the files that transformers 5.22 saves of these draws, by how often they
# occur with other numbers at `#`.
WRITTEN = json.loads((Path(__file__).parent / "names.json").read_text(encoding="utf-8"))

# Their code lies beside their weights: transformers has no class of theirs.
ELSEWHERE = {"internlm", "internlm2", "kimi_k2"}
MULTIMODAL = {"gemma3", "llava", "qwen2_5_vl", "qwen2_vl"}


def model_of(family: str, seed: int) -> Model:
    model = read_config({**draw(family, seed), "model_type": family})
    # transformers has no multi-token heads.
    return Model(**{**{f: getattr(model, f) for f in model.__struct_fields__}, "multi_token": None})


def links_of(model: Model) -> Iterator[ParameterMapping]:
    decoder = build_decoder(model)
    shapes = {name: tuple(value.shape) for name, value in decoder.named_parameters()}
    return map_all_parameters(get_weight_map(model), model, shapes)


def test_every_family_is_drawn() -> None:
    assert set(list_model_types()) == set(DRAWS) | ELSEWHERE | MULTIMODAL


@pytest.mark.parametrize("drawn", WRITTEN)
def test_names_and_shapes_are_those_that_transformers_writes(drawn: str) -> None:
    family, seed = drawn.split()
    found = {
        linked.tensor_mapping.checkpoint_name: linked.tensor_mapping.shape
        for linked in links_of(model_of(family, int(seed)))
    }
    counted = Counter(
        f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '#', name)} {'×'.join(map(str, shape))}"
        for name, shape in found.items()
    )
    assert dict(counted) == WRITTEN[drawn]


@pytest.mark.parametrize("family", sorted({*DRAWS} - {"phi3"}))
def test_every_number_has_exactly_one_place_on_the_other_side(family: str, tmp_path: Path) -> None:
    model = model_of(family, 0)
    decoder = build_decoder(model, device="cpu", dtype=torch.float32)
    count = 0
    with torch.no_grad():
        for parameter in decoder.parameters():
            numbers = torch.arange(count, count + parameter.numel(), dtype=torch.float32)
            parameter.copy_(numbers.view(parameter.shape))
            count += parameter.numel()
    save_hf_checkpoint(decoder, tmp_path)
    written = torch.cat(
        [part.flatten() for part in load_file(tmp_path / "model.safetensors").values()]
    )
    assert torch.equal(written.sort().values, torch.arange(count, dtype=torch.float32))
    back = load_hf_checkpoint(model, tmp_path, dtype=torch.float32)
    for ours, theirs in zip(decoder.parameters(), back.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_internlm2_puts_the_queries_of_a_key_head_beside_it() -> None:
    """As its code splits it: `(h gs d)` rows with gs = queries per key head + 2."""
    model = read_config(
        {
            "model_type": "internlm2", "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8,
            "vocab_size": 16, "bias": False,
        }
    )  # fmt: skip
    ours = torch.arange(16)[:, None].expand(16, 8).clone()
    theirs = torch.full((16, 8), -1)
    for name, link in links_of(model):
        if name.endswith("qkv.weight"):
            link.view_checkpoint(theirs).copy_(link.view_parameter(ours))
    # Two rows a head: queries 0-7, keys 8-11, values 12-15.
    assert theirs[:, 0].tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]


def test_deepseek_stores_a_multi_token_head_as_one_more_layer(tmp_path: Path) -> None:
    """Names as in the index of DeepSeek-V3's weights, whose layer 61 is its head."""
    config = {**draw("deepseek_v3", 1), "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    model = read_config(config)
    decoder = build_decoder(model, device="cpu", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    save_hf_checkpoint(decoder, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    ahead = f"model.layers.{model.layers}."
    assert {f"{ahead}{name}.weight" for name in (
        "embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head",
        "input_layernorm", "self_attn.o_proj", "mlp.experts.0.gate_proj", "mlp.gate",
    )} <= set(written)  # fmt: skip
    assert torch.equal(written[f"{ahead}embed_tokens.weight"], written["model.embed_tokens.weight"])
    back = load_hf_checkpoint(None, tmp_path, dtype=torch.float32)
    assert back.model.multi_token is not None
    for (name, ours), theirs in zip(decoder.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    # A decoder without the heads leaves them in the file.
    load_hf_checkpoint(build_decoder(model, options=BuildOptions(include_mtp=False)), tmp_path)


def test_a_part_that_the_family_has_no_name_for_is_refused() -> None:
    model = read_config({**draw("qwen3", 0), "model_type": "qwen3"})
    fields = {f: getattr(model, f) for f in model.__struct_fields__}
    with pytest.raises(
        InputError, match=r"norm_embedding.weight: a qwen3 checkpoint has no tensor for it"
    ):
        list(links_of(Model(**{**fields, "embedding_norm": True})))


def test_an_unknown_family_names_the_known_ones() -> None:
    model = read_config({**draw("llama", 0), "model_type": "llama"})
    fields = {f: getattr(model, f) for f in model.__struct_fields__}
    with pytest.raises(InputError, match=r"lama.*known are bloom, cohere"):
        get_weight_map(Model(**{**fields, "family": "lama"}))
