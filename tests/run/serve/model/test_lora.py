"""Rows answer with their own adapters as transformers does with merged weights, others without."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshwright.errors import InputError
from meshwright.run.serve.engine.model_runner.decode_graphs import DecodeGraphs
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.serve.model.served_model import ServedModel
from tests.run.nn.huggingface.drawn import draw
from tests.run.nn.huggingface.reference import logits_of, reference
from tests.run.serve.model.greedy import random_prompts

MODULES = (
    "q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "query_key_value", "dense", "in_proj",
    "out_proj", "in_proj_qkvz",
)  # fmt: skip


def adapter(folder: Path, theirs: Any, rank: int, seed: int, **config: Any) -> Any:
    """Write an adapter of PEFT's for a model, and return the model with it merged."""
    folder.mkdir()
    merged = copy.deepcopy(theirs)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, **config}
    scale = 12 / (rank**0.5 if config.get("use_rslora") else rank)
    for name, module in merged.named_modules():
        if name.split(".")[-1] not in MODULES or not isinstance(module, torch.nn.Linear):
            continue
        a = torch.randn(rank, module.in_features, generator=generator) / 4
        b = torch.randn(module.out_features, rank, generator=generator) / 4
        module.weight.data += scale * b @ a
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return merged


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3", "nemotron_h", "qwen3_next"])
def test_each_row_has_its_own_adapter(family: str, tmp_path: Path) -> None:
    theirs = reference(family, draw(family, 0))
    theirs.save_pretrained(tmp_path / "base")
    models = [
        theirs,
        adapter(tmp_path / "one", theirs, 2, 1),
        adapter(tmp_path / "two", theirs, 4, 2, use_rslora=True),
    ]
    decoder = load_served_model(tmp_path / "base", dtype=torch.float32)
    forward = ServedModel(decoder, PagedKVCache(decoder, 32, 4), max_model_len=24)
    adapters = LoRAManager(forward, slots=3, max_lora_rank=4)
    slots = [-1, *(adapters.load(name, tmp_path / name) for name in ("one", "two"))]
    prompts = random_prompts(decoder.model.vocab)

    def rows(tokens: list[list[int]], begins: list[int]) -> list[BatchRow]:
        return [
            BatchRow(part, begin, range(8 * at, 8 * at + 8), at, lora_slot=slot)
            for at, (part, begin, slot) in enumerate(zip(tokens, begins, slots, strict=True))
        ]

    def equals(found: torch.Tensor, whole: list[list[int]]) -> None:
        for logits, model, prompt in zip(found, models, whole, strict=True):
            wanted = logits_of(model, torch.tensor([prompt]))[0, -1]
            # Squared activations let rounding grow; another adapter would be off by the whole.
            assert (logits - wanted).norm() < 1e-3 * wanted.norm()

    graphs = DecodeGraphs(forward, 4, adapters=True)
    equals(graphs.run(build_forward_batch(rows(prompts, [0, 0, 0]), 4)), prompts)
    step = build_forward_batch(rows([[3], [4], [5]], [len(prompt) for prompt in prompts]), 4)
    equals(graphs.run(step), [[*p, t] for p, t in zip(prompts, (3, 4, 5), strict=True)])
    adapters.unload("one")
    models[1] = theirs
    equals(forward.forward(build_forward_batch(rows(prompts, [0, 0, 0]), 4)), prompts)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_adapters_stand_beside_quantised_weights(kind: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 96,
             "intermediate_size": 64, "num_hidden_layers": 2}  # fmt: skip
    theirs = reference("llama", sizes)
    theirs.save_pretrained(tmp_path / "base")
    merged = adapter(tmp_path / "one", theirs, 2, 1)
    decoder = load_served_model(tmp_path / "base", dtype=torch.float32)
    quantize_model(decoder, kind)
    forward = ServedModel(decoder, PagedKVCache(decoder, 32, 4))
    slot = LoRAManager(forward).load("one", tmp_path / "one")
    prompt = random_prompts(96)[0]
    found = forward.forward(build_forward_batch([BatchRow(prompt, 0, range(8), lora_slot=slot)], 4))
    wanted = logits_of(merged, torch.tensor([prompt]))[0, -1]
    base = logits_of(theirs, torch.tensor([prompt]))[0, -1]
    assert (found[0] - wanted).norm() < 0.5 * (base - wanted).norm()


def test_what_is_no_adapter_of_the_model_is_refused(tmp_path: Path) -> None:
    theirs = reference("llama", draw("llama", 0))
    theirs.save_pretrained(tmp_path / "base")
    decoder = load_served_model(tmp_path / "base", dtype=torch.float32)
    adapters = LoRAManager(
        ServedModel(decoder, PagedKVCache(decoder, 4, 4)), slots=1, max_lora_rank=2
    )
    adapter(tmp_path / "wide", theirs, 4, 1)
    adapter(tmp_path / "good", theirs, 2, 1)
    other = reference("gpt_neox", draw("gpt_neox", 0))
    adapter(tmp_path / "other", other, 2, 1)
    with pytest.raises(InputError, match="rank 4, but adapters have room for 2"):
        adapters.load("a", tmp_path / "wide")
    with pytest.raises(InputError, match="no linear layer of this llama model"):
        adapters.load("a", tmp_path / "other")
    with pytest.raises(InputError, match="name a folder"):
        adapters.load("a", tmp_path / "none")
    config = tmp_path / "good" / "adapter_config.json"
    kept = config.read_text()
    for facts, match in (
        ({"use_dora": True}, "use_dora"), ({"bias": "all"}, "biases"), ({"peft_type": "IA3"}, "IA3")
    ):  # fmt: skip
        config.write_text(json.dumps({"peft_type": "LORA", **facts}))
        with pytest.raises(InputError, match=match):
            adapters.load("a", tmp_path / "good")
    config.write_text(kept)
    adapters.load("a", tmp_path / "good")
    with pytest.raises(InputError, match="all 1 slots are taken by a"):
        adapters.load("b", tmp_path / "good")
    with pytest.raises(InputError, match="loaded are: a"):
        adapters.unload("b")
