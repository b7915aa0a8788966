"""The engine answers with an adapter's folder as it does with the model it was merged into."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.posttrain.lora import LoRAConfig, attach_adapter, save_adapter
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.posttrain.lora.models import far, ours, stir
from tests.run.serve.served_folders import folder

PROMPTS = [(5, 9, 17, 3), (40, 41), (7,) * 9]


def answers(llm: LLM, adapter: str | None) -> list[tuple[int, ...]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    asks = [
        Request(prompt_token_ids=prompt, sampling_params=greedy, lora_name=adapter)
        for prompt in PROMPTS
    ]
    return [each.outputs[0].token_ids for each in llm.run_requests(asks)]


KINDS = {
    "rslora": LoRAConfig(rank=4, rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
    "dora": LoRAConfig(rank=4, dora=True, target_modules=("q_proj", "v_proj", "down_proj")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_serves_what_was_trained_without_merging(kind: str, tmp_path: Path) -> None:
    base = folder("")
    decoder = load_hf_checkpoint(None, base, dtype=torch.float32)
    adapter = attach_adapter(decoder, KINDS[kind])
    stir(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    adapter.merge()
    save_hf_checkpoint(decoder, tmp_path / "merged")
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / "merged" / name).write_bytes((base / name).read_bytes())
    given: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "max_model_len": 64}
    both = LLM(base, lora_modules={"own": str(tmp_path / "adapter")}, **given)
    merged = answers(LLM(tmp_path / "merged", **given), None)
    assert answers(both, "own") == merged
    assert answers(both, None) != merged
    adapter.unmerge()
    assert all(len(each) == 10 for each in merged)
    decoder.eval()
    for prompt, tokens in zip(PROMPTS, merged, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            picked = decoder(ids)[0].argmax(-1)[len(prompt) - 1 : -1]
        assert tuple(picked.tolist()) == tokens


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3", "nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_all_linear_layers_of_a_family_are_served(family: str, dora: bool, tmp_path: Path) -> None:
    decoder = ours(tmp_path, family)
    adapter = attach_adapter(decoder, LoRAConfig(rank=2, alpha=4, dora=dora))
    stir(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    served = load_served_model(tmp_path / "base", dtype=torch.float32)
    forward = ServedModel(served, PagedKVCache(served, 32, 4), max_model_len=24)
    slot = LoRAManager(forward, slots=2, max_lora_rank=2, dora=dora).load(
        "own", tmp_path / "adapter"
    )
    prompt = [3, 5, 8, 2, 7, 1]
    with torch.no_grad():
        wanted = decoder(torch.tensor([prompt]))[0]
    found = forward.forward(
        build_forward_batch([BatchRow(prompt[:4], 0, range(8), lora_slot=slot)], 4)
    )
    assert far(found[0], wanted[3]) < 1e-3
    for place in (4, 5):
        row = BatchRow(prompt[place : place + 1], place, range(8), lora_slot=slot)
        found = forward.forward(build_forward_batch([row], 4))
        assert far(found[0], wanted[place]) < 1e-3


def test_lengths_of_rounded_rows_are_refused(tmp_path: Path) -> None:
    adapter = attach_adapter(ours(tmp_path), LoRAConfig(rank=2, dora=True))
    save_adapter(adapter, tmp_path / "adapter")
    served = load_served_model(tmp_path / "base", dtype=torch.float32)
    quantize_model(served, "fp8")
    adapters = LoRAManager(
        ServedModel(served, PagedKVCache(served, 4, 4)), slots=1, max_lora_rank=2, dora=True
    )
    with pytest.raises(InputError, match="merge the adapter first"):
        adapters.load("own", tmp_path / "adapter")
