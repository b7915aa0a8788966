"""Folders open on both sides: `peft` opens what is saved here, and what it saves is loaded."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.posttrain.lora import LoRAConfig, attach_adapter, load_adapter, save_adapter
from tests.run.nn.huggingface.reference import logits_of, opened
from tests.run.posttrain.lora.models import both, far, ours, stir, tokens

KINDS = {
    "lora": LoRAConfig(rank=3, alpha=5),
    "rslora": LoRAConfig(rank=4, rslora=True, target_modules=("q_proj", "v_proj", "dense",
    "in_proj")),
    "dora": LoRAConfig(rank=2, dora=True),
    "patterns": LoRAConfig(
        rank=2, target_modules=r".*(self_attn|mlp)\.\w*_proj",
        rank_pattern={"v_proj": 5, r"layers\.1\.mlp\.\w+": 1}, alpha_pattern={"o_proj": 3.0},
    ),
}  # fmt: skip


def peft() -> Any:
    return pytest.importorskip("peft", reason="needs peft as the reference")


def slope(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_what_is_saved_here(kind: str, tmp_path: Path) -> None:
    theirs, decoder = both(tmp_path)
    adapter = attach_adapter(decoder, KINDS[kind])
    stir(adapter)
    save_adapter(adapter, tmp_path / "adapter", base=str(tmp_path / "base"))
    model = peft().PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    ids = tokens(decoder.model.vocab)
    found, wanted = decoder(ids), model(ids, use_cache=False).logits
    assert far(found, wanted) < 1e-4
    found.backward(slope(found))
    wanted.backward(slope(found))
    given = {
        name.replace(".default", "").replace("vector.weight", "vector"): value.grad
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    assert given.keys() == {name for name, _ in adapter.named_parameters()}
    for name, value in adapter.named_parameters():
        assert value.grad is not None
        assert far(value.grad, given[name]) < 1e-3, name
    merged = model.merge_and_unload()
    adapter.merge()
    save_hf_checkpoint(decoder, tmp_path / "merged")
    for name, value in opened(tmp_path / "merged").named_parameters():
        assert far(value, merged.get_parameter(name)) < 1e-5


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("llama", {"r": 3, "target_modules": "all-linear", "use_rslora": True}),
        ("llama", {"r": 2, "target_modules": ["k_proj", "down_proj"], "use_dora": True}),
        ("llama", {"r": 2, "target_modules": ["v_proj"], "alpha_pattern": {"layers.1.*": 7}}),
        ("gpt_neox", {"r": 2, "target_modules": ["query_key_value"], "use_dora": True}),
        ("nemotron_h", {"r": 2, "target_modules": ["in_proj", "q_proj", "o_proj"]}),
    ],
)
def test_what_peft_saves_is_loaded(family: str, facts: dict[str, Any], tmp_path: Path) -> None:
    theirs, decoder = both(tmp_path, family)
    config = peft().LoraConfig(lora_alpha=5, init_lora_weights=False, **facts)
    torch.manual_seed(0)
    model = peft().get_peft_model(theirs, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "magnitude" in name:
                value.mul_(1 + 0.2 * torch.randn_like(value))
    model.save_pretrained(tmp_path / "adapter")
    adapter = load_adapter(decoder, tmp_path / "adapter")
    ids = tokens(decoder.model.vocab)
    wanted = logits_of(model, ids)
    assert far(decoder(ids), wanted) < 1e-4
    with adapter.disable_adapter():
        assert far(decoder(ids), wanted) > 0.01
    save_adapter(adapter, tmp_path / "again")
    kept, again = (load_file(tmp_path / name / "adapter_model.safetensors")
                   for name in ("adapter", "again"))  # fmt: skip
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    decoder = ours(tmp_path, dtype=torch.bfloat16)
    adapter = attach_adapter(decoder, KINDS[kind])
    stir(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    ids = tokens(decoder.model.vocab)
    wanted = decoder(ids)
    adapter.remove()
    again = load_adapter(decoder, tmp_path / "adapter")
    assert torch.equal(decoder(ids), wanted)
    assert dict(again.state_dict()).keys() == dict(adapter.state_dict()).keys()
    assert all(value.requires_grad and value.dtype == torch.float32 for value in again.parameters())
    assert (again.config.rank, again.config.alpha_pattern) == (
        KINDS[kind].rank,
        KINDS[kind].alpha_pattern,
    )


def test_files_of_an_adapter_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    _, decoder = both(tmp_path)
    before = os.umask(0o022)
    try:
        save_adapter(attach_adapter(decoder, KINDS["lora"]), tmp_path / "adapter", base="base")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "adapter").iterdir()}
    assert set(modes.values()) == {0o644}, modes


def test_names_are_whole_where_other_modules_end_alike(tmp_path: Path) -> None:
    decoder = ours(tmp_path)
    adapter = attach_adapter(
        decoder, LoRAConfig(target_modules=(r"layers.0.self_attn.q_proj", "v_proj"))
    )
    save_adapter(adapter, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj", "v_proj"]


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    decoder = ours(tmp_path)
    adapter = attach_adapter(decoder, LoRAConfig(rank=2))
    path = tmp_path / "adapter"
    save_adapter(adapter, path)
    adapter.remove()
    tensors = load_file(path / "adapter_model.safetensors")

    def refused(changed: dict[str, Tensor], match: str) -> None:
        save_file(changed, path / "adapter_model.safetensors")
        with pytest.raises(InputError, match=match):
            load_adapter(decoder, path)

    first = next(iter(tensors))
    refused({name.replace("q_proj", "wq"): value for name, value in tensors.items()}, "no linear")
    refused({name: value for name, value in tensors.items() if name != first}, "do not fit")
    narrow = {name: value[:, 1:] if "lora_A" in name else value for name, value in tensors.items()}
    refused({name: value.contiguous() for name, value in narrow.items()}, "inputs, not")
    refused({**tensors, "base_model.model.lm_head.weight": torch.ones(2)}, "lm_head.weight")
    refused({}, "holds no module")
    save_file(tensors, path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(InputError, match="do not fit each other"):
        load_adapter(decoder, path)


def test_settings_of_peft_say_what_ours_say(tmp_path: Path) -> None:
    decoder = ours(tmp_path)
    for number, (name, settings) in enumerate(KINDS.items()):
        adapter = attach_adapter(decoder, settings)
        save_adapter(adapter, tmp_path / f"{number}")
        adapter.remove()
        config = peft().LoraConfig.from_pretrained(tmp_path / f"{number}")
        assert (config.r, config.use_rslora, config.use_dora) == (
            settings.rank, settings.rslora, settings.dora,
        ), name  # fmt: skip
        assert all(not re.search(r"\W", end) for end in config.target_modules), name


def test_a_merged_model_is_one_for_transformers(tmp_path: Path) -> None:
    decoder = ours(tmp_path)
    adapter = attach_adapter(decoder, LoRAConfig(rank=2, dora=True))
    stir(adapter)
    adapter.merge(keep=False)
    save_hf_checkpoint(decoder, tmp_path / "merged")
    ids = tokens(decoder.model.vocab)
    assert far(decoder(ids), logits_of(opened(tmp_path / "merged"), ids)) < 1e-5
    again = load_hf_checkpoint(None, tmp_path / "merged", dtype=torch.float32)
    assert torch.equal(again(ids), decoder(ids))
