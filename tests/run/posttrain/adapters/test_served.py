"""The engine answers with an adapter's folder as it does with the model it was merged into."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.huggingface import load, save
from meshwright.run.posttrain.adapters import Lora, adapt, save_adapter
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.load import load_served
from meshwright.run.serve.model.lora import Adapters
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.serve.model.step import Row, step_of
from tests.run.posttrain.adapters.models import far, ours, stir
from tests.run.serve.served_folders import folder

PROMPTS = [(5, 9, 17, 3), (40, 41), (7,) * 9]


def answers(llm: LLM, adapter: str | None) -> list[tuple[int, ...]]:
    greedy = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
    asks = [Ask(prompt=prompt, sampling=greedy, adapter=adapter) for prompt in PROMPTS]
    return [each.choices[0].tokens for each in llm.answer(asks)]


KINDS = {
    "rslora": Lora(rank=4, rslora=True, targets=("q_proj", "v_proj", "down_proj")),
    "dora": Lora(rank=4, dora=True, targets=("q_proj", "v_proj", "down_proj")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_serves_what_was_trained_without_merging(kind: str, tmp_path: Path) -> None:
    base = folder("")
    decoder = load(None, base, dtype=torch.float32)
    adapter = adapt(decoder, KINDS[kind])
    stir(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    adapter.merge()
    save(decoder, tmp_path / "merged")
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / "merged" / name).write_bytes((base / name).read_bytes())
    given: dict[str, Any] = {"device": "cpu", "precision": "fp32", "max_length": 64}
    both = LLM(base, adapters={"own": str(tmp_path / "adapter")}, **given)
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
    adapter = adapt(decoder, Lora(rank=2, alpha=4, dora=dora))
    stir(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    served = load_served(tmp_path / "base", dtype=torch.float32)
    forward = Forward(served, PagedCache(served, 32, 4), max_length=24)
    slot = Adapters(forward, slots=2, rank=2, dora=dora).load("own", tmp_path / "adapter")
    prompt = [3, 5, 8, 2, 7, 1]
    with torch.no_grad():
        wanted = decoder(torch.tensor([prompt]))[0]
    found = forward.run(step_of([Row(prompt[:4], 0, range(8), adapter=slot)], 4))
    assert far(found[0], wanted[3]) < 1e-3
    for place in (4, 5):
        row = Row(prompt[place : place + 1], place, range(8), adapter=slot)
        found = forward.run(step_of([row], 4))
        assert far(found[0], wanted[place]) < 1e-3


def test_lengths_of_rounded_rows_are_refused(tmp_path: Path) -> None:
    adapter = adapt(ours(tmp_path), Lora(rank=2, dora=True))
    save_adapter(adapter, tmp_path / "adapter")
    served = load_served(tmp_path / "base", dtype=torch.float32)
    quantise(served, "fp8")
    adapters = Adapters(Forward(served, PagedCache(served, 4, 4)), slots=1, rank=2, dora=True)
    with pytest.raises(InputError, match="merge the adapter first"):
        adapters.load("own", tmp_path / "adapter")
