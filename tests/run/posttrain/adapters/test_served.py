"""The engine answers with an adapter's folder as it does with the model it was merged into."""

from pathlib import Path
from typing import Any

import torch

from meshwright.run.nn.huggingface import load, save
from meshwright.run.posttrain.adapters import Lora, adapt, save_adapter
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import LLM
from tests.run.posttrain.adapters.models import stir
from tests.run.serve.served_folders import folder

PROMPTS = [(5, 9, 17, 3), (40, 41), (7,) * 9]


def answers(llm: LLM, adapter: str | None) -> list[tuple[int, ...]]:
    greedy = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
    asks = [Ask(prompt=prompt, sampling=greedy, adapter=adapter) for prompt in PROMPTS]
    return [each.choices[0].tokens for each in llm.answer(asks)]


def test_the_engine_serves_what_was_trained_without_merging(tmp_path: Path) -> None:
    base = folder("")
    decoder = load(None, base, dtype=torch.float32)
    adapter = adapt(decoder, Lora(rank=4, rslora=True, targets=("q_proj", "v_proj", "down_proj")))
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
