"""Adapters in PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

What is saved here opens with `peft` and in our engine, and what either saved opens here. Files are
written beside those that are there and moved into place once whole.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface.safetensors_writer import write_safetensors
from meshwright.run.posttrain.lora.adapted_linear import LoRAPair
from meshwright.run.posttrain.lora.adapter_sharding import A
from meshwright.run.posttrain.lora.decoder_adapter import (
    PEFT_PREFIX,
    DecoderAdapter,
    find_adaptable_modules,
)
from meshwright.run.posttrain.lora.lora_config import from_peft_config, to_peft_config
from meshwright.run.serve.model.peft_checkpoint import (
    LoRALayerWeights,
    read_peft_checkpoint,
    strip_module_prefix,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    adapter: DecoderAdapter,
    folder: str | Path,
    *,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter into a folder, which is made if need be.

    `base` is the path or name of the model it belongs to, which PEFT loads where it is told none;
    `dtype` is that of the file, None for the parameters' own. `tensors` are all parameters, whole,
    where ranks hold parts of them.
    """
    folder = Path(folder)
    given = dict(adapter.named_parameters()) if tensors is None else tensors
    written = {name: value.detach().to("cpu", dtype).contiguous() for name, value in given.items()}
    adapted = [name for name in adapter.adaptable_modules if f"{PEFT_PREFIX}{name}.{A}" in written]
    others = adapter.adaptable_modules.keys() - set(adapted)
    config = to_peft_config(adapter.config, adapted, others)
    config["base_model_name_or_path"] = base
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(written, folder / f".{TENSORS}", metadata={"format": "pt"})
    (folder / f".{CONFIG}").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in (TENSORS, CONFIG):
        (folder / f".{name}").replace(folder / name)


def load_adapter(
    decoder: Decoder, folder: str | Path, *, dtype: torch.dtype = torch.float32
) -> DecoderAdapter:
    """Put an adapter of a folder beside a decoder, to be trained further, merged or asked.

    `dtype` is that of its parameters.
    """
    config, found = read_peft_checkpoint(folder)
    settings = from_peft_config(config)
    shapes = find_adaptable_modules(decoder)
    names = {strip_module_prefix(name): name for name in shapes}
    problems = []
    for short, low in found.items():
        given, wanted = (len(low.lora_b), low.lora_a.shape[1]), shapes.get(names.get(short, ""))
        if wanted is None:
            what = f"changes {short}, which is no linear layer of this {decoder.model.family} model"
        elif given != shapes[names[short]]:
            what = (
                f"{short} has {given[0]} outputs and {given[1]} inputs, not {shapes[names[short]]}"
            )
        else:
            continue
        problems.append(Problem(str(folder), what, "use an adapter of this very model"))
    if not found:
        problems.append(Problem(str(folder), "holds no module", "save the adapter again"))
    if problems:
        raise InputError(problems)
    device = decoder.embedding.weight.device

    def pair(low: LoRALayerWeights) -> LoRAPair:
        magnitude = None if low.magnitude is None else low.magnitude.to(device, dtype)
        a, b = low.lora_a.to(device, dtype), low.lora_b.to(device, dtype)
        return LoRAPair(a, b, magnitude, scale=low.scaling, dropout=settings.dropout)

    chosen = {names[short]: pair(low) for short, low in found.items()}
    own_ranks = {name: len(each.lora_A.weight) for name, each in chosen.items()}
    amiss = {name: rank for name, rank in own_ranks.items() if settings.rank_of(name) != rank}
    if amiss:
        # Patterns of another version of PEFT: the matrices themselves tell.
        settings = replace(settings, rank_pattern={**amiss, **settings.rank_pattern})
    return DecoderAdapter(decoder, settings, chosen)
